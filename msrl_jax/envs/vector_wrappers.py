"""Wrappers of vector environments: episode statistics, and normalization with running statistics.

Put `EpisodeStatistics` inside the normalizers, so that it counts raw rewards:
`NormalizeReward(NormalizeObservation(EpisodeStatistics(vectorize(env, 8))), discount=0.99)`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from msrl_jax.envs import episode_sums, running, spaces
from msrl_jax.envs.base import ENV_AXIS, PyTree, TimeStep, VectorEnvironment, Wrapper, delegate
from msrl_jax.envs.episode_sums import EpisodeSums
from msrl_jax.envs.masks import unmasked, with_mask_of
from msrl_jax.envs.privileged import statistics_of
from msrl_jax.envs.running import RunningStatistics
from msrl_jax.fragments.counters import at_least
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.tracebacks import entry

REPLICATED = PartitionSpec()


class VectorWrapper(Wrapper):
    """Base class of wrappers of vector environments: by default, methods are those of the inner environment.

    The state of a wrapper is a named tuple with a field `env_state`.
    """

    num_envs = delegate("num_envs")

    def pop_episodes(self, state: Any) -> tuple[Any, dict[str, Mean]]:
        """Returns the metrics of the environment."""
        env_state, metrics = self.env.pop_episodes(state.env_state)
        return state._replace(env_state=env_state), metrics

    def observe(self, state: Any, obs: PyTree) -> PyTree:
        """See `VectorEnvironment`."""
        return self.env.observe(state.env_state, obs)

    def statistics(self, state: Any) -> PyTree:
        """Returns the statistics of the environment."""
        return self.env.statistics(state.env_state)

    def with_statistics(self, state: Any, statistics: PyTree) -> Any:
        """See `VectorEnvironment`."""
        return state._replace(env_state=self.env.with_statistics(state.env_state, statistics))


class EpisodeStatisticsState(NamedTuple):
    """State of `EpisodeStatistics`: that of the environment, and the sums over its episodes."""

    env_state: PyTree
    episodes: EpisodeSums


@dataclass(frozen=True)
class EpisodeStatistics(VectorWrapper):
    """Measures the mean return and length of completed episodes, and the metrics of the environment; see `episode_sums`.

    Attributes:
      env: the vector environment.
    """

    env: VectorEnvironment

    @property
    def axes(self) -> EpisodeStatisticsState:
        """Logical axes of the state."""
        return EpisodeStatisticsState(self.env.axes, ENV_AXIS)  # type: ignore[arg-type]

    def reset(self, key: jax.Array) -> tuple[EpisodeStatisticsState, PyTree]:
        """Starts all environments, with empty statistics."""
        env_state, obs = self.env.reset(key)
        return EpisodeStatisticsState(env_state, episode_sums.begin(self, self.num_envs)), obs

    def step(self, state: EpisodeStatisticsState, action: PyTree) -> tuple[EpisodeStatisticsState, TimeStep]:
        """Advances all environments."""
        env_state, t = self.env.step(state.env_state, action)
        return EpisodeStatisticsState(env_state, episode_sums.add(self, state.episodes, t, t.valid)), t._replace(metrics=None)

    def pop_episodes(self, state: EpisodeStatisticsState) -> tuple[EpisodeStatisticsState, dict[str, Mean]]:
        """Returns the means over completed episodes, and resets their sums; see `episode_sums.pop`."""
        env_state, inner_metrics = self.env.pop_episodes(state.env_state)
        episodes, means = episode_sums.pop(self, state.episodes)
        return EpisodeStatisticsState(env_state, episodes), inner_metrics | means


class NormalizingWrapper(VectorWrapper):
    """Base class of normalizers: their states have `running` statistics, which are the same on all devices."""

    def statistics(self, state: Any) -> tuple[RunningStatistics, PyTree]:
        """Returns the statistics of this wrapper, and the statistics of the environment."""
        return state.running, self.env.statistics(state.env_state)

    def with_statistics(self, state: Any, statistics: tuple[RunningStatistics, PyTree]) -> Any:
        """Returns the state with the statistics of another state."""
        running_statistics, inner_statistics = statistics
        return state._replace(env_state=self.env.with_statistics(state.env_state, inner_statistics), running=running_statistics)


class NormalizeObservationState(NamedTuple):
    """State of `NormalizeObservation`: that of the environment, and the statistics of all observations."""

    env_state: PyTree
    running: RunningStatistics


@entry
@dataclass(frozen=True)
class NormalizeObservation(NormalizingWrapper):
    """Normalizes observations to mean 0 and variance 1 with running statistics over all environments and steps.

    An observation enters the statistics before it is normalized. `final_obs` does not enter them, since it either equals `obs`
    or gets no action. Before the first statistics, observations are not changed.

    Attributes:
      env: the vector environment; its observations are arrays of numbers.
      frozen: whether to keep the statistics constant. Set them with `with_statistics` after `reset`, then normalize the first
        observations with `observe`.
      epsilon: added to the variance.
      clip: normalized observations are clipped to [-clip, clip].
    """

    env: VectorEnvironment
    frozen: bool = False
    epsilon: float = 1e-8
    clip: float = 10.0

    def __post_init__(self):
        normalized_space(self.env.observation_space, self.clip)

    @property
    def observation_space(self) -> spaces.Space:
        """The space of `env` in float32, within [-clip, clip]."""
        return normalized_space(self.env.observation_space, self.clip)

    @property
    def axes(self) -> NormalizeObservationState:
        """Logical axes of the state."""
        return NormalizeObservationState(self.env.axes, REPLICATED)  # type: ignore[arg-type]

    def reset(self, key: jax.Array) -> tuple[NormalizeObservationState, PyTree]:
        """Starts all environments, and initializes the statistics with the first observations."""
        env_state, obs = self.env.reset(key)
        empty = running.empty(spaces.struct(self.env.observation_space))
        state = NormalizeObservationState(env_state, empty if self.frozen else running.batch_statistics(unmasked(obs)))
        return state, self._normalize(state.running, obs)

    def step(self, state: NormalizeObservationState, action: PyTree) -> tuple[NormalizeObservationState, TimeStep]:
        """Advances all environments."""
        env_state, time_step = self.env.step(state.env_state, action)
        stats = state.running if self.frozen else running.update(state.running, unmasked(time_step.obs))
        time_step = time_step._replace(
            obs=self._normalize(stats, time_step.obs), final_obs=self._normalize(stats, time_step.final_obs)
        )
        return NormalizeObservationState(env_state, stats), time_step

    def observe(self, state: NormalizeObservationState, obs: PyTree) -> PyTree:
        """Normalizes raw observations `[..., *obs_shape]` by the statistics in the state, without changing the statistics."""
        return self._normalize(state.running, self.env.observe(state.env_state, obs))

    def _normalize(self, stats: RunningStatistics, obs: PyTree) -> PyTree:
        plain = unmasked(obs)
        visible_stats = statistics_of(plain, stats)
        return with_mask_of(obs, running.normalize(visible_stats, plain, epsilon=self.epsilon, clip=self.clip))


class NormalizeRewardState(NamedTuple):
    """State of `NormalizeReward`: that of the environment, `R_t` of the current episodes `[E]`, and the statistics of `R_t`."""

    env_state: PyTree
    discounted_return: jax.Array
    running: RunningStatistics


@entry
@dataclass(frozen=True)
class NormalizeReward(NormalizingWrapper):
    """Divides rewards by the running standard deviation of the discounted return, so that values have unit scale.

    As in VecNormalize of OpenAI Baselines (Engstrom et al., 2020, arXiv:2005.12729), the discounted sum of an episode's past
    rewards is `R_t = discount * R_{t-1} + r_t`. Every step of every environment enters the statistics; `R_t` restarts at 0
    when an episode ends. The mean is not subtracted. Before the first statistics, rewards are not changed.

    Attributes:
      env: the vector environment.
      discount: discount factor of the return per step, in [0, 1].
      frozen: whether to keep the statistics constant; `with_statistics` sets them.
      epsilon: added to the variance.
      clip: scaled rewards are clipped to [-clip, clip].
    """

    env: VectorEnvironment
    discount: float
    frozen: bool = False
    epsilon: float = 1e-8
    clip: float = 10.0

    def __post_init__(self):
        if not isinstance(self.discount, Tracer) and not 0 <= self.discount <= 1:
            raise ValueError(f"NormalizeReward: discount={self.discount} must be in [0, 1]")

    @property
    def axes(self) -> NormalizeRewardState:
        """Logical axes of the state."""
        return NormalizeRewardState(self.env.axes, ENV_AXIS, REPLICATED)  # type: ignore[arg-type]

    def reset(self, key: jax.Array) -> tuple[NormalizeRewardState, PyTree]:
        """Starts all environments, with empty statistics."""
        env_state, obs = self.env.reset(key)
        empty = running.empty(jax.ShapeDtypeStruct((), jnp.float32))
        return NormalizeRewardState(env_state, jnp.zeros(self.num_envs, jnp.float32), empty), obs

    def step(self, state: NormalizeRewardState, action: PyTree) -> tuple[NormalizeRewardState, TimeStep]:
        """Advances all environments."""
        env_state, time_step = self.env.step(state.env_state, action)
        discounted_return = self.discount * state.discounted_return + time_step.reward
        stats = state.running if self.frozen else running.update(state.running, discounted_return)
        scaled = jnp.clip(time_step.reward / jnp.sqrt(stats.var + self.epsilon), -self.clip, self.clip)
        reward = jnp.where(at_least(stats.count, 1), scaled, time_step.reward)
        state = NormalizeRewardState(env_state, jnp.where(time_step.ended, 0, discounted_return), stats)
        return state, time_step._replace(reward=reward)


def normalized_space(space: spaces.Space, clip: float = 10.0) -> spaces.Space:
    """Returns the space of normalized observations, float32 in [-clip, clip]; ValueError if they are not arrays of numbers."""

    def normalized(part: spaces.Discrete | spaces.Box) -> spaces.Box:
        if not isinstance(part, spaces.Box):
            raise ValueError(f"observations of {part} cannot be normalized; wrap the env in FlattenObservation first")
        return spaces.Box(np.float32(-clip), np.float32(clip), part.shape)

    return spaces.map_arrays(normalized, space)
