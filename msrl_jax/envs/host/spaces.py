"""Gymnasium's spaces as spaces of this package."""

from typing import Any

import numpy as np
from gymnasium import spaces as gymnasium_spaces

from msrl_jax.envs import spaces


def converted(space: Any, what: str) -> spaces.Space:
    """Converts a space of Gymnasium; 64-bit numbers become 32-bit numbers.

    Args:
      space: the space.
      what: what it is the space of, for errors.

    Returns:
      The space.

    Raises:
      TypeError: if there is no such space here.
    """
    if 0 in (getattr(space, "shape", None) or ()) or not getattr(space, "spaces", [0]):
        raise TypeError(f"{what} is {space}, which has no elements; give it at least one, for example a constant")
    match space:
        case gymnasium_spaces.Discrete():
            if max(abs(int(space.start)), int(space.start + space.n)) > np.iinfo(np.int32).max:
                raise TypeError(f"{what} is {space}, whose numbers exceed int32; wrap the environment")
            if space.start == 0:
                return spaces.Discrete(int(space.n))
            return spaces.Box(space.start, space.start + space.n - 1, (), np.int32)
        case gymnasium_spaces.Box():
            dtype = _narrow(space.dtype)
            if dtype.kind == "f":
                with np.errstate(over="ignore"):  # to infinity
                    low, high = (np.asarray(bound).astype(dtype) for bound in (space.low, space.high))
            else:
                low, high = (np.clip(bound, *_bounds(dtype)).astype(dtype) for bound in (space.low, space.high))
            return spaces.Box(low, high, space.shape, dtype)
        case gymnasium_spaces.MultiDiscrete():
            return spaces.Box(space.start, space.start + space.nvec - 1, space.shape, np.int32)
        case gymnasium_spaces.MultiBinary():
            return spaces.Box(0, 1, space.shape, np.int8)
        case gymnasium_spaces.Tuple():
            return spaces.Tuple(tuple(converted(part, what) for part in space.spaces))
        case gymnasium_spaces.Dict():
            return spaces.Dict({name: converted(part, what) for name, part in space.spaces.items()})
    raise TypeError(f"{what} is {space}, which has no counterpart here; use Box, Discrete, MultiDiscrete, Tuple or Dict")


def _narrow(dtype: Any) -> np.dtype:
    kind = np.dtype(dtype)
    return np.dtype(f"{kind.kind}4") if kind.itemsize == 8 and kind.kind in "fiu" else kind


def _bounds(dtype: np.dtype) -> tuple[int, int]:
    return (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
