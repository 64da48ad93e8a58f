"""Parallel copies of multi-agent environments, with automatic reset, absent agents and episode statistics; views of teams."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import episode_metrics, episode_sums
from msrl_jax.envs.base import (
    MaskedObservation,
    MultiAgentEnvironment,
    MultiAgentTimeStep,
    PyTree,
    WithoutStatistics,
    Wrapper,
    check_made,
    delegate,
    drop_weak_types,
    keys_of_step,
    output_shapes,
)
from msrl_jax.envs.check_types import as_actions, check_key, check_types
from msrl_jax.envs.episode_sums import EpisodeSums
from msrl_jax.envs.masks import has_masks, illegal_action, no_legal_action, unmasked
from msrl_jax.envs.param_sources import advance_source, means, sources, with_source
from msrl_jax.envs.params import ParamSampler
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.tracebacks import entry


class AgentsState(NamedTuple):
    """The state of `E` environments with `A` agents: as in `Vectorized`, with sums over episodes."""

    key: jax.Array
    env_state: PyTree
    absent: jax.Array  # which agents have terminated before the end of their episode. `[E, A]`
    episodes: EpisodeSums
    source: ParamSampler | tuple[()] = ()


@entry
def vectorize_agents(
    env: MultiAgentEnvironment, num_envs: int, teams: Mapping[str, tuple[int, ...]] | None = None
) -> "VectorizedAgents":
    """Makes parallel copies of an environment with several agents.

    If the environment has a method `vectorize(num_envs, teams)`, that method makes the copies.

    Args:
      env: the environment.
      num_envs: number of copies, `E`.
      teams: name -> indices of agents, if there is more than one team.

    Returns:
      The vector environment.

    Raises:
      TypeError: if a result of the environment violates the protocol; the message names it.
    """
    check_made(env)
    vectorize = getattr(env, "vectorize", None)
    return VectorizedAgents(env, num_envs, teams or {}) if vectorize is None else vectorize(num_envs, teams)


@entry
@dataclass(frozen=True)
class VectorizedAgents(WithoutStatistics, Wrapper):
    """`E` parallel copies of an environment with `A` agents, with automatic reset and episode statistics.

    Environments are independent and each has its own key, as in `vectorize`.

    Attributes:
      env: the environment.
      num_envs: number of copies, `E`.
      teams: name -> indices of agents; with several teams, there are statistics of the return of each.
    """

    env: MultiAgentEnvironment
    num_envs: int
    teams: Mapping[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]], hash=False)

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
        """The size of a global state, `S`."""
        return output_shapes(lambda key: self._global_state(*self.env.reset(key))).shape[0]

    def reset(self, key: jax.Array) -> tuple[AgentsState, PyTree]:
        """Starts all environments; returns the state and the first observations `[E, A, ...]`."""
        check_key(key)

        def reset_one(key, source):
            key, reset_key = jax.random.split(key)
            env_state, obs = drop_weak_types(with_source(self.env, source).reset(reset_key))
            absent = jnp.zeros(self.num_agents, bool)
            return key, env_state, absent, self._observation(env_state, obs, absent)

        source = sources(self.env, self.num_envs)
        key, env_state, absent, obs = jax.vmap(reset_one)(jax.random.split(key, self.num_envs), source)
        return AgentsState(key, env_state, absent, episode_sums.begin(self, *absent.shape), source), obs

    def states(self, state: AgentsState) -> PyTree:
        """Returns the states of the environments themselves. `[E, ...]`"""
        return state.env_state

    def global_state(self, state: AgentsState, obs: PyTree) -> jax.Array:
        """Returns the global states, given the observations that belong to the state. `[E, S]` float32."""
        return jax.vmap(self._global_state)(state.env_state, unmasked(obs))

    def step(self, state: AgentsState, action: PyTree) -> tuple[AgentsState, MultiAgentTimeStep]:
        """Advances every environment by one action of every agent `[E, A, ...]`, and resets environments that ended."""
        action = as_actions(self, action, (state.key.shape[0], self.num_agents), "agent of each environment")

        def step_one(key, env_state, absent, action, source):
            key, step_key, reset_key = keys_of_step(key)
            old_state = env_state
            env_state, obs, reward, terminated, truncated = drop_weak_types(self.env.step(step_key, old_state, action))
            if has_masks(self.env):
                reward = self._faults(reward, old_state, env_state, action, absent, terminated)
            reward = jnp.where(absent, 0.0, reward.astype(jnp.float32))
            terminated |= absent
            ended = truncated | terminated.all()
            final_obs, final_state = self._observation(env_state, obs, terminated), self._global_state(env_state, obs)
            reported = episode_metrics.reported(self.env, env_state)
            fresh = drop_weak_types(with_source(self.env, source).reset(reset_key))
            env_state, obs = jax.tree.map(lambda new, old: jnp.where(ended, new, old), fresh, (env_state, obs))
            has_left = terminated & ~ended
            obs, joint = self._observation(env_state, obs, has_left), self._global_state(env_state, obs)
            t = MultiAgentTimeStep(obs, reward, terminated, truncated, final_obs, ~absent, ended, joint, final_state, reported)
            return key, env_state, has_left, t

        key, env_state, absent, t = jax.vmap(step_one)(state.key, state.env_state, state.absent, action, state.source)
        episodes, source = episode_sums.add(self, state.episodes, t), advance_source(state.source, self.num_envs)
        return AgentsState(key, env_state, absent, episodes, source), t

    def pop_episodes(self, state: AgentsState) -> tuple[AgentsState, dict[str, Mean]]:
        """Returns the means over completed episodes, and resets the sums.

        They are `episode_return` (undiscounted, summed over all agents), `episode_length` (in steps), `episode_return/TEAM`
        (summed over the agents of a team) if there are several teams, and `episode_METRIC` of the environment's metrics.
        """
        episodes, metrics = episode_sums.pop(self, state.episodes)
        if len(self.teams) > 1:
            returns, count = state.episodes.return_sum.sum(0), metrics["episode_return"].count
            for team, members in self.teams.items():
                metrics[f"episode_return/{team}"] = Mean(returns[jnp.array(members)].sum(), count)
        return state._replace(episodes=episodes), means(state.env_state) | metrics

    def _faults(
        self, reward: jax.Array, old_state: PyTree, new_state: PyTree, action: Any, absent: jax.Array, terminated: jax.Array
    ) -> jax.Array:
        """Returns the rewards of one environment, nan for agents without a legal action and those that took an illegal one."""
        old_state, new_state = self.env.action_mask(old_state), self.env.action_mask(new_state)  # type: ignore[attr-defined]
        has_no_action = (~absent & ~old_state.any(-1)) | ~(new_state.any(-1) | terminated | absent)
        legal = jnp.take_along_axis(old_state, action[:, None], axis=1)[:, 0]
        return illegal_action(no_legal_action(reward, has_no_action), ~absent & ~legal)

    def _observation(self, env_state: PyTree, obs: PyTree, absent: jax.Array) -> PyTree:
        """Returns the observations of one environment, with masks if it has any; for absent agents, all actions count as
        legal.
        """
        if not has_masks(self.env):
            return obs
        return MaskedObservation(obs, self.env.action_mask(env_state) | absent[:, None])  # type: ignore[attr-defined]

    def _global_state(self, env_state: PyTree, obs: PyTree) -> jax.Array:
        """Returns the global state of one environment. `[S]` float32."""
        if hasattr(self.env, "global_state"):
            return self.env.global_state(env_state).astype(jnp.float32)  # type: ignore[attr-defined]
        return jnp.concatenate([x.astype(jnp.float32).reshape(-1) for x in jax.tree.leaves(obs)])


class JointObservation(NamedTuple):
    """The joint observation of a team.

    Attributes:
      obs: the observations of the agents. `[..., A, ...]`
      state: the global state; `()` if the team learns without it. `[..., S]` float32
      valid: which agents are still in the episode. `[..., A]` bool
    """

    obs: PyTree
    state: jax.Array | tuple[()]
    valid: jax.Array


@dataclass(frozen=True)
class TeamView(Wrapper):
    """The observations of a team of `A` agents in environments that it may share with other teams.

    If `central`, the team learns from the global state, which can contain more than the observations of all agents.
    """

    env: VectorizedAgents
    num_agents: int
    central: bool = True
    num_envs = delegate("num_envs")
    state_size = delegate("state_size")

    @property
    def observation_type(self) -> JointObservation:
        """Shapes and dtypes of one joint observation."""
        _, obs = output_shapes(self.env.reset)
        obs = jax.tree.map(lambda x: jax.ShapeDtypeStruct((self.num_agents, *x.shape[2:]), x.dtype), obs)
        state = jax.ShapeDtypeStruct((self.state_size,), jnp.float32)
        return self.join(obs, state, jax.ShapeDtypeStruct((self.num_agents,), jnp.bool_))  # type: ignore[arg-type]

    def join(self, obs: PyTree, state: jax.Array, valid: jax.Array) -> JointObservation:
        """Joins agents' observations `[..., A, ...]`, global states `[..., S]` and the mask of valid agents `[..., A]`."""
        return JointObservation(obs, state if self.central else (), valid)

    def observe(self, obs: PyTree) -> JointObservation:
        """Completes observations `[E, A, ...]` for acting, which uses neither the global state nor the mask."""
        num_envs = jax.tree.leaves(obs)[0].shape[0]
        valid = jnp.ones((num_envs, self.num_agents), bool)
        return self.join(obs, jnp.zeros((num_envs, self.state_size), jnp.float32), valid)
