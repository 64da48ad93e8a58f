"""Metrics that average correctly over iterations and devices."""

from typing import Any

import jax
import numpy as np
from flax import struct


@struct.dataclass
class Mean:
    """A mean stored as a sum and a count, so that means over iterations and devices are exact.

    An iteration reports scalars; a run of `N` iterations stacks them. Means of slices are exact:
    `metrics["episode_return"][-50:].mean()` is the mean over the last 50 iterations.

    Attributes:
      total: sum of the values. shape=() or [N, ...], dtype=float32
      count: number of values; if it is 0, the mean is nan. shape=() or [N, ...], dtype=float32
    """

    total: jax.Array | np.ndarray
    count: jax.Array | np.ndarray

    __iter__ = None  # not a sequence, although it can be indexed

    def __getitem__(self, index: Any) -> "Mean":
        """Returns the sums at an index, a slice or another array index."""
        return Mean(self.total[index], self.count[index])

    def mean(self, axis: int | tuple[int, ...] | None = None) -> float | np.ndarray:
        """Returns the mean of all values with equal weights, computed on the host in float64.

        Args:
          axis: dimensions to sum over first, as in `numpy.sum`: all if None, none if ().

        Returns:
          The summed totals divided by the summed counts; nan for counts of 0.
        """
        total, count = (np.sum(np.asarray(x, np.float64), axis=axis) for x in (self.total, self.count))
        mean = np.divide(total, count, out=np.full(np.shape(total), np.nan), where=count != 0)
        return mean if mean.ndim else float(mean)
