"""The running scale of value targets, which divides values for the critic.

As a result, the value loss of large values does not dominate the policy loss, and the initial scale of the critic is about
right. The mean is not subtracted: while it moves, the critic would have to shift every value with it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs.running import compensated_sum

_DECAY = 0.99999
"""How much of the mean remains after an update: nearly the mean over a whole run."""

_SMALL = 2.0**-80
"""Factor of values whose squares overflow; the square of its product with the largest float32 is 8e28."""


class ValueScale(NamedTuple):
    """The root of the decaying mean square of value targets, one per network, `[]` or `[A]`; squares would overflow.

    An update may be smaller than the precision of float32, so `rest` keeps the rounding error; see `RunningStatistics`.
    """

    root: jax.Array  # 0 before the first target
    weight: jax.Array  # sum of the weights, for the correction of the initial bias
    rest: jax.Array  # the part of the root that `root` does not hold

    @property
    def divisor(self) -> jax.Array:
        """The root of the mean square, at least 1, so that smaller values are not scaled."""
        return jnp.maximum(self.root, 1.0)

    def updated(self, target: jax.Array, valid: jax.Array | None) -> "ValueScale":
        """Adds the targets `[T, E]` or `[T, E, A]` in the mask `valid`, all if None; an empty mask changes nothing."""
        axes = tuple(range(target.ndim - self.root.ndim))
        number = target.size // self.root.size if valid is None else valid.sum(axes)
        old, batch_root = self.root, _root_mean_square(target, valid, number, axes)
        weight = _DECAY * self.weight + (1 - _DECAY)
        share = (1 - _DECAY) / weight
        # The difference of the squares, divided by the sum of the roots; in halves, which do not overflow.
        new_root = jnp.hypot(jnp.sqrt(1 - share) * old, jnp.sqrt(share) * batch_root)
        ratio = (batch_root / 2 + old / 2) / jnp.maximum(new_root / 2 + old / 2, jnp.finfo(jnp.float32).tiny)
        root, rest = compensated_sum(old, share * (batch_root - old) * ratio, self.rest)
        new = ValueScale(root, weight, rest)
        return new if valid is None else ValueScale(*(jnp.where(number > 0, x, y) for x, y in zip(new, self, strict=True)))


def _root_mean_square(x: jax.Array, valid: jax.Array | None, number: Any, axes: tuple[int, ...]) -> jax.Array:
    """Computes the root mean square over `axes` of the values in the mask, without overflow of squares. `[]` or `[A]`"""
    square = jnp.square(jnp.stack([x, x * _SMALL]).astype(jnp.float32))  # one sum, so one round of communication
    if valid is not None:
        square = jnp.where(valid, square, 0.0)
    root, small = jnp.sqrt(square.sum(tuple(axis + 1 for axis in axes)) / jnp.maximum(number, 1))
    return jnp.where(jnp.isfinite(root), root, small / _SMALL)


def value_scale(*shape: int) -> ValueScale:
    """Returns the scale before any target: 1."""
    return ValueScale(*[jnp.zeros(shape, jnp.float32)] * 3)
