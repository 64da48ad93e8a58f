"""Gymnasium's environments (https://gymnasium.farama.org; Towers et al. 2024, arXiv 2407.17032), in worker processes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import cloudpickle
import gymnasium
import jax
import numpy as np

from msrl_jax._checks import whole
from msrl_jax._simulate import Layout, Leaf
from msrl_jax._spelling import suggestion
from msrl_jax.envs import spaces
from msrl_jax.envs.host.spaces import converted
from msrl_jax.envs.host.vector import HostVectorized, Stepping
from msrl_jax.envs.host.workers import Faults, Workers, default_workers
from msrl_jax.envs.suites import common


def make(
    name: str, *, num_workers: int | None = None, timeout: float = 60.0, drop_slowest: float = 0.0, **params: Any
) -> "GymnasiumEnvironment":
    """Builds an environment of Gymnasium.

    Args:
      name: a registered id, such as "HalfCheetah-v5".
      num_workers: number of worker processes; None for one per processor.
      timeout: seconds after which a worker that has not answered is started again.
      drop_slowest: share of the environments for which a step does not wait.
      **params: arguments of `gymnasium.make`, such as `max_episode_steps=100`.

    Returns:
      The environment.

    Raises:
      ValueError: on an unknown id, on a parameter that the environment refuses, or on spaces that are not supported.
    """
    if name not in gymnasium.registry:
        raise ValueError(
            f"Gymnasium has no environment {name!r}{suggestion(name, gymnasium.registry)}; `msrl-jax list --envs` lists its "
            "own ones, and GymnasiumEnvironment(factory) takes any other"
        )
    # The specification, not the name, because a worker does not know what was registered here.
    factory = functools.partial(gymnasium.make, gymnasium.spec(name), **params)
    return GymnasiumEnvironment(factory, f"gymnasium:{name}", num_workers, timeout, drop_slowest)


@dataclasses.dataclass(frozen=True, eq=False)
class GymnasiumEnvironment:
    """Environments that a function makes, in worker processes of this machine.

    A worker resets an environment in the step that ends its episode. Every episode has a seed that follows from the
    environment's seed and the number of the episode.

    Attributes:
      factory: a function without arguments that returns a `gymnasium.Env`. It is sent to the workers by `cloudpickle`, so it
        may be defined anywhere.
      name: the name in messages.
      num_workers: number of worker processes; None for one per processor.
      timeout: seconds after which a worker that has not answered is started again.
      drop_slowest: share of the environments for which a step does not wait; see `Faults`.
    """

    factory: Callable[[], gymnasium.Env[Any, Any]]
    name: str = "gymnasium environment"
    num_workers: int | None = None
    timeout: float = 60.0
    drop_slowest: float = 0.0
    on_host = True
    observation_space: spaces.Space = dataclasses.field(init=False)
    action_space: spaces.Space = dataclasses.field(init=False)

    def __post_init__(self):
        if self.num_workers is not None:
            whole(f"{self.name}: num_workers", self.num_workers)
        Faults(self.timeout, self.drop_slowest)
        if not callable(self.factory):
            raise TypeError(f"{self.name}: {self.factory!r} cannot be called; give a function that makes an environment")
        try:
            env = common.build(self.name, self.factory, {})
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"{self.name} cannot be made: {error}") from error
        if not hasattr(env, "action_space"):
            raise TypeError(f"the factory of {self.name} returned {env!r}; return a gymnasium.Env")
        for field in ("observation_space", "action_space"):
            object.__setattr__(self, field, converted(getattr(env, field), f"{self.name}: {field}"))
        env.close()
        if not isinstance(self.action_space, spaces.Discrete | spaces.Box):
            raise TypeError(f"{self.name}: actions of several parts, {self.action_space}, are not supported; flatten them")

    def vectorize(self, num_envs: int) -> HostVectorized:
        """Makes `E` copies; no process is started before their first reset."""
        whole("num_envs", num_envs)
        struct = spaces.struct(self.observation_space)
        leaves, tree = jax.tree.flatten(struct)
        paths = [tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path)
                 for path, _ in jax.tree_util.tree_leaves_with_path(struct)]  # fmt: skip
        action = spaces.struct(self.action_space)
        layout = Layout(
            num_envs,
            tuple(Leaf(path, x.shape, np.dtype(x.dtype).str) for path, x in zip(paths, leaves, strict=True)),
            (action.shape, np.dtype(action.dtype).str),
        )
        start = functools.partial(
            Workers, self.name, cloudpickle.dumps(self.factory), layout, functools.partial(jax.tree.unflatten, tree),
            num_workers=default_workers() if self.num_workers is None else self.num_workers,
            faults=Faults(self.timeout, self.drop_slowest),
        )  # fmt: skip
        return HostVectorized(self.name, num_envs, self.observation_space, self.action_space, Stepping(start, num_envs))
