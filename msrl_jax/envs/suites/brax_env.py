"""Environments of Brax (https://github.com/google/brax; Freeman et al. 2021, arXiv 2106.13281)."""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._checks import whole
from msrl_jax.envs import spaces
from msrl_jax.envs.base import Environment, PyTree, strong
from msrl_jax.envs.suites import common
from msrl_jax.envs.wrappers import TimeLimit


def make(name: str, *, episode_length: int = 1000, action_repeat: int = 1, **params: Any) -> Environment:
    """Builds an environment of Brax.

    Args:
      name: one of Brax's names, such as "halfcheetah".
      episode_length: steps of physics after which an episode is truncated, as in Brax.
      action_repeat: how often the physics takes each action.
      **params: arguments of the environment's constructor, such as `backend="mjx"`.

    Returns:
      The environment.

    Raises:
      ValueError: on an unknown name, on a parameter that the environment lacks, or a value that it refuses.
    """
    kinds = common.load("brax.envs")._envs
    common.check_name("Brax", name, kinds)
    full = f"brax:{name}"
    common.check_params(full, params, common.arguments_of(kinds[name]) | {"episode_length", "action_repeat"})
    return limited(BraxEnvironment(common.build(full, kinds[name], params), full), episode_length, action_repeat)


def limited(env: "BraxEnvironment", episode_length: int, action_repeat: int) -> Environment:
    """An environment that repeats actions, and truncates episodes."""
    whole(f"{env.name}: episode_length", episode_length)
    whole(f"{env.name}: action_repeat", action_repeat)
    return TimeLimit(dataclasses.replace(env, action_repeat=action_repeat), -(-episode_length // action_repeat))


@dataclasses.dataclass(frozen=True, eq=False)
class BraxEnvironment:
    """An environment of Brax, or of a suite with Brax's states, without wrappers.

    Brax's `done` is the end of the task. Its physics draws no random numbers, so the keys of steps are not used.

    Attributes:
      env: the environment of the suite.
      name: its name in messages.
      action_repeat: how often the physics takes each action; rewards are summed, also after the end of the task, as in Brax.
    """

    env: Any
    name: str
    action_repeat: int = 1
    observation_space: spaces.Space = dataclasses.field(init=False)
    action_space: spaces.Box = dataclasses.field(init=False)

    def __post_init__(self):
        _, obs = common.emitted(self.reset)
        object.__setattr__(self, "observation_space", common.unbounded(obs))
        object.__setattr__(self, "action_space", spaces.Box(-1, 1, (self.env.action_size,)))

    @property
    def default_params(self) -> dict[str, jax.Array]:
        """The arrays of floats of the system of bodies, by their path in it, such as `opt.gravity` or `dof.damping`."""
        arrays = [(path, x) for path, x in jax.tree.leaves_with_path(_model(self.env)) if "._" not in f".{_named(path)}"]
        return {_named(path): x for path, x in arrays if isinstance(x, jax.Array) and x.dtype == jnp.float32 and x.size}

    def with_params(self, params: Mapping[str, Any]) -> "BraxEnvironment":
        """The environment with other values of some of them, which may be traced."""
        model = jax.tree.map_with_path(lambda path, x: params.get(_named(path), x), _model(self.env))
        env, inner = copy.copy(self), copy.copy(self.env)
        setattr(inner, _field(inner), model)
        object.__setattr__(env, "env", inner)
        return env

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        with common.quiet():
            state = strong(self.env.reset(key))
        return state, state.obs

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> common.Stepped:
        """Advances the episode."""

        def once(state, _):
            with common.quiet():
                try:
                    state = strong(self.env.step(state, action))
                except TypeError as error:  # of an action of the right type
                    raise RuntimeError(
                        f"{self.name} fails in a step of its own, as its package does not fit JAX {jax.__version__}: {error}; "
                        "use another environment, or other versions of the two"
                    ) from error
            return state, state.reward

        if self.action_repeat == 1:
            state, reward = once(state, None)
        else:
            state, rewards = jax.lax.scan(once, state, length=self.action_repeat)
            reward = jnp.sum(rewards)
        return state, state.obs, reward, state.done.astype(bool), jnp.asarray(False)


def _field(env: Any) -> str:
    """The attribute with the system of bodies, Brax's or Playground's."""
    return "sys" if hasattr(env, "sys") else "_mjx_model"


def _model(env: Any) -> Any:
    return getattr(env, _field(env))


def _named(path: Any) -> str:
    return ".".join(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key)))) for key in path)
