"""The running size of value targets, by which values are divided for the critic.

Then the errors of large values do not outweigh the policy's, and the critic's first weights are about right. Unlike in
`value_scale.py`, the mean is not subtracted: while it moves, the critic would have to move every value with it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs.running import compensated_sum

_DECAY = 0.99999
"""How much of the mean remains after an update: nearly the mean over a whole run."""


class ValueSize(NamedTuple):
    """The decaying mean square of value targets.

    An update moves it by less than the precision of float32, so the rest keeps what was rounded off; see `RunningStatistics`.
    """

    square: jax.Array  # 0 before the first target, []
    weight: jax.Array  # sum of the weights, which corrects the bias of the start, []
    rest: jax.Array  # the part of the mean square that `square` does not hold, []

    @property
    def size(self) -> jax.Array:
        """The root of the mean square, at least 1: smaller values stay as they are."""
        return jnp.sqrt(jnp.maximum(self.square, 1.0))

    def updated(self, target: jax.Array, counts: jax.Array | None) -> "ValueSize":
        """Adds the targets `[T, E]` that count, all if None; if none do, nothing changes."""
        square, number = jnp.square(target), target.size
        if counts is not None:
            square, number = jnp.where(counts, square, 0.0), counts.sum()
        mean = (square.sum() / jnp.maximum(number, 1)).astype(jnp.float32)
        weight = _DECAY * self.weight + (1 - _DECAY)
        moved = compensated_sum(self.square, (1 - _DECAY) / weight * (mean - self.square), self.rest)
        new = ValueSize(moved[0], weight, moved[1])
        return new if counts is None else ValueSize(*(jnp.where(number > 0, x, y) for x, y in zip(new, self, strict=True)))


def value_size() -> ValueSize:
    """The size before any target: 1."""
    return ValueSize(*[jnp.zeros((), jnp.float32)] * 3)
