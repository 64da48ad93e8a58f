"""A team as one agent: joint observations and joint actions."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs.agents.vector import VectorizedAgents
from msrl_jax.envs.base import PyTree, Wrapper


class JointObservation(NamedTuple):
    """What a team observes at once.

    Attributes:
      obs: the observations of the agents. `[..., A, ...]`
      state: the global state; `()` if the team learns without it. `[..., S]` float32
      present: which agents are still in the episode. `[..., A]` bool
    """

    obs: PyTree
    state: jax.Array | tuple[()]
    present: jax.Array


@dataclass(frozen=True)
class TeamView(Wrapper):
    """What a team sees of environments that it may share with other teams.

    Attributes:
      env: the environments.
      num_agents: number of agents of the team, `A`.
      central: whether the team learns from the global state, which can be larger than all that the agents observe.
    """

    env: VectorizedAgents
    num_agents: int
    central: bool = True

    @property
    def num_envs(self) -> int:
        """The number of environments, `E`."""
        return self.env.num_envs

    @property
    def state_size(self) -> int:
        """The length of a global state, `S`."""
        return self.env.state_size

    @property
    def observation_type(self) -> JointObservation:
        """Shapes and dtypes of one joint observation."""
        obs = jax.eval_shape(self.env.reset, jax.eval_shape(lambda: jax.random.key(0)))[1]
        obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.num_agents, *x.shape[2:]), x.dtype), obs)
        state = jax.ShapeDtypeStruct((self.state_size,), jnp.float32)
        return self.join(obs, state, jax.ShapeDtypeStruct((self.num_agents,), jnp.bool_))  # type: ignore[arg-type]

    def join(self, obs: PyTree, state: jax.Array, present: jax.Array) -> JointObservation:
        """Joins the agents' observations `[..., A, ...]`, global states `[..., S]` and who is present `[..., A]`."""
        return JointObservation(obs, state if self.central else (), present)

    def observe(self, obs: PyTree) -> JointObservation:
        """Completes observations `[E, A, ...]` for acting, which depends neither on the global state nor on who is present."""
        num_envs = jax.tree.leaves(obs)[0].shape[0]
        present = jnp.ones((num_envs, self.num_agents), bool)
        return self.join(obs, jnp.zeros((num_envs, self.state_size)), present)
