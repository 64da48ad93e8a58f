"""Fitted Q evaluation: estimates the return of a policy from data alone (Le et al., 2019, arXiv 1903.08738).

A critic is fitted to the rewards of the data plus its own values of the policy's next actions; its values of the episodes'
first observations are the estimate. Several critics are fitted in parallel, each to a bootstrap sample of the episodes, and
their spread gives the confidence interval (Hao et al., 2021, arXiv 2102.03607). In the shape descriptions, `K` is the number of
fits, `N` of rows of the data, `S` of episodes, `U` of updates per iteration, and `B` the batch size.
"""

import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from msrl_jax import policies
from msrl_jax.agents.action_spaces import check_discrete_or_bounded
from msrl_jax.agents.agent import logical_axes, split_keys
from msrl_jax.configs.checking import check_fields
from msrl_jax.configs.config import Activation, NetworkKind, field
from msrl_jax.data.check_spaces import load_for
from msrl_jax.data.dataset import MASKS, Dataset, Episodes
from msrl_jax.envs import Environment, has_agents
from msrl_jax.envs.actions import policy_actions
from msrl_jax.envs.base import PyTree
from msrl_jax.envs.masks import MaskedObservation
from msrl_jax.envs.privileged import actor_obs
from msrl_jax.fragments import compile, fragment
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.support.checks import check_loaded, check_seed, shown
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.networks.continuous_policies import heads_of
from msrl_jax.run.result import Result

_UPDATES = 100  # maximum number of updates per iteration
_ROWS = 4096  # number of observations per call of the policy


@dataclasses.dataclass(frozen=True)
class FittedQ:
    """Hyperparameters of the critics."""

    discount: float = field(default=0.99, low=0, below=1, doc="discount factor per step.")
    num_updates: int = field(default=5_000, low=10, doc="updates of each critic.")
    fits: int = field(default=8, low=2, doc="critics, each of a bootstrap sample of episodes, `K`.")
    batch_size: int = field(default=256, doc="rows of an update, `B`.")
    learning_rate: float = field(default=1e-3, above=0, high=1, doc="step size of Adam.")
    tau: float = field(default=0.1, above=0, high=1, doc="target update rate (Polyak).")
    hidden_sizes: tuple[int, ...] = field(default=(64, 64), doc="widths of dense layers.")
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu".')
    network: NetworkKind = field(default="auto", doc='a name, or a module; "auto" convolves images.')
    layer_norm: bool = field(default=True, doc="whether hidden dense layers are normalized; without, estimates can explode.")

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class OffPolicyEstimate:
    """The return of a policy, estimated from data.

    Attributes:
      value: the estimated discounted return of an episode.
      interval: the 95% confidence interval, if the data cover the policy's actions and the fits have converged.
      values: the estimates of all fits. shape=[K], dtype=float64
      discount: the discount factor per step.
      change: the change of `value` over the last tenth of the updates; small after convergence.
    """

    value: float
    interval: tuple[float, float]
    values: np.ndarray
    discount: float
    change: float

    def __repr__(self) -> str:
        low, high = self.interval
        settings = f"discount {self.discount:g}, {len(self.values)} fits"
        return f"discounted return {self.value:.4g} ({low:.4g} to {high:.4g}), {settings}"


class LoggedTransitions(NamedTuple):
    """The data, with the policy's actions."""

    obs: PyTree
    action: jax.Array | np.ndarray
    reward: jax.Array | np.ndarray
    discount: jax.Array | np.ndarray  # 0 where the episode terminated
    next_obs: PyTree
    next_action: PyTree  # of the policy


class Fits(NamedTuple):
    """The state of all fits."""

    params: PyTree  # [K, ...]
    target_params: PyTree
    opt_state: PyTree
    keys: jax.Array  # [K]
    order: jax.Array | np.ndarray  # the rows of each fit's episodes, concatenated; the rest is padding. int32 [K, L]
    counts: jax.Array | np.ndarray  # the number of rows without padding. int32 [K]
    rows: LoggedTransitions  # [N, ...]


@entry
def estimate_return(
    result: Result,
    data: str | os.PathLike[str] | Dataset,
    settings: FittedQ | None = None,
    *,
    seed: int = 0,
    member: int | None = None,
    policy: str | DistributionPolicy = "GPUOnly",
    devices: Sequence[Device] | None = None,
) -> OffPolicyEstimate:
    """Estimates from data the discounted return of an agent that takes its most probable actions; no episode is run.

    Args:
      result: the run of the agent.
      data: a data set, or its path.
      settings: hyperparameters of the fits; the defaults of `FittedQ` if None.
      seed: seed of the estimate.
      member: number of the population member; the best one if None.
      policy: distribution policy of the fits.
      devices: the devices for that policy; all if None.

    Returns:
      The estimate, with an interval.

    Raises:
      ValueError: if the run has no such member, the data do not match, or the agent is recurrent.
    """
    check_loaded(result)
    if result.behavior.agent.is_recurrent:
        raise ValueError(
            f"an agent of {result.experiment.name!r} is recurrent, so its actions cannot be computed from single steps of "
            "data; use result.evaluate(episodes)"
        )
    act = lambda obs: result.act(obs, member=member)
    return fitted_q(result.behavior.env, act, data, settings, seed=check_seed(seed), policy=policy, devices=devices)


