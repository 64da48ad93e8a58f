"""Gymnasium's environments (https://gymnasium.farama.org; Towers et al. 2024, arXiv 2407.17032), in worker processes."""

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import gymnasium
import gymnasium.vector
import jax
import numpy as np
from gymnasium import spaces as gymnasium_spaces

from msrl_jax.envs import spaces
from msrl_jax.envs.base import NamedEnvironment
from msrl_jax.envs.episode_metrics import Reduction, read_declared
from msrl_jax.envs.host_simulators import HostVectorized, Stepping
from msrl_jax.envs.simulate import layout_of, measured
from msrl_jax.envs.suites import common
from msrl_jax.envs.workers import Workers, best_number
from msrl_jax.fragments.support.checks import shown, suggestion, whole
from msrl_jax.fragments.support.tracebacks import entry

_TRIED = 2.0  # seconds for which to look for a step without a metric
_TIMED_STEPS, _TIMED = 50, 0.1  # measure the time of a step with this many steps, or for this many seconds


def make(
    name: str,
    *,
    num_workers: int | None = None,
    timeout: float = 60.0,
    drop_slowest: float = 0.0,
    metrics: Mapping[str, Reduction] | str | None = None,
    **params: Any,
) -> "GymnasiumEnvironment":
    """Makes an environment by its registered id, such as "HalfCheetah-v5"; `params` are arguments of `gymnasium.make`.

    The other parameters are attributes of `GymnasiumEnvironment`.
    """
    if name not in gymnasium.registry:
        raise ValueError(
            f"Gymnasium has no environment {name!r}{suggestion(name, gymnasium.registry)}; `msrl-jax list --envs` lists "
            "Gymnasium's own, and GymnasiumEnvironment(factory) accepts any other"
        )
    # Pass the specification, not the name: workers do not see what was registered in this process.
    factory = functools.partial(gymnasium.make, gymnasium.spec(name), **params)
    return GymnasiumEnvironment(factory, f"gymnasium:{name}", num_workers, timeout, drop_slowest, metrics or {})


@entry
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GymnasiumEnvironment(NamedEnvironment):
    """Environments that a function makes, in worker processes on this machine.

    A worker resets an environment in the step that ends its episode. The seed of every episode is derived from the
    environment's seed and the number of the episode.

    Attributes:
      factory: a function without arguments that returns a `gymnasium.Env`. It is sent to the workers with `cloudpickle`, so it
        may be defined anywhere.
      name: the name in messages and figures; by default, the class of the environment, and its id if it has one.
      num_workers: number of worker processes; None for a number that suits the time of a step, which is measured with up to
        50 random steps, at most one per processor.
      timeout: number of seconds after which an unresponsive worker is killed and restarted.
      drop_slowest: share of the environments that a step does not wait for. Their rewards count in the episode statistics, but
        these steps are not used for learning. All environments of a worker are late together.
      metrics: the keys of `info` that every step reports, with their reductions over an episode: "last", "sum", "mean" or
        "max"; also as text, `"x_velocity=mean,reward_ctrl=sum"`.
    """

    factory: Callable[[], gymnasium.Env[Any, Any]]
    name: str = ""
    num_workers: int | None = None
    timeout: float = 60.0
    drop_slowest: float = 0.0
    metrics: Mapping[str, Reduction] | str = dataclasses.field(default_factory=dict[str, Reduction])
    on_host = True
    observation_space: spaces.Space = dataclasses.field(init=False)
    action_space: spaces.Space = dataclasses.field(init=False)
    _step_seconds: float = dataclasses.field(init=False)

    def __post_init__(self):
        name = self.name or "gymnasium environment"
        if self.num_workers is not None:
            whole(f"{name}: num_workers", self.num_workers)
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout!r} must be a number of seconds above 0")
        if not isinstance(self.drop_slowest, int | float) or not 0 <= self.drop_slowest < 1:
            raise ValueError(f"drop_slowest={self.drop_slowest!r} must be a share of the environments, in [0, 1)")
        if not callable(self.factory):
            raise TypeError(f"{name}: {shown(self.factory)} cannot be called; give a function that makes an environment")
        object.__setattr__(self, "metrics", read_declared(name, self.metrics))
        try:
            env = common.build(name, self.factory, {})
        except (gymnasium.error.Error, ImportError) as error:
            raise ValueError(f"{name} cannot be made: {error}") from error
        if not hasattr(env, "action_space") or isinstance(env, gymnasium.vector.VectorEnv):
            raise TypeError(f"the factory of {name} returned {shown(env)}; return a single gymnasium.Env, which is then copied")
        object.__setattr__(self, "name", self.name or _full_name(env))
        for field in ("observation_space", "action_space"):
            object.__setattr__(self, field, convert_space(getattr(env, field), f"{self.name}: {field}"))
        try:
            if self.metrics:
                _try_metrics(env, tuple(self.metrics))
            object.__setattr__(self, "_step_seconds", _step_seconds(env) if self.num_workers is None else 0.0)
        except ValueError as error:
            raise ValueError(f"{self.name}: {error}") from None
        finally:
            env.close()
        if not isinstance(self.action_space, spaces.Discrete | spaces.Box):
            raise TypeError(f"{self.name}: actions with several parts, {self.action_space}, are not supported; flatten them")

    def vectorize(self, num_envs: int) -> HostVectorized:
        """Makes `E` copies; processes start at their first reset."""
        struct = spaces.struct(self.observation_space)
        leaves = jax.tree.leaves_with_path(struct)
        obs = {tuple(getattr(key, "key", getattr(key, "idx", None)) for key in path): x for path, x in leaves}
        layout = layout_of(whole("num_envs", num_envs), obs, spaces.struct(self.action_space), tuple(self.metrics))
        unflatten = functools.partial(jax.tree.unflatten, jax.tree.structure(struct))
        start = functools.partial(
            Workers,
            self.name,
            cloudpickle.dumps(self.factory),
            layout,
            unflatten,
            num_workers=self.num_workers or best_number(num_envs, self._step_seconds),
            timeout=self.timeout,
            drop_slowest=self.drop_slowest,
        )
        return HostVectorized(self, num_envs, Stepping(start, num_envs))

    def film(self, act: Callable[[Any], np.ndarray], seed: int, max_steps: int) -> tuple[list[np.ndarray], float, float]:
        """Plays an episode in this process; `act` maps an observation to an action.

        Returns:
          The frames `[H, W, 3]` uint8, their number per second, and the return.
        """
        common.no_windows()
        try:
            env = self.factory(render_mode="rgb_array")  # type: ignore[call-arg]
        except TypeError as error:
            raise ValueError(
                f"{self.name} cannot be drawn ({error}); its factory must take render_mode, as gymnasium.make does"
            ) from None
        try:
            obs, _ = env.reset(seed=seed)
            pictures, total, ended = [env.render()], 0.0, False
            while not ended and len(pictures) <= max_steps:
                action = act(obs)
                discrete = isinstance(self.action_space, spaces.Discrete)
                obs, reward, terminated, truncated, _ = env.step(int(action) if discrete else action)
                pictures.append(env.render())
                total, ended = total + float(reward), terminated or truncated
            return [np.asarray(x) for x in pictures], float(env.metadata.get("render_fps", 30)), total
        except gymnasium.error.DependencyNotInstalled as error:
            raise ValueError(f"{self.name} cannot be drawn: {error}") from error
        finally:
            env.close()


