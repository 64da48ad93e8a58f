"""Observations standardized where they are used, for algorithms with a replay buffer.

The buffer holds observations as they are. Networks see them standardized by running statistics of all batches so far, old ones
and new ones by the same.
"""

from typing import Any, NamedTuple

import jax

from msrl_jax.algorithms.agent import Progress
from msrl_jax.algorithms.loops.off_policy import Batch, Explore, Learner, Rule, select
from msrl_jax.algorithms.networks.layers import flatten
from msrl_jax.envs import Space, running
from msrl_jax.envs.masks import unmasked, with_mask_of
from msrl_jax.envs.privileged import statistics_of
from msrl_jax.envs.running import RunningStatistics
from msrl_jax.envs.vector_wrappers import normalized_space
from msrl_jax.fragments import fragment


class Normalized(NamedTuple):
    """The parameters of networks that see standardized observations."""

    params: Any
    observations: RunningStatistics


def seen_space(config: Any, space: Space) -> Space:
    """The space of the observations that networks see; raises ValueError if these cannot be standardized."""
    return normalized_space(space) if config.normalize_observations else space


def normalized(config: Any, rule: Rule, explore: Explore) -> tuple[Rule, Explore]:
    """The rule and the exploration of networks that see standardized observations, if the config has it so."""
    if not config.normalize_observations:
        return rule, explore

    def see(params: Normalized, obs: Any) -> Any:
        plain = unmasked(obs)
        return with_mask_of(obs, running.normalize(statistics_of(plain, params.observations), plain))

    def init(key: jax.Array, obs: Any) -> Learner:
        params = Normalized((), running.empty(jax.tree.map(lambda x: x[0], unmasked(obs))))
        learner = rule.init(key, see(params, obs))
        return learner._replace(params=params._replace(params=learner.params))

    @fragment(role="learner")
    def observe(statistics: RunningStatistics, batch: Batch) -> tuple[RunningStatistics, Any]:
        e = batch.experience
        seen = unmasked(e.obs if e.reward.ndim == 1 else flatten(e.obs))  # of windows, all steps
        statistics = select(batch.ready, running.update(statistics, seen), statistics)
        params = Normalized((), statistics)
        return statistics, e._replace(obs=see(params, e.obs), next_obs=see(params, e.next_obs))

    def update(learner: Learner, batch: Batch, progress: Progress) -> Any:
        statistics, experience = observe(learner.params.observations, batch)
        own = learner._replace(params=learner.params.params)
        after, *others = rule.update(own, batch._replace(experience=experience), progress)
        return after._replace(params=Normalized(after.params, statistics)), *others

    return Rule(
        init,
        update,
        lambda params, obs, key, carry: rule.choose_action(params.params, see(params, obs), key, carry),
        rule.initial_carry,
    ), lambda params, obs, *others: explore(params.params, see(params, obs), *others)
