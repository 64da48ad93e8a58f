"""Metrics that reduce correctly: the value types an iteration may report."""

from typing import Any

import jax
import numpy as np
from flax import struct


@struct.dataclass
class Mean:
    """A mean kept as two sums, so that it stays exact when iterations and devices are added up.

    An iteration reports scalars; a run of `N` iterations stacks them. Any stretch of it has its exact mean, as the last
    50 iterations have in `metrics["episode_return"][-50:].mean()`.

    Attributes:
      total: sum of the values. shape=() or [N, ...], dtype=float32
      count: how many there were; the mean is undefined (nan) while it is 0. shape=() or [N, ...], dtype=float32
    """

    total: jax.Array | np.ndarray
    count: jax.Array | np.ndarray

    __iter__ = None  # not a sequence, although it can be indexed

    def __getitem__(self, index: Any) -> "Mean":
        """The sums at an index, a slice or whatever else arrays take."""
        return Mean(self.total[index], self.count[index])

    def mean(self, axis: int | tuple[int, ...] | None = None) -> float | np.ndarray:
        """The mean of all values behind the sums, each weighing the same; computed on the host, in float64.

        Args:
          axis: the dimensions of the sums to add up, as in `numpy.sum`: all if None, none if ().

        Returns:
          Totals over counts, added up before they are divided; nan where there are no values.
        """
        total, count = (np.sum(np.asarray(x, np.float64), axis=axis) for x in (self.total, self.count))
        mean = np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count != 0)
        return mean if mean.ndim else float(mean)
