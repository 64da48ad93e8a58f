"""Checks that an environment with several agents returns what it says, from shapes alone."""

from typing import Any

import jax

from msrl_jax.envs import spaces
from msrl_jax.envs.agents.base import MultiAgentEnvironment
from msrl_jax.envs.base import env_name, strong
from msrl_jax.envs.conformity import check_space, compare_types, is_real, returned, show
from msrl_jax.envs.masks import has_masks


def check_agents(env: MultiAgentEnvironment) -> None:
    """Checks the types of the results of an environment, without computing anything.

    Args:
      env: the environment.

    Raises:
      TypeError: if a member is missing, or a result does not fit the protocol; the message names it.
    """
    name = env_name(env)
    missing = [m for m in ("agents", "observation_space", "action_space", "reset", "step") if not hasattr(env, m)]
    if missing:
        dicts = "; stack_agents(env) makes them of dicts by agent name" if hasattr(env, "observation_spaces") else ""
        raise TypeError(
            f"{name} has no {missing[0]}; an environment of several agents has agents, observation_space, action_space, "
            f"reset, step{dicts}"
        )
    check_names(name, env.agents)
    for field in ("observation_space", "action_space"):
        check_space(getattr(env, field), f"{name}.{field}")
    count = len(env.agents)
    of_agents = f"for each of its {count} agents"
    observation, action = (_stacked(space, count) for space in (env.observation_space, env.action_space))
    key = jax.eval_shape(lambda: jax.random.key(0))
    started = jax.eval_shape(lambda key: strong(returned(env.reset(key), f"{name}.reset", "state, obs")), key)
    state, obs = started
    compare_types(obs, observation, f"the observation of {name}.reset", f"its observation_space {of_agents}")

    parts = "state, obs, reward, terminated, truncated"
    stepped = jax.eval_shape(
        lambda key, state, action: strong(returned(env.step(key, state, action), f"{name}.step", parts)),
        key, state, action,
    )  # fmt: skip
    next_state, next_obs, reward, terminated, truncated = stepped
    compare_types(next_state, state, f"the state of {name}.step", f"that of {name}.reset")
    compare_types(next_obs, observation, f"the observation of {name}.step", f"its observation_space {of_agents}")
    if getattr(reward, "shape", None) != (count,) or not is_real(reward):
        raise TypeError(f"the reward of {name}.step is {show(reward)}; return one number {of_agents}, float32[{count}]")
    _check_flag(terminated, (count,), f"terminated of {name}.step", f"one flag {of_agents}, bool[{count}]")
    _check_flag(truncated, (), f"truncated of {name}.step", "a scalar bool, jnp.asarray(False) if never")
    if has_masks(env):
        if not isinstance(env.action_space, spaces.Discrete):
            raise TypeError(f"{name} has action_mask, but its actions are in {env.action_space}; masks need a Discrete space")
        mask = jax.eval_shape(env.action_mask, state)  # type: ignore[attr-defined]
        shape = (count, env.action_space.n)
        _check_flag(mask, shape, f"{name}.action_mask", f"one flag per action {of_agents}, bool{list(shape)}")
    if hasattr(env, "global_state"):
        joint: Any = jax.eval_shape(env.global_state, state)  # type: ignore[attr-defined]
        if getattr(joint, "ndim", None) != 1:
            raise TypeError(f"{name}.global_state returned {show(joint)}; return a vector, float32[S]")


def check_names(name: str, agents: Any) -> None:
    """Raises TypeError unless an environment names its agents, each differently; `name` is that of the environment."""
    if not isinstance(agents, tuple | list) or not agents or not all(isinstance(a, str) for a in agents):
        raise TypeError(f"{name}.agents is {agents!r}; give a tuple with the name of every agent, at least one")
    if len(set(agents)) < len(agents):
        raise TypeError(f"{name}.agents is {tuple(agents)}, which names an agent twice; give every agent its own name")


def _check_flag(x: Any, shape: tuple[int, ...], what: str, remedy: str) -> None:
    if getattr(x, "shape", None) != shape or x.dtype != bool:
        raise TypeError(f"{what} is {show(x)}; return {remedy}")


def _stacked(space: spaces.Space, count: int) -> Any:
    """The types of an array for `count` agents."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), spaces.struct(space))
