"""Standardizes observations where networks use them, for algorithms with a replay buffer.

The buffer stores raw observations. Networks see old and new observations standardized by the same running statistics, those of
all batches so far.
"""

from typing import Any

import jax

from msrl_jax.envs import running
from msrl_jax.envs.masks import unmasked, with_mask_of
from msrl_jax.envs.privileged import statistics_of
from msrl_jax.envs.running import RunningStatistics
from msrl_jax.loops.off_policy import Batch, select
from msrl_jax.networks.unrolls import flatten


def initial_statistics(obs: Any, *, normalize: bool) -> RunningStatistics | tuple[()]:
    """Returns the initial statistics for observations `[E, ...]`; `()` if observations are not standardized."""
    return running.empty(jax.tree.map(lambda x: x[0], unmasked(obs))) if normalize else ()


def normalize_obs(statistics: RunningStatistics | tuple[()], obs: Any) -> Any:
    """Standardizes observations `[..., *observation_shape]` for networks; masks do not change."""
    if isinstance(statistics, tuple):
        return obs
    plain = unmasked(obs)
    return with_mask_of(obs, running.normalize(statistics_of(plain, statistics), plain))


def update_statistics(statistics: RunningStatistics, batch: Batch) -> tuple[RunningStatistics, Any]:
    """Adds a batch of steps or of windows to the statistics; returns them and the experience with standardized observations."""
    e = batch.experience
    obs = unmasked(e.obs if e.reward.ndim == 1 else flatten(e.obs))  # all steps of windows
    statistics = select(batch.ready, running.update(statistics, obs), statistics)
    return statistics, e._replace(obs=normalize_obs(statistics, e.obs), next_obs=normalize_obs(statistics, e.next_obs))
