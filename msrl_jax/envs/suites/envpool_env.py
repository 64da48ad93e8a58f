"""EnvPool's environments (https://github.com/sail-sg/envpool; Weng et al. 2022, arXiv 2206.10558): simulators in threads."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import NamedEnvironment
from msrl_jax.envs.episode_metrics import Reduction, read_declared
from msrl_jax.envs.host_simulators import HostStep, HostVectorized, Stepping
from msrl_jax.envs.suites import common
from msrl_jax.envs.suites.gymnasium_env import convert_space
from msrl_jax.fragments.support.checks import suggestion, whole


def make(
    name: str, *, num_threads: int | None = None, metrics: Mapping[str, Reduction] | str | None = None, **params: Any
) -> "EnvPoolEnvironment":
    """Makes an environment of EnvPool by its id, such as "Pong-v5"; without `num_threads`, EnvPool chooses their number.

    `metrics` are keys of `info`, as in `GymnasiumEnvironment`: `"reward=sum,lives=last"` for Atari games. Images are
    `[H, W, C]`, with the last frames as channels. Other parameters are options of the environment; for Atari, such as
    `frame_skip=4`, `stack_num=4`, `episodic_life=True`, `repeat_action_probability=0.25` and `reward_clip=True`.
    """
    envpool = common.load("envpool")
    full = common.full_name("envpool", name, envpool.list_all_envs())
    adapter_params = {"num_envs", "batch_size", "num_threads", "seed", "env_seed", "gym_reset_return_info"}
    options = set(common.build(full, functools.partial(envpool.make_spec, name), {}).config._fields)
    common.check_params(full, params, options - adapter_params | {"num_threads", "metrics"})
    threads = 0 if num_threads is None else whole(f"{full}: num_threads", num_threads)
    spec = common.build(full, functools.partial(envpool.make_spec, name), params)
    if spec.config.max_num_players > 1:
        raise TypeError(f"{full} has {spec.config.max_num_players} players; only single-player environments are supported")
    declared, reports = read_declared(full, metrics), _reports(spec)
    for metric in declared:
        if metric not in reports:
            raise ValueError(f"{full} has no metric {metric!r}{suggestion(metric, reports)}; its info has {', '.join(reports)}")
    return EnvPoolEnvironment(full, name, params, threads, declared)


def _reports(spec: Any) -> list[str]:
    """Returns the numeric entries of `info` with one value per environment."""
    scalars = [key for key, x in spec.state_array_spec.items() if tuple(x.shape) in ((), (-1,)) and x.dtype.kind in "biuf"]
    names = [key[5:] for key in scalars if key.startswith("info:") and key[5:].isidentifier()]
    return ["elapsed_step", *(key for key in names if key != "env_id")]


class EnvPoolEnvironment(NamedEnvironment):
    """Environments that EnvPool steps in its own threads.

    Every environment has a seed. EnvPool resets an environment in the step after the end of an episode; here, that reset is
    part of the step that ends it.
    """

    on_host = True

    def __init__(self, name: str, task: str, params: Mapping[str, Any], num_threads: int, metrics: Mapping[str, Reduction]):
        self.name, self.task, self.params, self.num_threads, self.metrics = name, task, params, num_threads, metrics
        spec = self._make(num_envs=1, seed=0).spec
        with common.quiet():
            obs, self.action_space = (
                convert_space(getattr(spec, f"gymnasium_{x}_space"), name) for x in ("observation", "action")
            )
        obs = spaces.map_arrays(_without_bounds, obs)  # EnvPool's bounds are often wrong
        self.has_images = False
        if isinstance(obs, spaces.Box) and obs.dtype == np.uint8 and len(obs.shape) == 3:
            self.has_images, obs = True, spaces.Box(0, 255, (*obs.shape[1:], obs.shape[0]), np.uint8)
        self.observation_space = obs

    def vectorize(self, num_envs: int) -> HostVectorized:
        """Makes `E` copies; threads start at their first reset."""
        start = functools.partial(Pools, self._make, self._observed, whole("num_envs", num_envs), tuple(self.metrics))
        return HostVectorized(self, num_envs, Stepping(start, num_envs))

    def _observed(self, obs: Any) -> Any:
        """EnvPool's observations with the shapes and dtypes of the space."""
        if self.has_images:
            return np.ascontiguousarray(np.moveaxis(obs, -3, -1))
        return jax.tree.map(lambda x, kind: np.asarray(x, kind.dtype), obs, spaces.struct(self.observation_space))

    def _make(self, **options: Any) -> Any:
        with common.quiet():
            return common.load("envpool").make_gymnasium(self.task, num_threads=self.num_threads, **options, **self.params)


def _without_bounds(space: spaces.Discrete | spaces.Box) -> spaces.Space:
    """Returns the space without bounds, if its values are floats."""
    return spaces.unbounded(spaces.struct(space)) if np.issubdtype(np.dtype(space.dtype), np.floating) else space


class Pools:
    """`E` environments in a pool of EnvPool, created by `make(num_envs=..., seed=...)`; see `Simulators`."""

    def __init__(self, make: Callable[..., Any], observed: Callable[[Any], Any], num_envs: int, metrics: tuple[str, ...] = ()):
        self._make, self._observed, self._num_envs, self._metrics, self._pool = make, observed, num_envs, metrics, None

    def close(self) -> None:
        """Stops the pool."""
        self._pool = None

    def reset(self, envs: np.ndarray, seeds: np.ndarray) -> Any:
        """See `Simulators`. Some environments of EnvPool keep their random state across resets."""
        if len(envs) < self._num_envs:
            assert self._pool is not None
            return self._observed(self._pool.reset(envs.astype(np.int32))[0])
        self._pool = self._make(num_envs=len(envs), seed=(seeds & 0x7FFFFFFF).tolist())
        with common.quiet():  # EnvPool creates spaces, with warnings, on first use
            self._action_dtype = self._pool.action_space.dtype
            return self._observed(self._pool.reset()[0])

    def start(self, action: np.ndarray) -> Callable[[], HostStep]:
        """See `Simulators`."""
        assert self._pool is not None
        pool, numbers = self._pool, np.arange(self._num_envs, dtype=np.int32)
        pool.send(np.asarray(action, self._action_dtype), numbers)

        def finish() -> HostStep:
            obs, reward, terminated, truncated, info = pool.recv()
            order = np.argsort(info["env_id"])
            final_obs = jax.tree.map(lambda x: x[order], self._observed(obs))
            reward, terminated, truncated = reward[order], terminated[order].astype(bool), truncated[order].astype(bool)
            metrics = np.stack([info[name][order].astype(np.float32) for name in self._metrics], 1) if self._metrics else None
            ended = terminated | truncated
            obs = final_obs
            if ended.any():
                obs, first = jax.tree.map(np.copy, final_obs), self._observed(pool.reset(numbers[ended])[0])
                for x, new in zip(jax.tree.leaves(obs), jax.tree.leaves(first), strict=True):
                    x[ended] = new
            valid = np.ones(len(numbers), bool)
            return HostStep(obs, reward.astype(np.float32), terminated, truncated, final_obs, valid, metrics)

        return finish
