"""Environments of XLand-MiniGrid (https://github.com/corl-team/xland-minigrid; Nikulin et al. 2023, arXiv 2312.12044)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._spelling import suggestion
from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, strong
from msrl_jax.envs.suites import common


def make(name: str, *, benchmark: str | None = None, **params: Any) -> "XMiniGridEnvironment":
    """Builds an environment of XLand-MiniGrid.

    Args:
      name: one of its names, such as "MiniGrid-DoorKey-5x5" or "XLand-MiniGrid-R1-9x9".
      benchmark: a benchmark of XLand-MiniGrid, such as "small-1m", which is downloaded at first use; every episode of an
        XLand environment then has a task drawn from it. Without one, the task is `ruleset`, by default the empty one, which
        gives no reward.
      **params: fields of its `EnvParams`, such as `view_size` and `max_steps`.

    Returns:
      The environment.

    Raises:
      ValueError: on an unknown name or benchmark, on a parameter that the environment lacks, or a value that it refuses.
      RuntimeError: if the benchmark cannot be downloaded.
    """
    xminigrid = common.load("xminigrid")
    common.check_name("XLand-MiniGrid", name, xminigrid.registered_environments())
    full = f"xminigrid:{name}"
    env, defaults = xminigrid.make(name)
    has_rules = hasattr(defaults, "ruleset")
    fields = {field.name for field in dataclasses.fields(defaults)} - {"render_mode"}
    common.check_params(full, params, fields | ({"benchmark"} if has_rules else set()))
    if benchmark is not None and not has_rules:
        raise ValueError(f"{full} has one task; only those named XLand-MiniGrid-... take one of benchmark={benchmark!r}")
    values = {key: common.fit(f"{full}: {key}", value, getattr(defaults, key)) for key, value in params.items()}
    env, chosen = common.build(full, lambda **values: xminigrid.make(name, **values), values)
    return XMiniGridEnvironment(env, chosen, full, None if benchmark is None else _load_benchmark(full, xminigrid, benchmark))


def _load_benchmark(full: str, xminigrid: Any, name: str) -> Any:
    known = xminigrid.registered_benchmarks()
    if name not in known:
        raise ValueError(f"{full} has no benchmark {name!r}{suggestion(name, known)}; choose from {', '.join(known)}")
    try:
        return xminigrid.load_benchmark(name)
    except OSError as error:
        raise RuntimeError(
            f"{full} could not download the benchmark {name!r} ({error}); connect to the internet, or set "
            "XLAND_MINIGRID_DATA to the folder that has it"
        ) from error


@dataclasses.dataclass(frozen=True, eq=False)
class XMiniGridEnvironment:
    """An environment of XLand-MiniGrid without automatic reset.

    Observations are the tiles that the agent sees, `[view_size, view_size, 2]` uint8: a kind and a color, each as a number.

    Attributes:
      env: the environment of the suite.
      params: its `EnvParams`.
      name: its name in messages.
      tasks: the benchmark that tasks are drawn from; None if all episodes have the task of `params`.
    """

    env: Any
    params: Any
    name: str
    tasks: Any = None
    observation_space: spaces.Box = dataclasses.field(init=False)
    action_space: spaces.Discrete = dataclasses.field(init=False)

    def __post_init__(self):
        constants = common.load("xminigrid.core.constants")
        shape = tuple(self.env.observation_shape(self.params))
        highest = [constants.NUM_TILES - 1, constants.NUM_COLORS - 1]
        object.__setattr__(self, "observation_space", spaces.Box(0, highest, shape, jnp.uint8))
        object.__setattr__(self, "action_space", spaces.Discrete(self.env.num_actions(self.params)))

    def reset(self, key: jax.Array) -> tuple[PyTree, jax.Array]:
        """Starts an episode."""
        params = self.params
        if self.tasks is not None:
            key, task_key = jax.random.split(key)
            params = params.replace(ruleset=self.tasks.sample_ruleset(task_key))
        first = strong(self.env.reset(params, key))
        return first.state, first.observation

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> common.Stepped:
        """Advances the episode; what is random is drawn from the key in the state, as in the suite."""
        # A step of the suite reads nothing but the state of the step before.
        before = self._timestep(state=state, step_type=None, reward=None, discount=None, observation=None)
        after = strong(self.env.step(self.params, before, action))
        terminated = after.last() & (after.discount == 0)
        return after.state, after.observation, after.reward, terminated, after.last() & ~terminated

    @property
    def _timestep(self) -> Any:
        return common.load("xminigrid.types").TimeStep
