"""Returns and advantages: what a trajectory says about the value of its actions."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def gae(
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    gae_lambda: float,
) -> jax.Array:
    """Generalized advantage estimation (Schulman et al., 2016, arXiv 1506.02438, eq. 16) over whole and cut episodes.

    A terminated step has no future: its successor is worth 0. A truncated step has one that was not seen: its
    successor is worth `next_value`. Neither lets advantages of the next episode flow back into its own.

    Args:
      reward: rewards. `[T, ...]`
      value: values of the observations acted on. `[T, ...]`
      next_value: values of the true successors, which where an episode ends are its last observations and not the
        first ones of the next; anything finite where `terminated`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it wins where `truncated` also holds. `[T, ...]` bool
      truncated: whether the episode was cut short, as by a time limit. `[T, ...]` bool
      discount: the factor per step.
      gae_lambda: 0 gives one-step advantages, 1 gives discounted returns minus values.

    Returns:
      The advantages; plus `value` they are the targets of the value function. `[T, ...]`
    """
    delta = _errors(reward, value, next_value, terminated, discount)
    return _accumulate(delta, jnp.where(terminated | truncated, 0.0, discount * gae_lambda))


def standardize(advantage: jax.Array) -> jax.Array:
    """Shifts and scales advantages to mean 0 and standard deviation 1 over all of the array.

    Args:
      advantage: advantages. `[...]`

    Returns:
      The standardized advantages; zeros if all are equal. `[...]`
    """
    centered = advantage - advantage.mean()
    return centered / (jnp.sqrt(jnp.mean(jnp.square(centered))) + 1e-8)


def n_step_return(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    num_steps: int | None = None,
) -> jax.Array:
    """Returns of `num_steps` steps and a value (Sutton & Barto, 2018, eq. 7.1; Mnih et al., 2016, arXiv 1602.01783).

    The last steps of the unroll, and of a truncated episode, have fewer rewards and bootstrap where they are cut; a
    termination ends the sum.

    Args:
      reward: rewards. `[T, ...]`
      next_value: values of the true successors, as in `gae`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it wins where `truncated` also holds. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      discount: the factor per step.
      num_steps: how many rewards to sum at most; None for all that there are, which is A3C's choice.

    Returns:
      The returns. `[T, ...]`

    Raises:
      ValueError: if `num_steps` is below 1.
    """
    if num_steps is None or num_steps >= len(reward):
        return lambda_return(reward, next_value, terminated, truncated, discount=discount, lambda_=1.0)
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be at least 1, or None for all steps of the unroll")
    one_step = reward + discount * jnp.where(terminated, 0.0, next_value)
    ends = _ends(terminated, truncated)

    def extend(returns, _):
        after = jnp.concatenate([returns[1:], returns[-1:]])
        return jnp.where(ends, one_step, reward + discount * after), None

    return jax.lax.scan(extend, one_step, None, length=num_steps - 1)[0]


def lambda_return(
    reward: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    lambda_: float,
) -> jax.Array:
    """The mixture of all n-step returns with weights that fall by `lambda_` (Sutton & Barto, 2018, eq. 12.2 and 12.3).

    It equals `gae` plus the values of the observations acted on, which it does not need.

    Args:
      reward: rewards. `[T, ...]`
      next_value: values of the true successors, as in `gae`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it wins where `truncated` also holds. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      discount: the factor per step.
      lambda_: 0 gives one-step returns, 1 gives the longest that there are.

    Returns:
      The returns. `[T, ...]`
    """
    next_value = jnp.where(terminated, 0.0, next_value)
    decay = jnp.where(_ends(terminated, truncated), 0.0, lambda_)
    return _accumulate(reward + discount * (1 - decay) * next_value, discount * decay)


class VTrace(NamedTuple):
    """What V-trace makes of a trajectory.

    Attributes:
      target: targets of the value function, `v_s` in the paper. shape=(T, ...)
      advantage: advantages for the policy gradient, their importance weights included. shape=(T, ...)
    """

    target: jax.Array
    advantage: jax.Array


def vtrace(
    log_ratio: jax.Array,
    reward: jax.Array,
    value: jax.Array,
    next_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    *,
    discount: float,
    lambda_: float = 1.0,
    clip_rho: float = 1.0,
    clip_c: float = 1.0,
    clip_pg_rho: float = 1.0,
) -> VTrace:
    """V-trace: off-policy targets and advantages of an actor-critic (Espeholt et al., 2018, arXiv 1802.01561).

    The targets are eq. 1 in the recursive form of remark 1, with `lambda_` as in remark 2; the advantages are those of
    section 4.2. On-policy, with all clips at least 1, they are `lambda_return` and, if `lambda_` is 1, `gae`.

    Args:
      log_ratio: log-probability of the action under the policy to evaluate, minus that when it was taken. `[T, ...]`
      reward: rewards. `[T, ...]`
      value: values of the observations acted on. `[T, ...]`
      next_value: values of the true successors, as in `gae`: within an episode, `value` one step later. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it wins where `truncated` also holds. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      discount: the factor per step.
      lambda_: the factor per step by which a trace falls beyond the discount.
      clip_rho: largest importance weight of an error: it decides which policy's value the fixed point is.
      clip_c: largest importance weight of a trace: it trades speed for variance.
      clip_pg_rho: largest importance weight of a policy gradient.

    Returns:
      The targets and the advantages; no gradient should flow through them.
    """
    ratio = jnp.exp(log_ratio)
    ends = _ends(terminated, truncated)
    delta = jnp.minimum(clip_rho, ratio) * _errors(reward, value, next_value, terminated, discount)
    correction = _accumulate(delta, jnp.where(ends, 0.0, discount * lambda_ * jnp.minimum(clip_c, ratio)))
    after = jnp.concatenate([correction[1:], correction[-1:]])
    next_target = next_value + jnp.where(ends, 0.0, after)
    advantage = jnp.minimum(clip_pg_rho, ratio) * _errors(reward, value, next_target, terminated, discount)
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

    One sample of the operator in eq. 3, with the traces `c_s = lambda_ * min(1, ratio)` that give Retrace its name.

    Args:
      log_ratio: log-probability of the action under the policy to evaluate, minus that when it was taken; the first of
        an episode does not matter. `[T, ...]`
      reward: rewards. `[T, ...]`
      action_value: values of the observations and actions taken, `Q(x_t, a_t)`. `[T, ...]`
      next_value: expected action values of the true successors under the policy to evaluate; anything finite where
        `terminated`. `[T, ...]`
      terminated: whether the episode ended in a terminal state; it wins where `truncated` also holds. `[T, ...]` bool
      truncated: whether the episode was cut short. `[T, ...]` bool
      discount: the factor per step.
      lambda_: 0 gives one-step targets, 1 the longest traces.

    Returns:
      The targets of `action_value`; no gradient should flow through them. `[T, ...]`
    """
    trace = lambda_ * jnp.minimum(1.0, jnp.exp(log_ratio))
    next_trace = jnp.concatenate([trace[1:], trace[-1:]])
    ends = _ends(terminated, truncated)
    delta = _errors(reward, action_value, next_value, terminated, discount)
    return action_value + _accumulate(delta, jnp.where(ends, 0.0, discount * next_trace))


def _ends(terminated: jax.Array, truncated: jax.Array) -> jax.Array:
    """Whether nothing of what follows a step belongs to it: where an episode ends, and where the unroll does."""
    return jnp.asarray(terminated | truncated).at[-1].set(True)


def _errors(
    reward: jax.Array, value: jax.Array, next_value: jax.Array, terminated: jax.Array, discount: float
) -> jax.Array:
    """The temporal-difference errors; what follows a terminal state is worth 0."""
    return reward + discount * jnp.where(terminated, 0.0, next_value) - value


def _accumulate(delta: jax.Array, decay: jax.Array) -> jax.Array:
    """Sums backwards in time: `sum[t] = delta[t] + decay[t] * sum[t + 1]`. `[T, ...]`."""

    def backwards(total, step):
        delta, decay = step
        total = delta + decay * total
        return total, total

    return jax.lax.scan(backwards, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]
