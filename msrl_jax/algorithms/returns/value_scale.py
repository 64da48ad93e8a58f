"""Running statistics of value targets: networks predict standardized values (Yu et al., 2022, arXiv 2103.01955, section 3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

_DECAY = 0.99999
"""How much of the statistics remains after an update, as in MAPPO's code: nearly the mean over a whole run."""


class ValueScale(NamedTuple):
    """Decaying sums over value targets, one of each for every network. `[]` or `[A]`

    Attributes:
      total: sum of the means of the targets.
      total_square: sum of the means of their squares.
      weight: sum of the weights, which corrects the bias of the start.
    """

    total: jax.Array
    total_square: jax.Array
    weight: jax.Array

    @property
    def mean(self) -> jax.Array:
        """The mean of the targets; 0 before the first."""
        return self.total / jnp.maximum(self.weight, 1e-8)

    @property
    def deviation(self) -> jax.Array:
        """The standard deviation of the targets, at least 0.1; 1 before the first."""
        variance = self.total_square / jnp.maximum(self.weight, 1e-8) - self.mean**2
        return jnp.where(self.weight > 0, jnp.sqrt(jnp.maximum(variance, 1e-2)), 1.0)

    def normalize(self, value: jax.Array) -> jax.Array:
        """Standardizes values `[...]` or `[..., A]`."""
        return (value - self.mean) / self.deviation

    def restore(self, value: jax.Array) -> jax.Array:
        """The values whose standardized form is given: the inverse of `normalize`."""
        return value * self.deviation + self.mean

    def updated(self, target: jax.Array, counts: jax.Array) -> "ValueScale":
        """Adds targets.

        Args:
          target: the targets; those of one network are all, or with statistics `[A]` those of one agent. `[T, E, A]`
          counts: which of them count; if none do, nothing changes. `[T, E, A]` bool

        Returns:
          The new statistics.
        """
        axes = None if self.weight.ndim == 0 else (0, 1)
        number = counts.sum(axes)
        mean, square = (jnp.where(counts, x, 0.0).sum(axes) / jnp.maximum(number, 1) for x in (target, target**2))
        moved = ValueScale(*(_DECAY * old + (1 - _DECAY) * new for old, new in zip(self, (mean, square, 1.0), strict=True)))
        return ValueScale(*(jnp.where(number > 0, new, old) for old, new in zip(self, moved, strict=True)))


def value_scale(*shape: int) -> ValueScale:
    """Statistics without targets."""
    return ValueScale(jnp.zeros(shape), jnp.zeros(shape), jnp.zeros(shape))