def _full_name(env: Any) -> str:
    """Returns the class of an environment, or of its outermost wrapper that is not from Gymnasium, and its id if it has one."""
    inner = env
    while isinstance(inner, gymnasium.Wrapper) and type(inner).__module__.startswith("gymnasium."):
        inner = inner.env
    spec = getattr(env, "spec", None)
    return type(inner).__name__ if spec is None else f"{type(inner).__name__} ({spec.id})"


def _try_metrics(env: gymnasium.Env[Any, Any], names: tuple[str, ...]) -> None:
    """Takes random actions until the first episode or the time ends; raises ValueError if a step lacks a metric."""
    env.reset(seed=0)
    env.action_space.seed(0)
    end, ended = time.monotonic() + _TRIED, False
    while not ended:
        *_, terminated, truncated, info = env.step(env.action_space.sample())
        measured(info, names)
        ended = terminated or truncated or time.monotonic() > end


def _step_seconds(env: gymnasium.Env[Any, Any]) -> float:
    """Measures the median time of a step; infinity if the environment fails, which its worker then reports."""
    times: list[float] = []
    try:
        env.reset(seed=0)
        env.action_space.seed(0)
        while len(times) < _TIMED_STEPS and sum(times) < _TIMED:
            action, start = env.action_space.sample(), time.perf_counter()
            *_, terminated, truncated, _ = env.step(action)
            times.append(time.perf_counter() - start)
            if terminated or truncated:
                env.reset()
    except Exception:
        return math.inf
    return statistics.median(times)


def convert_space(space: Any, place: str) -> spaces.Space:
    """Converts a Gymnasium space, that of `place`; 64-bit numbers become 32-bit numbers."""
    if 0 in (getattr(space, "shape", None) or ()) or not getattr(space, "spaces", [0]):
        raise TypeError(f"{place} is {space}, which has no elements; give it at least one, for example a constant")
    match space:
        case gymnasium_spaces.Discrete():
            if max(abs(int(space.start)), int(space.start + space.n)) > np.iinfo(np.int32).max:
                raise TypeError(f"{place} is {space}, whose numbers exceed int32; wrap the environment")
            return spaces.Discrete(int(space.n), start=int(space.start))
        case gymnasium_spaces.Box():
            dtype: Any = space.dtype
            bounds = (space.low, space.high)
            if dtype.itemsize == 8 and dtype.kind in "fiu":
                dtype = np.dtype(f"{dtype.kind}4")
            if dtype.kind in "iu":
                bounds = (np.clip(bound, np.iinfo(dtype).min, np.iinfo(dtype).max) for bound in bounds)
            return spaces.Box(*bounds, space.shape, dtype)
        case gymnasium_spaces.MultiDiscrete():
            return spaces.Box(space.start, space.start + space.nvec - 1, space.shape, np.int32)
        case gymnasium_spaces.MultiBinary():
            return spaces.Box(0, 1, space.shape, np.int8)
        case gymnasium_spaces.Tuple():
            return spaces.Tuple(tuple(convert_space(part, place) for part in space.spaces))
        case gymnasium_spaces.Dict():
            return spaces.Dict({name: convert_space(part, place) for name, part in space.spaces.items()})
    raise TypeError(f"{place} is {space}, which is not supported; use Box, Discrete, MultiDiscrete, Tuple or Dict")
