"""The protocol of environments with several agents.

In the shape descriptions, `E` is the number of parallel environments and `A` the number of agents of one environment.
"""

from typing import Any, NamedTuple, Protocol

import jax

from msrl_jax.envs.base import PyTree
from msrl_jax.envs.spaces import Space


class MultiAgentEnvironment(Protocol):
    """An environment with `A` agents as pure functions: no automatic reset, no key in the state.

    Arrays of agents have a leading dimension `A`; all agents have the same spaces (`stack_agents` pads others). The attribute
    `agents` tells such an environment from one with a single agent.

    Two methods are optional. `action_mask(state) -> [A, n]` bool: the legal actions of every agent. `global_state(state) ->
    [S]` float32: what a centralized critic or a mixer sees; without it, they see the observations of all agents.
    """

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents, in the order of all arrays."""
        ...

    @property
    def observation_space(self) -> Space:
        """The space of the observations of one agent."""
        ...

    @property
    def action_space(self) -> Space:
        """The space of the actions of one agent."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode.

        Args:
          key: typed PRNG key (`jax.random.key`).

        Returns:
          The state, and the first observations `[A, ...]`.
        """
        ...

    def step(
        self, key: jax.Array, state: PyTree, action: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array, jax.Array]:
        """Advances an episode by one action of every agent.

        Args:
          key: typed PRNG key, a fresh one for every step.
          state: the state that `reset` or the last `step` returned.
          action: an element of `action_space` for every agent; those of agents that have left are ignored. `[A, ...]`

        Returns:
          The next state; the next observations `[A, ...]`; the rewards `[A]`; `terminated` `[A]` bool: which agents have
          reached a terminal state, so that no reward of theirs can follow; `truncated`, a bool: the episode was cut short.
          The episode ends when it is truncated, or when all agents have terminated.
        """
        ...


class MultiAgentTimeStep(NamedTuple):
    """The outcome of one step of `E` environments with `A` agents.

    An agent that has terminated is absent until its episode ends: its rewards are 0, and it stays terminated.

    Attributes:
      obs: observations for the next actions; the first of a new episode if the episode ended. `[E, A, ...]`
      reward: rewards. `[E, A]` float32
      terminated: which agents have terminated in this step or before. `[E, A]` bool
      truncated: whether the episode was cut short. `[E]` bool
      final_obs: the true next observations, before any reset. `[E, A, ...]`
      present: which agents were in the episode when they acted, so that the step counts for them. `[E, A]` bool
      ended: whether the episode ended: it was truncated, or all agents have terminated. `[E]` bool
      state: the global state for the next actions. `[E, S]` float32
      final_state: the global state that belongs to `final_obs`. `[E, S]` float32
    """

    obs: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: PyTree
    present: jax.Array
    ended: jax.Array
    state: jax.Array
    final_state: jax.Array


def has_agents(env: Any) -> bool:
    """Whether an environment has several agents: whether it has an attribute `agents`."""
    return hasattr(env, "agents")
