"""Metrics on the host: reads them, stacks those of iterations, and joins those of chunks."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.fragments.runtime.processes import read as read


def stack(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Stacks the metrics of single iterations.

    Args:
      rows: the metrics' leaves of each iteration, as `read` returns them.

    Returns:
      One array for each leaf, with a leading axis of iterations: a NumPy array, or typed keys.
    """
    return [_together(np.stack, jnp.stack, column) for column in zip(*rows, strict=True)]


def join(chunks: Sequence[Sequence[Any]]) -> list[Any]:
    """Joins the metrics of chunks of iterations.

    Args:
      chunks: the metrics' leaves of each chunk, as `stack` returns them.

    Returns:
      One array for each leaf, with the chunks concatenated along the leading axis. NumPy arrays may be written to.
    """
    if len(chunks) == 1:  # JAX's arrays on the host are read-only
        return [x.copy() if isinstance(x, np.ndarray) and not x.flags.writeable else x for x in chunks[0]]
    return [_together(np.concatenate, jnp.concatenate, column) for column in zip(*chunks, strict=True)]


def _together(on_host: Any, on_device: Any, arrays: Sequence[Any]) -> Any:
    """Combines arrays on the host; typed keys stay JAX arrays, because NumPy has none."""
    is_key = jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key)
    return on_device(arrays) if is_key else on_host(arrays)
