"""Parallel copies of an environment with several agents: automatic reset, absent agents, statistics of episodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import param_source
from msrl_jax.envs.agents.base import MultiAgentEnvironment, MultiAgentTimeStep
from msrl_jax.envs.base import ENV_AXIS, MaskedObservation, PyTree, Wrapper, strong
from msrl_jax.envs.check_types import as_actions, check_key, check_types
from msrl_jax.envs.masks import has_masks, illegal_action, no_legal_action
from msrl_jax.envs.params import ParamSource
from msrl_jax.fragments.metrics import Mean


class AgentsState(NamedTuple):
    """The state of `E` environments with `A` agents.

    Attributes:
      key: one typed PRNG key per environment, for all its randomness. `[E]`
      env_state: the states of the environments. `[E, ...]`
      absent: which agents have terminated before the end of their episode. `[E, A]` bool
      episode_return: undiscounted sums of the rewards of the running episodes. `[E, A]` float32
      episode_length: lengths of the running episodes, in steps. `[E]` float32
      return_sum: sums of the returns of the episodes completed since `pop_episodes`. `[E, A]` float32
      length_sum: sums of the lengths of these episodes. `[E]` float32
      num_episodes: numbers of these episodes. `[E]` float32
      source: what the parameters of the next episodes are drawn from, if these are data; else `()`. `[E, ...]`
    """

    key: jax.Array
    env_state: PyTree
    absent: jax.Array
    episode_return: jax.Array
    episode_length: jax.Array
    return_sum: jax.Array
    length_sum: jax.Array
    num_episodes: jax.Array
    source: ParamSource | tuple[()] = ()


def vectorize_agents(
    env: MultiAgentEnvironment, num_envs: int, teams: Mapping[str, tuple[int, ...]] | None = None
) -> "VectorizedAgents":
    """Makes parallel copies of an environment with several agents.

    If the environment has a method `vectorize(num_envs, teams)`, that method makes the copies.

    Args:
      env: the environment.
      num_envs: number of copies, `E`.
      teams: name -> indices of agents, if there are several teams.

    Returns:
      The vector environment.

    Raises:
      TypeError: if a result of the environment does not fit the protocol; the message names it.
    """
    own = getattr(env, "vectorize", None)
    return VectorizedAgents(env, num_envs, teams or {}) if own is None else own(num_envs, teams)


@dataclass(frozen=True)
class VectorizedAgents(Wrapper):
    """`E` parallel copies of an environment with `A` agents, with automatic reset and statistics of episodes.

    Environments do not depend on each other, and each has its own key, as in `vectorize`.

    Attributes:
      env: the environment.
      num_envs: number of copies, `E`.
      teams: name -> indices of agents; with several teams, statistics name the returns of each.
    """

    env: MultiAgentEnvironment
    num_envs: int
    teams: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]], hash=False)
    axes = ENV_AXIS

    def __post_init__(self):
        check_types(self.env, several=True)

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents."""
        return tuple(self.env.agents)

    @property
    def num_agents(self) -> int:
        """The number of agents, `A`."""
        return len(self.env.agents)

    @property
    def state_size(self) -> int:
        """The length of a global state, `S`."""

        def one(key):
            env_state, obs = self.env.reset(key)
            return self._global_state(env_state, obs)

        return jax.eval_shape(one, jax.eval_shape(lambda: jax.random.key(0))).shape[0]

    def reset(self, key: jax.Array) -> tuple[AgentsState, PyTree]:
        """Starts all environments; returns the state and the first observations `[E, A, ...]`."""
        check_key(key)

        def reset_one(key, source):
            key, reset_key = jax.random.split(key)
            env_state, obs = strong(param_source.with_source(self.env, source).reset(reset_key))
            absent = jnp.zeros(self.num_agents, bool)
            return key, env_state, absent, self._observation(env_state, obs, absent)

        source = param_source.sources(self.env, self.num_envs)
        key, env_state, absent, obs = jax.vmap(reset_one)(jax.random.split(key, self.num_envs), source)
        per_agent, per_env = jnp.zeros(absent.shape), jnp.zeros(self.num_envs)
        return AgentsState(key, env_state, absent, per_agent, per_env, per_agent, per_env, per_env, source), obs

    def global_state(self, state: AgentsState, obs: PyTree) -> jax.Array:
        """The global states, given the observations that belong to the state. `[E, S]` float32."""
        plain = obs.obs if isinstance(obs, MaskedObservation) else obs
        return jax.vmap(self._global_state)(state.env_state, plain)

    def step(self, state: AgentsState, action: PyTree) -> tuple[AgentsState, MultiAgentTimeStep]:
        """Advances every environment by one action of every agent `[E, A, ...]`, and resets environments that ended."""
        action = as_actions(self, action, (state.key.shape[0], self.num_agents), "agent of each environment")

        def step_one(key, env_state, absent, action, source):
            key, step_key = jax.random.split(key)
            step_key, reset_key = jax.random.split(step_key)
            before = env_state
            env_state, obs, reward, terminated, truncated = strong(self.env.step(step_key, before, action))
            if has_masks(self.env):
                reward = self._faults(reward, before, env_state, action, absent, terminated)
            reward = jnp.where(absent, 0.0, reward.astype(jnp.float32))
            terminated |= absent
            ended = truncated | terminated.all()
            final_obs, final_state = self._observation(env_state, obs, terminated), self._global_state(env_state, obs)
            fresh = strong(param_source.with_source(self.env, source).reset(reset_key))
            env_state, obs = jax.tree.map(lambda new, old: jnp.where(ended, new, old), fresh, (env_state, obs))
            gone = terminated & ~ended
            obs, joint = self._observation(env_state, obs, gone), self._global_state(env_state, obs)
            time_step = MultiAgentTimeStep(
                obs, reward, terminated, truncated, final_obs, ~absent, ended, joint, final_state
            )
            return key, env_state, gone, time_step

        key, env_state, absent, t = jax.vmap(step_one)(state.key, state.env_state, state.absent, action, state.source)
        ended = t.ended[:, None]
        episode_return, episode_length = state.episode_return + t.reward, state.episode_length + 1
        state = AgentsState(
            key,
            env_state,
            absent,
            episode_return=jnp.where(ended, 0, episode_return),
            episode_length=jnp.where(t.ended, 0, episode_length),
            return_sum=state.return_sum + jnp.where(ended, episode_return, 0),
            length_sum=state.length_sum + jnp.where(t.ended, episode_length, 0),
            num_episodes=state.num_episodes + t.ended,
            source=param_source.after_step(state.source, self.num_envs),
        )
        return state, t

    def pop_episodes(self, state: AgentsState) -> tuple[AgentsState, dict[str, Mean]]:
        """Returns the means over completed episodes, and resets the sums.

        Args:
          state: the state with the sums since the last call.

        Returns:
          The state with zero sums; and the means `episode_return` (undiscounted, summed over all agents), `episode_length`
          (in steps), and `episode_return/TEAM` (summed over the agents of a team) if there are several teams.
        """
        count, returns = jnp.sum(state.num_episodes), state.return_sum.sum(0)
        metrics = param_source.means(state.env_state) | {
            "episode_return": Mean(returns.sum(), count),
            "episode_length": Mean(jnp.sum(state.length_sum), count),
        }
        if len(self.teams) > 1:
            for team, members in self.teams.items():
                metrics[f"episode_return/{team}"] = Mean(returns[jnp.array(members)].sum(), count)
        zeros = {name: jnp.zeros_like(getattr(state, name)) for name in ("return_sum", "length_sum", "num_episodes")}
        return state._replace(**zeros), metrics

    def observe(self, state: AgentsState, obs: PyTree) -> PyTree:
        """Returns the observations unchanged."""
        return obs

    def statistics(self, state: AgentsState) -> tuple[()]:
        """Returns `()`: there are no running statistics."""
        return ()

    def with_statistics(self, state: AgentsState, statistics: tuple[()]) -> AgentsState:
        """Returns the state unchanged."""
        return state

    def _faults(
        self, reward: jax.Array, before: PyTree, after: PyTree, action: Any, absent: jax.Array, terminated: jax.Array
    ) -> jax.Array:
        """The rewards of one environment, nan for agents without a legal action, and for those that took an illegal one."""
        before, after = self.env.action_mask(before), self.env.action_mask(after)  # type: ignore[attr-defined]
        missing = (~absent & ~before.any(-1)) | ~(after.any(-1) | terminated | absent)
        legal = jnp.take_along_axis(before, action[:, None], axis=1)[:, 0]
        return illegal_action(no_legal_action(reward, missing), ~absent & ~legal)

    def _observation(self, env_state: PyTree, obs: PyTree, absent: jax.Array) -> PyTree:
        """The observations of one environment; with masks if it has any. Absent agents may do anything: nobody looks."""
        if not has_masks(self.env):
            return obs
        return MaskedObservation(obs, self.env.action_mask(env_state) | absent[:, None])  # type: ignore[attr-defined]

    def _global_state(self, env_state: PyTree, obs: PyTree) -> jax.Array:
        """The global state of one environment. `[S]` float32."""
        if hasattr(self.env, "global_state"):
            return self.env.global_state(env_state).astype(jnp.float32)  # type: ignore[attr-defined]
        return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(obs)])
