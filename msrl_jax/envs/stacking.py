"""`stack_agents`: converts environments that use dicts by agent name to arrays with an agent dimension.

In the shape descriptions, `A` is the number of agents, and `n` the largest number of discrete actions that an agent has.
"""

from collections.abc import Mapping
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import (
    MultiAgentEnvironment,
    NamedEnvironment,
    PyTree,
    Stepped,
    check_made,
    delegate,
    drop_weak_types,
    env_name,
)
from msrl_jax.envs.check_types import check_names, check_parts, check_space, compare_types, show
from msrl_jax.envs.episode_metrics import metrics_of
from msrl_jax.envs.masks import has_masks
from msrl_jax.fragments.support.tracebacks import entry


class DictEnvironment(Protocol):
    """A multi-agent environment that uses dicts by agent name, with an entry for every agent at all times.

    Two methods are optional. `action_mask(state)`: dict of the legal actions, `[n]` bool with the agent's own `n`.
    `global_state(state) -> [S]` float32. Metrics are optional, as in `Environment`.
    """

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents."""
        ...

    @property
    def observation_spaces(self) -> Mapping[str, spaces.Space]:
        """The space of each agent's observations."""
        ...

    @property
    def action_spaces(self) -> Mapping[str, spaces.Space]:
        """The space of each agent's actions."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, Mapping[str, PyTree]]:
        """Starts an episode; returns the state and the first observations."""
        ...

    def step(
        self, key: jax.Array, state: PyTree, action: Mapping[str, PyTree]
    ) -> tuple[PyTree, Mapping[str, PyTree], Mapping[str, Any], Mapping[str, Any], Any]:
        """Advances an episode by one action of every agent.

        Returns:
          The next state; dicts of the observations, the rewards, and `terminated`; `truncated`, a bool or a dict of bools: the
          episode is cut short for all agents as soon as it is for one.
        """
        ...


@entry
def stack_agents(env: DictEnvironment) -> MultiAgentEnvironment:
    """Makes a `MultiAgentEnvironment` from an environment that uses dicts by agent name.

    All agents get the same space. Vectors (Boxes with one dimension) are zero-padded to the longest. Discrete spaces get the
    size of the largest, and an `action_mask` forbids the actions that an agent does not have. Vector actions are truncated to
    the agent's own size.

    Args:
      env: the environment; its optional `action_mask`, `global_state` and metrics are kept.

    Returns:
      The environment.

    Raises:
      TypeError: if a member is missing or not a space of this package, or if the environment is a string or a class.
      ValueError: if the spaces of two agents cannot be merged; the message names the agents.
    """
    check_made(env)
    name = env_name(cast(Any, env))
    members = ("agents", "observation_spaces", "action_spaces", "reset", "step")
    if missing_names := [member for member in members if not hasattr(env, member)]:
        raise TypeError(f"{name} has no {missing_names[0]}; stack_agents needs {', '.join(members)}")
    check_names(name, env.agents)
    agents = tuple(env.agents)
    for member in ("observation_spaces", "action_spaces"):
        table = getattr(env, member)
        if missing_names := [a for a in agents if a not in table]:
            raise TypeError(f"{name}.{member} has no entry for agent {missing_names[0]!r}; give every agent a space")
        for agent in agents:
            check_space(table[agent], f"{name}.{member}[{agent!r}]")
    observation = _common_space(name, "observations", {a: env.observation_spaces[a] for a in agents})
    action = _common_space(name, "actions", {a: env.action_spaces[a] for a in agents})
    return StackedAgents(env, observation, action)


def _common_space(name: str, noun: str, table: dict[str, spaces.Space]) -> spaces.Space:
    common, is_action = next(iter(table.values())), noun == "actions"
    for agent, space in table.items():
        merged = _merge_spaces(common, space, is_action)
        if merged is None:
            first = next(a for a in table if _merge_spaces(table[a], space, is_action) is None)
            raise ValueError(
                f"{name}: the {noun} of agent {first!r} are in {table[first]}, those of agent {agent!r} in {space}. Only "
                "vectors (for actions, with equal bounds) and Discrete spaces, with the same dtype and start, can be padded; "
                "use the same space for these agents in the environment"
            )
        common = merged
    return common


def _merge_spaces(a: spaces.Space, b: spaces.Space, is_action: bool) -> "spaces.Space | None":
    """Merges the spaces of two agents: the larger Discrete space, or the longer vector with padding; None if impossible.

    The bounds of observations are widened to hold both. The bounds of action components that both have must be equal.
    """
    if a == b or type(a) is not type(b) or a.dtype != b.dtype:
        return a if a == b else None
    if isinstance(a, spaces.Discrete) and isinstance(b, spaces.Discrete):
        return None if a.start != b.start else a if a.n >= b.n else b
    if not isinstance(a, spaces.Box) or not isinstance(b, spaces.Box):
        return None
    are_vectors = len(a.shape) == len(b.shape) == 1
    if not are_vectors and (is_action or a.shape != b.shape):
        return None
    long, short = (a, b) if a.shape >= b.shape else (b, a)
    if is_action:
        count = short.shape[0]
        return long if spaces.Box(long.low[:count], long.high[:count], short.shape, short.dtype) == short else None
    low, high = short.low, short.high
    if are_vectors:
        low, high = (np.pad(bound, (0, long.shape[0] - short.shape[0])) for bound in (low, high))
    return spaces.Box(np.minimum(long.low, low), np.maximum(long.high, high), long.shape, long.dtype)


class StackedAgents(NamedEnvironment):
    """The result of `stack_agents`; it has `action_mask` and `global_state` only if there is something to return."""

    render = delegate("render")

    def __init__(self, env: DictEnvironment, observation_space: spaces.Space, action_space: spaces.Space):
        """Stacks an environment whose agents get these spaces."""
        self.env, self.name, self.agents = env, env_name(cast(Any, env)), tuple(env.agents)
        self.observation_space, self.action_space = observation_space, action_space
        agent_spaces = [env.action_spaces[agent] for agent in self.agents]
        has_mask = has_masks(env)
        if has_mask and not isinstance(action_space, spaces.Discrete):
            raise ValueError(
                f"{self.name} has action_mask, but its actions are in {agent_spaces[0]}; masks need Discrete actions"
            )
        if has_mask or (isinstance(action_space, spaces.Discrete) and any(space != action_space for space in agent_spaces)):
            self.action_mask = self._action_mask
        if hasattr(env, "global_state"):
            self.global_state = env.global_state  # type: ignore[attr-defined]
        if metrics := metrics_of(env):
            self.metrics, self.report = metrics, env.report  # type: ignore[attr-defined]

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode; returns the state and the first observations `[A, ...]`."""
        state, obs = check_parts(self.env.reset(key), f"{self.name}.reset", "state, obs")
        return state, self._stack_observations(obs, "reset")

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> Stepped:
        """Advances an episode by one action of every agent `[A, ...]`."""
        stepped = self.env.step(key, state, {agent: self._agent_action(i, action) for i, agent in enumerate(self.agents)})
        parts = "state, obs, reward, terminated, truncated"
        state, obs, reward, terminated, truncated = check_parts(stepped, f"{self.name}.step", parts)
        reward = jnp.stack([jnp.float32(x) for x in self._scalars(reward, "the rewards", None)])
        terminated = jnp.stack(self._scalars(terminated, "terminated", bool))
        if isinstance(truncated, Mapping):
            truncated = jnp.stack(self._scalars(truncated, "truncated", bool)).any()
        return state, self._stack_observations(obs, "step"), reward, terminated, jnp.asarray(truncated)

    def _action_mask(self, state: PyTree) -> jax.Array:
        """Returns the legal actions `[A, n]`: those that the environment allows and that the agent has."""
        n, *sizes = (cast(spaces.Discrete, s).n for s in (self.action_space, *map(self.env.action_spaces.get, self.agents)))
        if not has_masks(self.env):
            return jnp.arange(n) < jnp.array(sizes)[:, None]
        masks = self._by_agent(self.env.action_mask(state), "action_mask")  # type: ignore[attr-defined]
        for agent, size, mask in zip(self.agents, sizes, masks, strict=True):
            if getattr(mask, "shape", None) != (size,) or mask.dtype != bool:
                raise TypeError(f"action_mask of agent {agent!r} of {self.name} is {show(mask)}; return bool[{size}]")
        return jnp.stack([jnp.pad(mask, (0, n - len(mask))) for mask in masks])

    def _agent_action(self, i: int, actions: PyTree) -> PyTree:
        """Returns the action of agent `i` in its own space. An absent agent may choose anything, so integers are clipped."""
        space, action = self.env.action_spaces[self.agents[i]], jax.tree.map(lambda x: x[i], actions)
        if isinstance(space, spaces.Discrete):
            return jnp.minimum(action, space.high).astype(space.dtype)
        return action if space == self.action_space else action[: space.shape[0]]

    def _stack_observations(self, obs: Any, method: str) -> PyTree:
        padded, common = [], cast(Any, self.observation_space).shape
        for agent, x in zip(self.agents, self._by_agent(obs, f"the observations of {method}"), strict=True):
            space, x = self.env.observation_spaces[agent], drop_weak_types(x)
            place = f"the observation of agent {agent!r} of {self.name}.{method}"
            compare_types(x, spaces.struct(space), place, "its observation space")
            padded.append(jnp.pad(x, (0, common[0] - len(x))) if space.shape != common else x)
        return jax.tree.map(lambda *parts: jnp.stack(parts), *padded)

    def _by_agent(self, values: Any, noun: str) -> list[Any]:
        """Returns the values in the order of the agents; raises TypeError unless each agent has one."""
        if not isinstance(values, Mapping):
            raise TypeError(f"{noun} of {self.name}: got a {type(values).__name__}; return a dict by agent name")
        if missing_agents := [agent for agent in self.agents if agent not in values]:
            raise TypeError(
                f"{noun} of {self.name}: agent {missing_agents[0]!r} is missing; return an entry for every agent at all times, "
                "including agents that have left"
            )
        return [values[agent] for agent in self.agents]

    def _scalars(self, values: Any, noun: str, dtype: type | None) -> list[jax.Array]:
        """Returns the scalars of the agents; raises TypeError on other shapes, or another dtype if one is given."""
        scalars = [jnp.asarray(x) for x in self._by_agent(values, f"{noun} of step")]
        for agent, x in zip(self.agents, scalars, strict=True):
            if x.shape != () or (dtype is not None and x.dtype != dtype):
                kind = "a scalar" if dtype is None else f"a scalar {dtype.__name__}"
                raise TypeError(f"{noun} of {self.name}.step for agent {agent!r} is {show(x)}; return {kind}")
        return scalars
