"""A team as one agent: a joint observation, a joint action, and the sum of the rewards or the reward of each agent."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import spaces
from msrl_jax.envs.agents.vector import AgentsState, VectorizedAgents
from msrl_jax.envs.base import ENV_AXIS, PyTree, TimeStep
from msrl_jax.metrics import Mean


class JointObservation(NamedTuple):
    """What a team observes at once.

    Attributes:
      obs: the observations of the agents. `[..., A, ...]`
      state: the global state. `[..., S]` float32
      present: which agents are still in the episode. `[..., A]` bool
    """

    obs: PyTree
    state: jax.Array
    present: jax.Array


@dataclass(frozen=True)
class JointView:
    """Environments of several agents as a `VectorEnvironment` of one agent with joint observations and actions.

    Attributes:
      env: the environments.
      summed: whether a step has one reward, the sum over the agents, and terminates with the last of them; if not, rewards and
        ends of episodes are `[E, A]`: those of each agent.
    """

    env: VectorizedAgents
    summed: bool = True
    axes = ENV_AXIS

    @property
    def name(self) -> str:
        """The name of the environment."""
        return self.env.name

    @property
    def num_envs(self) -> int:
        """The number of environments, `E`."""
        return self.env.num_envs

    @property
    def num_agents(self) -> int:
        """The number of agents, `A`."""
        return self.env.num_agents

    @property
    def state_size(self) -> int:
        """The length of a global state, `S`."""
        return self.env.state_size

    @property
    def observation_space(self) -> spaces.Space:
        """The space of one agent's observations."""
        return self.env.observation_space

    @property
    def action_space(self) -> spaces.Space:
        """The space of one agent's actions."""
        return self.env.action_space

    @property
    def observation_type(self) -> JointObservation:
        """Shapes and dtypes of one joint observation."""
        obs = jax.eval_shape(self.reset, jax.eval_shape(lambda: jax.random.key(0)))[1]
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), obs)

    def reset(self, key: jax.Array) -> tuple[AgentsState, JointObservation]:
        """Starts all environments."""
        state, obs = self.env.reset(key)
        return state, JointObservation(obs, self.env.global_state(state, obs), ~state.absent)

    def step(self, state: AgentsState, action: PyTree) -> tuple[AgentsState, TimeStep]:
        """Advances all environments by joint actions `[E, A, ...]`."""
        state, t = self.env.step(state, action)
        obs = JointObservation(t.obs, t.state, ~state.absent)
        final_obs = JointObservation(t.final_obs, t.final_state, ~t.terminated)
        if self.summed:
            return state, TimeStep(obs, t.reward.sum(-1), t.terminated.all(-1), t.truncated, final_obs)
        truncated = jnp.broadcast_to(t.truncated[:, None], t.terminated.shape)
        return state, TimeStep(obs, t.reward, t.terminated, truncated, final_obs)

    def pop_episodes(self, state: AgentsState) -> tuple[AgentsState, dict[str, Mean]]:
        """See `VectorizedAgents`."""
        return self.env.pop_episodes(state)

    def observe(self, state: AgentsState, obs: PyTree) -> JointObservation:
        """Completes observations `[E, A, ...]` for acting, which depends neither on the global state nor on who is present."""
        num_envs = jax.tree.leaves(obs)[0].shape[0]
        present = jnp.ones((num_envs, self.num_agents), bool)
        return JointObservation(obs, jnp.zeros((num_envs, self.state_size)), present)

    def statistics(self, state: AgentsState) -> tuple[()]:
        """Returns `()`: there are no running statistics."""
        return ()

    def with_statistics(self, state: AgentsState, statistics: tuple[()]) -> AgentsState:
        """Returns the state unchanged."""
        return state
