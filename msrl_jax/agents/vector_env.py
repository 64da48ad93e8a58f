"""Makes the vector environments of on-policy algorithms."""

from typing import Any

from msrl_jax import envs
from msrl_jax.envs import Environment, VectorEnvironment


def vectorize_with_statistics(env: Environment, num_envs: int, *, normalize_observations: bool) -> VectorEnvironment:
    """Makes a vector environment of `num_envs` copies with episode statistics; optionally standardizes observations."""
    vector: VectorEnvironment = envs.EpisodeStatistics(envs.vectorize(env, num_envs))
    return envs.NormalizeObservation(vector) if normalize_observations else vector


def make_vector_env(env: Environment, config: Any) -> VectorEnvironment:
    """Makes the vector environment of an on-policy algorithm, with statistics of raw rewards and optional normalization."""
    observed = vectorize_with_statistics(env, config.num_envs, normalize_observations=config.normalize_observations)
    return envs.NormalizeReward(observed, config.discount) if config.normalize_rewards else observed
