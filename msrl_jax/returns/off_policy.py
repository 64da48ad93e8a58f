"""The off-policy targets V-trace and Retrace."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from msrl_jax.kernels.time import backward_sums
from msrl_jax.returns.advantages import errors
from msrl_jax.returns.n_step import last_steps


class VTrace(NamedTuple):
    """Targets and advantages of a trajectory."""

    target: jax.Array  # of the value function, `v_s` in the paper, [T, ...]
    advantage: jax.Array  # for the policy gradient, multiplied by their importance weights, [T, ...]


def vtrace(
    log_ratio: jax.Array,
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    valid: jax.Array | None = None,
    *,
    discount: float,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> VTrace:
    """V-trace: off-policy targets and advantages of an actor-critic (Espeholt et al., 2018, arXiv 1802.01561).

    The targets are eq. 1 in the recursive form of remark 1, with `lambda_` as in remark 2. The advantages are those of section
    4.2. On-policy and with all clips at least 1, the targets equal `lambda_return`; with `lambda_` 1, the advantages equal
    `gae`.

    Args:
      log_ratio: log-probability of the action under the policy to evaluate, minus its log-probability when taken. `[T, ...]`
      reward: rewards. `[T, ...]`
      value: values of the observations at every step. `[T, ...]`
      next_value: values of the true successors, as in `gae`; within an episode, `value` one step later. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it takes precedence over `truncated`. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      valid: mask of valid steps; all if None. The target of an invalid step is its value, and the step before it bootstraps
        from `next_value`. `[T, ...]` bool
      discount: discount factor per step.
      lambda_: decay per step of a trace, in addition to the discount.
      clip_rho: largest importance weight of an error; the fixed point depends on it.
      clip_c: largest importance weight of a trace; larger clips converge faster and have more variance.
      clip_pg_rho: largest importance weight of a policy gradient.

    Returns:
      The targets and the advantages; no gradient should flow through them.
    """
    chex.assert_equal_shape([log_ratio, reward, value, next_value, terminated, truncated])
    ratio = jnp.exp(log_ratio)
    ends = last_steps(terminated, truncated)
    delta = jnp.minimum(clip_rho, ratio) * errors(reward, value, next_value, terminated, discount)
    if valid is not None:
        delta, ends = jnp.where(valid, delta, 0.0), ends | ~valid
    correction = backward_sums(delta, jnp.where(ends, 0.0, discount * lambda_ * jnp.minimum(clip_c, ratio)))
    next_correction = jnp.concatenate([correction[1:], correction[-1:]])
    next_target = next_value + jnp.where(ends, 0.0, next_correction)
    advantage = jnp.minimum(clip_pg_rho, ratio) * errors(reward, value, next_target, terminated, discount)
    return VTrace(value + correction, advantage)


def retrace(
    log_ratio: jax.Array,
    reward: jax.Array,
    action_value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    lambda_: float = 1.0,
) -> jax.Array:
    """Retrace: off-policy targets of action values (Munos et al., 2016, arXiv 1606.02647).

    One sample of the operator in eq. 3, with the traces `c_s = lambda_ * min(1, ratio)`.

    Args:
      log_ratio: log-probability of the action under the policy to evaluate, minus its log-probability when taken; the first
        value of an episode has no effect. `[T, ...]`
      reward: rewards. `[T, ...]`
      action_value: values of the observations and actions taken, `Q(x_t, a_t)`. `[T, ...]`
      next_value: expected action values of the true successors under the policy to evaluate; any finite number where
        `terminated`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it takes precedence over `truncated`. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      discount: discount factor per step.
      lambda_: 0 gives one-step targets, 1 the longest traces.

    Returns:
      The targets of `action_value`; no gradient should flow through them. `[T, ...]`
    """
    chex.assert_equal_shape([log_ratio, reward, action_value, next_value, terminated, truncated])
    trace = lambda_ * jnp.minimum(1.0, jnp.exp(log_ratio))
    next_trace = jnp.concatenate([trace[1:], trace[-1:]])
    ends = last_steps(terminated, truncated)
    delta = errors(reward, action_value, next_value, terminated, discount)
    return action_value + backward_sums(delta, jnp.where(ends, 0.0, discount * next_trace))
