"""Meta-learning as wrappers: an episode consists of several episodes of one task, and observations include the history.

A task is given by the environment parameters of an episode: `train("recurrent_ppo", RL2(env, ...), env_params=distribution)`
draws one at the start of each meta-episode. In the shape descriptions, `S` is the number of states, `A` of actions, and `K` of
metrics of the environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Environment, PyTree, Stepped, env_name, has_agents, is_on_host
from msrl_jax.envs.episode_metrics import Reduction, metrics_of, reported
from msrl_jax.envs.wrappers import EnvironmentWrapper
from msrl_jax.fragments.support.checks import whole

_QUARTERS = tuple(f"return_quarter_{i}" for i in (1, 2, 3, 4))


class RL2State(NamedTuple):
    """State of `RL2`.

    Attributes:
      env_state: state of the environment.
      obs: its observation for the next action.
      final_obs: the observation after the last step, before another episode started.
      reward: reward of the last step. `[]` float32
      terminated: whether the last step reached a terminal state. `[]` bool
      steps: number of steps in the meta-episode so far. `[]` int32
      episode_steps: number of steps in the episode so far. `[]` int32
      returns: sums of rewards in the four quarters of the meta-episode so far. `[4]` float32
      reported: the environment's metrics after the last step. `[K]` float32
    """

    env_state: PyTree
    obs: PyTree
    final_obs: PyTree
    reward: jax.Array
    terminated: jax.Array
    steps: jax.Array
    episode_steps: jax.Array
    returns: jax.Array
    reported: jax.Array


@dataclass(frozen=True)
class RL2(EnvironmentWrapper):
    """Joins episodes of one task to a meta-episode of `horizon` steps (Duan et al., 2016, arXiv 1611.02779).

    An observation is one float32 vector: the environment's observation, the last action, the last reward, whether an episode
    has just started, and the elapsed share of the horizon. A recurrent agent, such as `recurrent_ppo`, can then learn to learn.
    A meta-episode terminates at its horizon. The metrics `return_quarter_1` to `return_quarter_4` are the sums of rewards in
    each quarter.

    Attributes:
      env: the environment, with one agent.
      horizon: number of steps of a meta-episode.
      episode_length: maximum number of steps of an episode; a divisor of the horizon. If episodes end earlier, a meta-episode
        contains more of them.
    """

    env: Environment
    horizon: int
    episode_length: int
    _inner = attrgetter("env_state")

    def __post_init__(self):
        for name in ("horizon", "episode_length"):
            object.__setattr__(self, name, whole(f"RL2 of {env_name(self.env)}: {name}", getattr(self, name)))
        if self.horizon % self.episode_length:
            lower = self.horizon // self.episode_length * self.episode_length
            raise ValueError(
                f"RL2 of {env_name(self.env)}: horizon={self.horizon} is not a multiple of "
                f"episode_length={self.episode_length}; use one, such as {lower or self.episode_length}"
            )
        if has_agents(self.env):
            raise TypeError(f"RL2 needs a single-agent environment, and {env_name(self.env)} has several")
        if is_on_host(self.env):
            raise TypeError(f"RL2 joins episodes on a device, and {env_name(self.env)} is simulated on the host; use another")

    @property
    def observation_space(self) -> spaces.Box:
        """A `Box` of shape `[D]`."""
        parts = (spaces.flat_space(self.env.observation_space), spaces.flat_space(self.env.action_space))
        low, high = (np.concatenate([getattr(part, side) for part in parts]) for side in ("low", "high"))
        low = np.minimum(low, [0] * len(low))  # the first action is zeros
        high = np.maximum(high, [0] * len(high))
        low, high = np.concatenate([low, [-np.inf, 0, 0]]), np.concatenate([high, [np.inf, 1, 1]])
        return spaces.Box(low, high, low.shape)

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """The metrics of the environment, and the returns of the quarters."""
        return {**metrics_of(self.env), **dict.fromkeys(_QUARTERS, "last")}

    @property
    def report(self):  # noqa: D102
        def report(state: RL2State) -> dict[str, jax.Array]:
            names = (*metrics_of(self.env), *_QUARTERS)
            return dict(zip(names, jnp.concatenate([state.reported, state.returns]), strict=True))

        return report

    def _metric_values(self, env_state: PyTree) -> jax.Array:
        metric_values = reported(self.env, env_state)
        return jnp.zeros(0, jnp.float32) if metric_values is None else metric_values

    def _observation(self, state: RL2State, action: jax.Array) -> jax.Array:
        is_new_episode, time = state.episode_steps == 0, state.steps / self.horizon
        extras = jnp.stack([state.reward, is_new_episode.astype(jnp.float32), time.astype(jnp.float32)])
        return jnp.concatenate([spaces.flatten(self.env.observation_space, state.obs), action, extras])

    def reset(self, key: jax.Array) -> tuple[RL2State, jax.Array]:
        """Starts a meta-episode."""
        env_state, obs = self.env.reset(key)
        zero, none = jnp.zeros((), jnp.int32), jnp.asarray(False)
        metric_values = self._metric_values(env_state)
        state = RL2State(
            env_state, obs, obs, jnp.zeros((), jnp.float32), none, zero, zero, jnp.zeros(4, jnp.float32), metric_values
        )
        return state, self._observation(state, jnp.zeros(spaces.flat_space(self.env.action_space).shape, jnp.float32))

    def step(self, key: jax.Array, state: RL2State, action: PyTree) -> Stepped:
        """Advances the meta-episode; when an episode ends, the next one of the same task starts."""
        step_key, reset_key = jax.random.split(key)
        env_state, obs, reward, terminated, truncated = self.env.step(step_key, state.env_state, action)
        steps, episode_steps = state.steps + 1, state.episode_steps + 1
        metric_values = self._metric_values(env_state)  # before another episode starts
        episode_ended = terminated | truncated | (episode_steps >= self.episode_length)
        continued, fresh = (env_state, obs, episode_steps), (*self.env.reset(reset_key), jnp.zeros((), jnp.int32))
        env_state, next_episode_obs, episode_steps = jax.tree.map(
            lambda fresh_leaf, continued_leaf: jnp.where(episode_ended, fresh_leaf, continued_leaf), fresh, continued
        )
        reward = jnp.asarray(reward, jnp.float32)
        quarter = jnp.minimum(4 * state.steps // self.horizon, 3)
        next_state = RL2State(
            env_state,
            next_episode_obs,
            obs,
            reward,
            jnp.asarray(terminated),
            steps,
            episode_steps,
            state.returns.at[quarter].add(reward),
            metric_values,
        )
        next_obs = self._observation(next_state, spaces.flatten(self.env.action_space, action))
        return next_state, next_obs, reward, steps >= self.horizon, jnp.asarray(False)


def value_iteration(transitions: jax.Array, rewards: jax.Array, discount: float, sweeps: int) -> jax.Array:
    """Optimal action values over `sweeps` steps.

    Args:
      transitions: probabilities of the next state; if a row sums to less than 1, the rest is the probability of termination.
        `[S, A, S]`
      rewards: mean rewards. `[S, A]`
      discount: discount factor per step.
      sweeps: number of steps to look ahead, at least 1.

    Returns:
      The values. `[S, A]`
    """
    return jax.lax.fori_loop(0, sweeps, lambda _, q: rewards + discount * transitions @ q.max(-1), 0.0 * rewards)


class RL3State(NamedTuple):
    """State of `RL3`: that of `RL2`, and the counts of the meta-episode.

    Attributes:
      env_state: state of `RL2`.
      moves: how often an action led from one state to another. `[S, A, S]` float32
      visits: how often an action was taken in a state. `[S, A]` float32
      rewards: sums of the rewards of these. `[S, A]` float32
    """

    env_state: RL2State
    moves: jax.Array
    visits: jax.Array
    rewards: jax.Array


@dataclass(frozen=True)
class RL3(EnvironmentWrapper):
    """Adds values of an estimated model to the observations of `RL2` (Bhatia et al., 2023, arXiv 2306.15909).

    The model is estimated from the meta-episode so far. Observations include its advantages and its value in the current state,
    per step of an episode, and how often each action was taken there, in units of ten.

    Attributes:
      env: an `RL2` of an environment with `Discrete` observations, the states, and `Discrete` actions.
      discount: discount factor of the value iteration, which looks one episode ahead.
      smoothing: added to the counts of each next state; an action that was never taken leads to all states equally often.
    """

    env: RL2
    discount: float = 0.95
    smoothing: float = 0.1
    _inner = attrgetter("env_state")

    def __post_init__(self):
        if not isinstance(self.env, RL2):
            raise TypeError(f"RL3 needs an RL2, but got {env_name(self.env)}; write RL3(RL2(env, ...))")
        inner = self.env.env
        if not all(
            isinstance(space, spaces.Discrete) and space.start == 0 for space in (inner.observation_space, inner.action_space)
        ):
            raise TypeError(
                f"RL3 counts states and actions, but {env_name(inner)} has observations in {inner.observation_space} and "
                f"actions in {inner.action_space}; use an environment where both are Discrete from 0, or RL2 alone"
            )
        if not 0 <= self.discount <= 1 or not 0 < self.smoothing < np.inf:
            raise ValueError(
                f"RL3: discount={self.discount!r} must be in [0, 1] and smoothing={self.smoothing!r} finite and above 0"
            )

    @property
    def observation_space(self) -> spaces.Box:
        """A `Box` of shape `[D + 2 A + 1]`."""
        inner, extra = self.env.observation_space, 2 * self._sizes[1] + 1
        low, high = np.append(inner.low, [-np.inf] * extra), np.append(inner.high, [np.inf] * extra)
        return spaces.Box(low, high, low.shape)

    @property
    def _sizes(self) -> tuple[int, int]:
        """`S` and `A`."""
        states, actions = self.env.env.observation_space, self.env.action_space
        assert isinstance(states, spaces.Discrete) and isinstance(actions, spaces.Discrete)
        return states.n, actions.n

    def action_values(self, state: RL3State) -> jax.Array:
        """Returns the values of the estimated model. `[S, A]`"""
        total = state.visits + self.smoothing * len(state.visits)
        transitions = (state.moves + self.smoothing) / total[..., None]
        means = state.rewards / jnp.maximum(state.visits, 1)
        return value_iteration(transitions, means, self.discount, self.env.episode_length)

    def _observation(self, state: RL3State, obs: jax.Array) -> jax.Array:
        current = state.env_state.obs
        q = self.action_values(state)[current] / self.env.episode_length
        return jnp.concatenate([obs, q - q.max(), q.max(keepdims=True), state.visits[current] / 10])

    def reset(self, key: jax.Array) -> tuple[RL3State, jax.Array]:
        """Starts a meta-episode with no counts."""
        env_state, obs = self.env.reset(key)
        shape = self._sizes
        zeros = [jnp.zeros(array_shape, jnp.float32) for array_shape in ((*shape, shape[0]), shape, shape)]
        state = RL3State(env_state, *zeros)
        return state, self._observation(state, obs)

    def step(self, key: jax.Array, state: RL3State, action: jax.Array) -> Stepped:
        """Advances the meta-episode, and updates the counts."""
        last_obs = state.env_state.obs
        env_state, obs, *outcome = self.env.step(key, state.env_state, action)
        goes_on = jnp.where(env_state.terminated, 0.0, 1.0)
        next_state = RL3State(
            env_state,
            state.moves.at[last_obs, action, env_state.final_obs].add(goes_on),
            state.visits.at[last_obs, action].add(1.0),
            state.rewards.at[last_obs, action].add(env_state.reward),
        )
        return next_state, self._observation(next_state, obs), *outcome  # type: ignore[return-value]
