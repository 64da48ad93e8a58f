"""Sums over episodes of parallel environments: returns, lengths and metrics, which `pop` reduces to means.

Every environment has its own sums, so a step needs no communication. Lengths and counts are exact up to 2**24 per environment
between two calls of `pop`. In the shape descriptions, `A` is for environments with several agents only.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import episode_metrics
from msrl_jax.envs.base import MultiAgentTimeStep, TimeStep
from msrl_jax.envs.episode_metrics import EpisodeMetrics
from msrl_jax.fragments.metrics import Mean


class EpisodeSums(NamedTuple):
    """The sums of `E` environments, float32."""

    episode_return: jax.Array  # undiscounted, of the current episode. `[E]` or `[E, A]`
    episode_length: jax.Array  # in steps. `[E]`
    return_sum: jax.Array  # over the episodes completed since `pop`. `[E]` or `[E, A]`
    length_sum: jax.Array  # `[E]`
    num_episodes: jax.Array  # `[E]`
    metrics: EpisodeMetrics | tuple[()] = ()


def begin(env: object, num_envs: int, *agents: int) -> EpisodeSums:
    """Returns the sums before the first step; `agents` is the number of agents, if rewards are per agent."""
    per_reward, per_env = jnp.zeros((num_envs, *agents), jnp.float32), jnp.zeros(num_envs, jnp.float32)
    return EpisodeSums(per_reward, per_env, per_reward, per_env, per_env, episode_metrics.begin(env, num_envs))


def add(env: Any, sums: EpisodeSums, t: TimeStep | MultiAgentTimeStep, answered: jax.Array | None = None) -> EpisodeSums:
    """Returns the sums after a step, which counts where the environment `answered` `[E]` bool; None for all.

    An episode that is lost, i.e. truncated without an answer, does not count.
    """
    ended = t.ended
    done = ended if answered is None else ended & (answered | t.terminated)
    measured = episode_metrics.add(env, sums.metrics, t.metrics, None if answered is None else episode_metrics.answered(t))
    episode_return = sums.episode_return + t.reward
    episode_length = sums.episode_length + (1 if answered is None else answered.astype(jnp.float32))
    returns_end, returns_count = (x[:, None] if episode_return.ndim > 1 else x for x in (ended, done))
    return EpisodeSums(
        episode_return=jnp.where(returns_end, 0, episode_return),
        episode_length=jnp.where(ended, 0, episode_length),
        return_sum=sums.return_sum + jnp.where(returns_count, episode_return, 0),
        length_sum=sums.length_sum + jnp.where(done, episode_length, 0),
        num_episodes=sums.num_episodes + done.astype(jnp.float32),
        metrics=episode_metrics.end(env, measured, ended, done),
    )


def pop(env: Any, sums: EpisodeSums) -> tuple[EpisodeSums, dict[str, Mean]]:
    """Returns the means over completed episodes, and resets their sums.

    They are `episode_return` (summed over agents), `episode_length`, and `episode_METRIC` of the environment's metrics.
    """
    count = jnp.sum(sums.num_episodes)
    metrics, means = episode_metrics.pop(env, sums.metrics, count)
    means |= {
        "episode_return": Mean(sums.return_sum.sum(0).sum(), count),
        "episode_length": Mean(jnp.sum(sums.length_sum), count),
    }
    zero = jnp.zeros_like(sums.num_episodes)
    sums = sums._replace(return_sum=jnp.zeros_like(sums.return_sum), length_sum=zero, num_episodes=zero, metrics=metrics)
    return sums, means
