"""Goal-conditioned environments: observations contain a goal, and the reward of a step can be computed for any other goal.

An agent can therefore relabel a step with another goal (HER): `replay/relabelling.py`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Environment, PyTree, drop_weak_types, env_name, is_on_host, iter_wrapped, output_shapes
from msrl_jax.envs.check_types import check_parts, compare_types, show
from msrl_jax.envs.masks import unmasked, with_mask_of
from msrl_jax.envs.params import RandomizeParams, with_params
from msrl_jax.envs.privileged import are_privileged
from msrl_jax.fragments.support.reading import are_read

KEYS = ("observation", "achieved_goal", "desired_goal")  # as in Gymnasium-Robotics


class GoalEnvironment(Environment, Protocol):
    """An environment whose observations are dicts with the keys `observation`, `achieved_goal` and `desired_goal`.

    The desired goal is constant during an episode. Both goals are in the same space, of any kind.
    """

    def goal_reward(self, achieved: PyTree, desired: PyTree) -> tuple[jax.Array, jax.Array]:
        """Returns the reward of a step that reaches `achieved` when `desired` is the goal; `step` must return the same.

        Args:
          achieved: the `achieved_goal` of the observation after the step.
          desired: a `desired_goal`.

        Returns:
          The reward, a scalar; and whether the step terminates the episode because of the goal, a scalar bool.
        """
        ...


class Goals(NamedTuple):
    """Functions that read and replace goals, in one observation or in a batch; only `reward` computes anything."""

    achieved: Callable[[Any], PyTree]  # obs -> its achieved goal
    desired: Callable[[Any], PyTree]  # obs -> its desired goal
    replace: Callable[[Any, PyTree], Any]  # (obs, goal) -> the observation with another desired goal
    reward: Callable[[PyTree, PyTree], tuple[jax.Array, jax.Array]]  # `goal_reward`, of one pair of goals


def goals_of(env: Environment) -> Goals:
    """Returns the goals of a goal-conditioned environment, which may be wrapped.

    Args:
      env: the environment, a `GoalEnvironment`.

    Returns:
      The functions; observations may have masks.

    Raises:
      TypeError: if observations lack a key, if there is no `goal_reward`, or if a goal or a result has the wrong type.
      ValueError: if `goal_reward` depends on parameters that are drawn for every episode.
    """
    name, space = env_name(env), env.observation_space
    if are_privileged(space):
        raise TypeError(
            f"the critic of {name} sees privileged_state, in which goals cannot be replaced; train with "
            "msrl_jax.envs.Unprivileged(env)"
        )
    if not isinstance(space, spaces.Dict) or not set(KEYS) <= set(space.spaces):
        raise TypeError(
            f"observations of {name} are {space}; a goal-conditioned environment needs a Dict with {', '.join(KEYS)}. "
            "Use such a space, or remove the wrapper that flattens the observations"
        )
    if is_on_host(env) or not hasattr(env, "goal_reward"):
        place = " on a device: it is simulated on the host" if is_on_host(env) else ""
        raise TypeError(f"{name} has no method goal_reward(achieved, desired) -> (reward, terminated){place}; add one")
    reward_of: Callable[..., Any] = env.goal_reward  # type: ignore[attr-defined]
    achieved, desired = (spaces.struct(space.spaces[key]) for key in KEYS[1:])
    compare_types(achieved, desired, f"achieved_goal of {name}", "desired_goal")
    method = f"{name}.goal_reward"
    checked_reward = lambda *goals: drop_weak_types(check_parts(reward_of(*goals), method, "reward, terminated"))
    result = jax.eval_shape(checked_reward, achieved, desired)
    if any(getattr(x, "shape", None) != () for x in result) or result[1].dtype != bool:
        raise TypeError(
            f"{method} returned {', '.join(map(show, result))}; return the reward, float32[], and whether the goal terminates "
            "the episode, bool[]"
        )
    _check_constant(env, achieved, desired)

    def reward(achieved: PyTree, desired: PyTree) -> tuple[jax.Array, jax.Array]:
        reward, terminated = reward_of(achieved, desired)
        return jnp.asarray(reward, jnp.float32), jnp.asarray(terminated)

    return Goals(
        achieved=lambda obs: unmasked(obs)["achieved_goal"],
        desired=lambda obs: unmasked(obs)["desired_goal"],
        replace=lambda obs, goal: with_mask_of(obs, {**unmasked(obs), "desired_goal": goal}),
        reward=reward,
    )


def _check_constant(env: Environment, *goals: PyTree) -> None:
    """Raises ValueError if `goal_reward` depends on episode parameters, which a replay buffer does not store."""
    for inner in iter_wrapped(env):
        if isinstance(inner, RandomizeParams):
            params = output_shapes(inner.reset)[0].params
            is_read = are_read(lambda params, *g, env=inner.env: with_params(env, params).goal_reward(*g), params, *goals)
            for name, matters in zip(sorted(params), is_read, strict=True):
                if matters:
                    raise ValueError(
                        f"goal_reward of {env_name(env)} depends on {name}, which env_params draws for every episode; remove "
                        "it from env_params, or do not relabel goals"
                    )
