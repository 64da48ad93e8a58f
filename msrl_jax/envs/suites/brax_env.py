"""Environments of Brax (https://github.com/google/brax; Freeman et al. 2021, arXiv 2106.13281)."""

import copy
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Environment, NamedEnvironment, PyTree, Stepped, output_shapes, to_32_bit
from msrl_jax.envs.suites import common
from msrl_jax.envs.wrappers import TimeLimit
from msrl_jax.fragments.support.checks import whole


def make(name: str, *, episode_length: int = 1000, action_repeat: int = 1, **params: Any) -> Environment:
    """Makes an environment of Brax, such as "halfcheetah", that is truncated after `episode_length` physics steps.

    The physics repeats each action `action_repeat` times. Other parameters are constructor arguments, e.g. `backend="mjx"`.
    """
    kinds = common.load("brax.envs")._envs
    full = common.full_name("brax", name, kinds)
    common.check_params(full, params, common.arguments_of(kinds[name]) | {"episode_length", "action_repeat"})
    return limited(common.build(full, kinds[name], params), full, episode_length, action_repeat)


def limited(env: Any, name: str, episode_length: int, action_repeat: int) -> Environment:
    """Wraps an environment of Brax, or of a suite with Brax's states, to repeat actions and truncate episodes."""
    whole(f"{name}: episode_length", episode_length)
    whole(f"{name}: action_repeat", action_repeat)
    return TimeLimit(BraxEnvironment(env, name, action_repeat), -(-episode_length // action_repeat))


class BraxEnvironment(NamedEnvironment):
    """An environment of Brax, or of a suite with Brax's states, without wrappers.

    If observations are {"state", "privileged_state"}, as in parts of Playground, actors see the first and critics the second.
    Brax's `done` is a termination. Its physics draws no random numbers, so `step` ignores its key. As in Brax, rewards of
    repeated actions are summed, even after a termination, and metrics are those of the last repetition: names that start with
    `reward` are summed over the episode, others averaged.
    """

    def __init__(self, env: Any, name: str, action_repeat: int = 1):
        self.env, self.name, self.action_repeat = env, name, action_repeat
        state = output_shapes(lambda key: self.reset(key)[0])
        self.observation_space = spaces.unbounded(_actor_obs(state))
        if _actor_obs(state) is not state.obs:
            self.privileged_state = _privileged_state
        self.metrics = {key: "sum" if key.startswith("reward") else "mean" for key in common.scalars(state.metrics)}
        self.action_space = spaces.Box(-1, 1, (env.action_size,))

    @property
    def default_params(self) -> dict[str, jax.Array]:
        """The float arrays of the physical system by path, such as `opt.gravity` or `dof.damping`."""
        model = getattr(self.env, _field(self.env))
        arrays = [(path, x) for path, x in jax.tree.leaves_with_path(model) if "._" not in f".{_path_name(path)}"]
        return {_path_name(path): x for path, x in arrays if isinstance(x, jax.Array) and x.dtype == jnp.float32 and x.size}

    def with_params(self, params: Mapping[str, Any]) -> "BraxEnvironment":
        """Returns the environment with other, possibly traced, values for some parameters."""
        env, inner = copy.copy(self), copy.copy(self.env)
        model = jax.tree.map_with_path(lambda path, x: params.get(_path_name(path), x), getattr(inner, _field(inner)))
        setattr(inner, _field(inner), model)
        env.env = inner
        return env

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        with common.quiet():
            state = to_32_bit(self.env.reset(key))
        return state, _actor_obs(state)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Advances the episode."""

        def once(state, _):
            with common.quiet():
                try:
                    state = to_32_bit(self.env.step(state, action))
                except TypeError as error:  # although the action has the right type
                    raise RuntimeError(
                        f"{self.name} fails in its step, because its package does not support JAX {jax.__version__}: "
                        f"{error}; use another environment, or other versions of both packages"
                    ) from error
            return state, state.reward

        if self.action_repeat == 1:
            state, reward = once(state, None)
        else:
            state, rewards = jax.lax.scan(once, state, length=self.action_repeat)
            reward = jnp.sum(rewards)
        return state, _actor_obs(state), reward, state.done.astype(bool), jnp.asarray(False)

    @functools.cached_property
    def _camera(self) -> common.Camera:
        return common.Camera(self.env.mj_model if hasattr(self.env, "mj_model") else self.env.sys.mj_model, self.name)

    @property
    def render_fps(self) -> float:
        """Frames per second of simulated time."""
        return float(1 / (self.env.dt * self.action_repeat))

    def render(self, state: Any) -> np.ndarray:
        """Returns an image rendered by MuJoCo."""
        if hasattr(state, "pipeline_state"):
            return self._camera(state.pipeline_state.q, state.pipeline_state.qd)
        data = state.data
        return self._camera(data.qpos, data.qvel, data.mocap_pos, data.mocap_quat)

    def report(self, state: Any) -> dict[str, jax.Array]:
        """Returns the metrics of the last step, such as the terms of the reward."""
        return common.scalars(state.metrics)


def _actor_obs(state: Any) -> PyTree:
    """Returns the observation of the actor in a state."""
    split = isinstance(state.obs, Mapping) and state.obs.keys() == {"state", "privileged_state"}
    return state.obs["state"] if split else state.obs


def _privileged_state(state: Any) -> PyTree:
    return state.obs["privileged_state"]


def _field(env: Any) -> str:
    """Returns the attribute that holds the physical system, in Brax or Playground."""
    return "sys" if hasattr(env, "sys") else "_mjx_model"


def _path_name(path: Any) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)
