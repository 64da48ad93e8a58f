"""Running statistics of value targets: networks predict standardized values (Yu et al., 2022, arXiv 2103.01955, section 3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs.running import compensated_sum

_DECAY = 0.99999
"""How much of the statistics remains after an update, as in MAPPO's code: nearly the mean over a whole run."""


class ValueScale(NamedTuple):
    """Decaying mean and variance of value targets, one of each for every network. `[]` or `[A]`

    An update moves them by less than the precision of float32, so the rests keep what was rounded off; see
    `RunningStatistics`.
    """

    mean: jax.Array  # 0 before the first target
    variance: jax.Array  # 0 before the first target
    weight: jax.Array  # sum of the weights, which corrects the bias of the start
    mean_rest: jax.Array  # the part of the mean that `mean` does not hold
    variance_rest: jax.Array  # the part of the variance that `variance` does not hold

    @property
    def deviation(self) -> jax.Array:
        """The standard deviation of the targets, at least 0.1; 1 before the first."""
        return jnp.where(self.weight > 0, jnp.sqrt(jnp.maximum(self.variance, 1e-2)), 1.0)

    def normalize(self, value: jax.Array) -> jax.Array:
        """Standardizes values `[...]` or `[..., A]`."""
        return (value - self.mean) / self.deviation

    def restore(self, value: jax.Array) -> jax.Array:
        """The values whose standardized form is given: the inverse of `normalize`."""
        return value * self.deviation + self.mean

    def updated(self, target: jax.Array, counts: jax.Array) -> "ValueScale":
        """Adds the targets `[T, E, A]` that count; if none do, nothing changes."""
        axes = None if self.weight.ndim == 0 else (0, 1)
        number = counts.sum(axes)

        def mean_of(x: jax.Array) -> jax.Array:
            return jnp.where(counts, x, 0.0).sum(axes) / jnp.maximum(number, 1)

        center = mean_of(target)
        spread = mean_of((target - center) ** 2)
        weight = _DECAY * self.weight + (1 - _DECAY)
        new, shift = (1 - _DECAY) / weight, center - self.mean
        mean, mean_rest = compensated_sum(self.mean, new * shift, self.mean_rest)
        increment = new * (spread - self.variance + (1 - new) * shift**2)
        variance, variance_rest = compensated_sum(self.variance, increment, self.variance_rest)
        moved = ValueScale(mean, variance, weight, mean_rest, variance_rest)
        return ValueScale(*(jnp.where(number > 0, new, old) for old, new in zip(self, moved, strict=True)))


def value_scale(*shape: int) -> ValueScale:
    """Statistics without targets."""
    return ValueScale(*[jnp.zeros(shape, jnp.float32)] * 5)