def fitted_q(
    env: Environment,
    act: Callable[[PyTree], jax.Array | np.ndarray],
    source: str | os.PathLike[str] | Dataset,
    settings: FittedQ | None = None,
    *,
    seed: int = 0,
    policy: str | DistributionPolicy = "GPUOnly",
    devices: Sequence[Device] | None = None,
) -> OffPolicyEstimate:
    """Estimates the return of a policy from data.

    Args:
      env: the environment; only its spaces are used.
      act: the policy: maps raw observations `[B, ...]` to actions of the environment `[B, ...]`.
      source: the data set, or its path.
      settings: hyperparameters of the fits.
      seed: seed of the bootstrap samples and of initial parameters.
      policy: distribution policy of the fits, which are split as environments would be.
      devices: the devices for the policy; all if None.

    Returns:
      The estimate. It is unreliable if the data contain nothing similar to the policy's actions; no interval shows that.

    Raises:
      TypeError: if actions are neither discrete nor vectors of bounded floats.
      ValueError: if the data do not match the environment, have several agents, or are a single episode; if values overflow.

    Warns:
      UserWarning: if the estimate still changes by more than 5% over the last tenth of the updates.
    """
    settings = FittedQ() if settings is None else settings
    if not isinstance(settings, FittedQ):
        raise TypeError(f"settings={shown(settings)}: pass a msrl_jax.offline_evaluation.FittedQ(...)")
    if has_agents(env):
        raise ValueError("data of several agents cannot be evaluated; use result.evaluate(episodes)")
    space = check_discrete_or_bounded("estimate_return", env.action_space)
    dataset = load_for(env, source)
    episodes = dataset.episodes
    if len(episodes.start) < 2:
        raise ValueError("the data are a single episode, but an interval needs several; collect more")
    obs, next_obs = (_masked_obs(dataset, name) for name in MASKS)
    next_actions = policy_actions(env.action_space, _actions_of(act, next_obs))
    firsts = jax.tree.map(lambda x: x[episodes.start], obs)
    first_actions = policy_actions(env.action_space, _actions_of(act, firsts))
    scale = float(np.abs(returns_to_go(dataset, settings.discount)).max()) or 1.0
    discount = settings.discount * (1 - dataset.terminated.astype(np.float32))
    rows = LoggedTransitions(
        obs, dataset.action, (dataset.reward.astype(np.float64) / scale).astype(np.float32), discount, next_obs, next_actions
    )
    sampled_episodes = np.random.default_rng(seed).integers(len(episodes.start), size=(settings.fits, len(episodes.start)))
    order, counts = _bootstrap_rows(episodes, sampled_episodes)

    critics = heads_of(space).critics(env.observation_space, space, 1, settings)
    optimizer = optax.adam(settings.learning_rate)
    updates = math.gcd(settings.num_updates, max(settings.num_updates // 10, 1), _UPDATES)

    @fragment(role="buffer")
    def draw(keys, order, counts):
        keys, draw_keys = split_keys(keys, 1)
        shape = updates, settings.batch_size
        positions = jax.vmap(lambda key, count: jax.random.randint(key, shape, 0, count))(draw_keys[0], counts)
        return keys, jax.vmap(lambda order, at: order[at])(order, positions)

    @fragment(role="learner")
    def fit(params, target_params, opt_state, rows, batches):
        def update(carry, batch_rows):
            params, target_params, opt_state = carry
            batch: LoggedTransitions = jax.tree.map(lambda x: x[batch_rows], rows)
            target = batch.reward + batch.discount * critics.apply(target_params, batch.next_obs, batch.next_action)[0]

            def loss(params):
                return optax.l2_loss(critics.apply(params, batch.obs, batch.action)[0], target).mean()

            error, grads = jax.value_and_grad(loss)(params)
            changes, opt_state = optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, changes)
            target_params = optax.incremental_update(params, target_params, settings.tau)
            return (params, target_params, opt_state), error

        def one(*carry_and_batches):
            *carry, batches = carry_and_batches
            carry, errors = jax.lax.scan(update, tuple(carry), batches)
            return *carry, errors.mean()

        return jax.vmap(one)(params, target_params, opt_state, batches)

    def iteration(fits: Fits) -> tuple[Fits, dict[str, jax.Array]]:
        keys, batches = draw(fits.keys, fits.order, fits.counts)
        params, target_params, opt_state, errors = fit(fits.params, fits.target_params, fits.opt_state, fits.rows, batches)
        fits = fits._replace(params=params, target_params=target_params, opt_state=opt_state, keys=keys)
        return fits, {"loss": errors.mean()}

    def start(key: jax.Array) -> tuple[Any, Any, Any, jax.Array]:
        params_key, fit_key = jax.random.split(key)
        params = critics.init(params_key, jax.tree.map(lambda x: x[:1], firsts))
        return params, jax.tree.map(jnp.copy, params), optimizer.init(params), fit_key

    initial_fits = jax.jit(jax.vmap(start))(jax.random.split(jax.random.key(seed), settings.fits))
    axes = logical_axes(Fits, **dict.fromkeys(Fits._fields, P("env")) | {"rows": P()})
    state = Fits(*initial_fits, order=order, counts=counts, rows=rows)
    program = compile(iteration, state, policy=policies.get(policy), devices=devices, axes=axes)
    first_value = jax.jit(jax.vmap(lambda params, *first: critics.apply(params, *first)[0], (0, None, None)))

    def estimates(state: Fits) -> np.ndarray:
        first_values = np.asarray(first_value(jax.device_get(state.target_params), firsts, first_actions), np.float64) * scale
        return np.array(
            [fit_values[fit_episodes].mean() for fit_values, fit_episodes in zip(first_values, sampled_episodes, strict=True)]
        )

    iterations = settings.num_updates // updates
    state, _ = program.run(state, iterations - max(iterations // 10, 1))
    values_before = estimates(state)
    state, _ = program.run(state, max(iterations // 10, 1))
    values = estimates(state)
    if not np.isfinite(values).all():
        raise ValueError(f"the estimate is {values.mean()}: values overflow; use smaller rewards, or a smaller learning_rate")
    result = OffPolicyEstimate(
        float(values.mean()), _interval(values), values, settings.discount, float(values.mean() - values_before.mean())
    )
    if abs(result.change) > 0.05 * max(abs(result.value), result.interval[1] - result.value):
        warnings.warn(
            f"the estimate {result.value:.4g} still changed by {result.change:.2g} over the last tenth of "
            f"{settings.num_updates:,} updates; use FittedQ with a larger num_updates or tau",
            stacklevel=3,
        )
    return result


def returns_to_go(dataset: Dataset, discount: float) -> np.ndarray:
    """Returns the discounted sums of rewards from each row to the end of its episode, `[N]` float64."""
    sums, return_after = np.zeros(len(dataset)), 0.0
    ended, reward = dataset.ended, dataset.reward.astype(np.float64)
    for i in range(len(dataset) - 1, -1, -1):
        return_after = reward[i] + discount * (0.0 if ended[i] else return_after)
        sums[i] = return_after
    return sums


def _bootstrap_rows(episodes: Episodes, sampled_episodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of each fit's episodes, concatenated and padded to equal lengths; and their number without padding."""
    rows_of_episodes = [np.arange(start, start + length) for start, length in zip(episodes.start, episodes.length, strict=True)]
    rows = [np.concatenate([rows_of_episodes[e] for e in fit_episodes]) for fit_episodes in sampled_episodes]
    counts = np.array([len(fit_rows) for fit_rows in rows], np.int32)
    return np.stack([np.pad(fit_rows, (0, counts.max() - len(fit_rows))) for fit_rows in rows]).astype(np.int32), counts


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Returns the 95% interval of Student's t around the mean, with the standard deviation of the bootstrapped values as
    error.
    """
    from scipy import stats

    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1))
    return float(values.mean()) - half, float(values.mean()) + half


def _actions_of(act: Callable[[PyTree], jax.Array | np.ndarray], obs: PyTree) -> np.ndarray:
    """Returns the policy's actions for many observations, computed in batches of one size."""
    count = len(jax.tree.leaves(obs)[0])
    size = min(count, _ROWS)
    parts = []
    for begin in range(0, count, size):
        positions = np.minimum(np.arange(begin, begin + size), count - 1)  # pad the last batch
        parts.append(np.asarray(act(actor_obs(jax.tree.map(lambda x, rows=positions: x[rows], obs)))))
    return np.concatenate(parts)[:count]


def _masked_obs(dataset: Dataset, name: str) -> Any:
    obs = getattr(dataset, name)
    return MaskedObservation(obs, getattr(dataset, MASKS[name])) if dataset.has_masks else obs
