"""Environments of XLand-MiniGrid (https://github.com/corl-team/xland-minigrid; Nikulin et al. 2023, arXiv 2312.12044)."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import NamedEnvironment, PyTree, Stepped, to_32_bit
from msrl_jax.envs.suites import common


def make(name: str, *, benchmark: str | None = None, **params: Any) -> "XMiniGridEnvironment":
    """Makes an environment of XLand-MiniGrid, such as "MiniGrid-DoorKey-5x5"; `params` are fields of its `EnvParams`.

    Every episode of an XLand environment ("XLand-MiniGrid-R1-9x9") has a task drawn from a benchmark, such as "small-1m", which
    is downloaded at first use. Without one, the task is `ruleset`, by default the empty one, which gives no reward.
    """
    xminigrid = common.load("xminigrid")
    full = common.full_name("xminigrid", name, xminigrid.registered_environments())
    env, defaults = xminigrid.make(name)
    has_rules = hasattr(defaults, "ruleset")
    fields = {field.name for field in dataclasses.fields(defaults)} - {"render_mode"}
    common.check_params(full, params, fields | ({"benchmark"} if has_rules else set()))
    if benchmark is not None and not has_rules:
        raise ValueError(f"{full} has a single task; only XLand-MiniGrid-... environments accept benchmark={benchmark!r}")
    values = {key: common.fit(f"{full}: {key}", value, getattr(defaults, key)) for key, value in params.items()}
    env, params = common.build(full, lambda **values: xminigrid.make(name, **values), values)
    return XMiniGridEnvironment(env, params, full, None if benchmark is None else _load_benchmark(full, xminigrid, benchmark))


def _load_benchmark(full: str, xminigrid: Any, name: str) -> Any:
    common.check_name(full, name, xminigrid.registered_benchmarks(), "benchmark")
    try:
        return xminigrid.load_benchmark(name)
    except OSError as error:
        raise RuntimeError(
            f"{full} could not download the benchmark {name!r} ({error}); connect to the internet, or set "
            "XLAND_MINIGRID_DATA to the folder that has it"
        ) from error


class XMiniGridState(NamedTuple):
    """A state of the suite, with whether the last step reached the goal."""

    env_state: PyTree
    success: jax.Array


class XMiniGridEnvironment(NamedEnvironment):
    """An environment of XLand-MiniGrid without automatic reset.

    Observations are the tiles that the agent sees, `[view_size, view_size, 2]` uint8: a kind and a color, each as a number.
    Tasks are drawn from the benchmark `tasks`; if it is None, all episodes have the task of the `EnvParams` `params`. The
    metric `success` tells whether the goal was reached, the only rewarded event.
    """

    def __init__(self, env: Any, params: Any, name: str, tasks: Any = None):
        self.env, self.params, self.name, self.tasks = env, params, name, tasks
        self.metrics = {"success": "last"}
        constants = common.load("xminigrid.core.constants")
        highest = [constants.NUM_TILES - 1, constants.NUM_COLORS - 1]
        self.observation_space = spaces.Box(0, highest, tuple(env.observation_shape(params)), jnp.uint8)
        self.action_space = spaces.Discrete(env.num_actions(params))

    def reset(self, key: jax.Array) -> tuple[XMiniGridState, jax.Array]:
        """Starts an episode."""
        params = self.params
        if self.tasks is not None:
            key, task_key = jax.random.split(key)
            params = params.replace(ruleset=self.tasks.sample_ruleset(task_key))
        first = to_32_bit(self.env.reset(params, key))
        return XMiniGridState(first.state, jnp.asarray(False)), first.observation

    def step(self, key: jax.Array, state: XMiniGridState, action: jax.Array) -> Stepped:
        """Advances the episode; random numbers come from the key in the state, as in the suite."""
        # A step of the suite only reads the state of the previous step.
        kind = common.load("xminigrid.types").TimeStep
        previous = kind(state=state.env_state, step_type=None, reward=None, discount=None, observation=None)
        timestep = to_32_bit(self.env.step(self.params, previous, action))
        terminated = timestep.last() & (timestep.discount == 0)
        state = XMiniGridState(timestep.state, timestep.reward > 0)
        return state, timestep.observation, timestep.reward, terminated, timestep.last() & ~terminated

    render_fps = 8.0

    def render(self, state: XMiniGridState) -> np.ndarray:
        """Returns the grid, with the agent's field of view."""
        draw = common.load("xminigrid.rendering.rgb_render").render
        return np.asarray(draw(np.asarray(state.env_state.grid), state.env_state.agent, self.params.view_size), np.uint8)

    def report(self, state: XMiniGridState) -> dict[str, jax.Array]:
        """Whether the last step reached the goal."""
        return {"success": state.success}
