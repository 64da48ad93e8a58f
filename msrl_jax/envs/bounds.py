"""The dtypes and bounds of spaces: checks, and uniform integers between bounds."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from msrl_jax.fragments.support.checks import shown


def real_dtype(space: str, value: Any) -> np.dtype[Any]:
    """Returns a dtype of bools or real numbers; raises ValueError otherwise, also for a value, whose dtype NumPy would use."""
    if isinstance(value, str | type | np.dtype):
        with contextlib.suppress(TypeError):
            dtype = np.dtype(value)
            if any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
                return dtype
    raise ValueError(f"{space}: dtype={value!r} is not a numeric dtype; use one, such as float32 or int32")


def integer_dtype(space: str, value: Any, remedy: str) -> np.dtype[Any]:
    """Returns an integer dtype; raises ValueError otherwise, with a hint about what may have been meant."""
    if not isinstance(value, str | type | np.dtype) or not jnp.issubdtype(dtype := real_dtype(space, value), jnp.integer):
        raise ValueError(f"{space}: dtype={value!r} is not an integer dtype; use int32{remedy}")
    return dtype


def bound_of(bound: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """Returns a bound in the dtype of its space; raises ValueError if the dtype does not hold it, or if it is nan."""
    if not (jnp.issubdtype(bound.dtype, jnp.number) or bound.dtype == bool):
        raise ValueError(f"Box: {name}={shown(bound.tolist())}; use a number, or an array of numbers")
    if jnp.issubdtype(dtype, jnp.floating):
        if np.isnan(bound).any():
            raise ValueError(f"Box: {name} is nan; use a number, or an infinite one for no bound")
        most = min(float(jnp.finfo(dtype).max), float(np.finfo(np.float32).max))
        return np.where(np.abs(bound) >= most, np.copysign(np.inf, bound), bound).astype(dtype)
    for value in np.unique(bound):
        check_fits_dtype(value, dtype, f"Box: {name}={value}")
    return bound.astype(dtype)


def check_fits_dtype(value: Any, dtype: DTypeLike, place: str) -> None:
    """Raises ValueError unless an integer or bool dtype can hold a value, also if JAX has no 64-bit numbers."""
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(dtype)) if jnp.issubdtype(dtype, jnp.integer) else None
    least, most = (0, 1) if limits is None else (limits.min, limits.max)
    if not least <= value <= most or value != int(value):
        raise ValueError(f"{place} does not fit {dtype}, which holds {least} to {most}; use a dtype that holds it")


def uniform_integers(key: jax.Array, shape: tuple[int, ...], low: np.ndarray, high: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """Draws integers or bools between two inclusive bounds."""
    word = np.uint64 if jax.dtypes.canonicalize_dtype(dtype).itemsize == 8 else np.uint32
    first = jnp.asarray(low.astype(word))
    span = high.astype(word) - low.astype(word)  # modulo the word size, as is the sum below
    last = np.iinfo(word).max
    offset = jax.random.randint(key, shape, 0, np.minimum(span, last - 1) + word(1), word)
    if (span == last).any():
        offset = jnp.where(span == last, jax.random.bits(key, shape, word), offset)
    return (first + offset).astype(jax.dtypes.canonicalize_dtype(dtype))


def brief(bound: np.ndarray) -> str:
    """Returns a bound as text: one number if all elements are equal."""
    if bound.size and np.all(bound == bound.flat[0]):
        return str(bound.flat[0])
    return np.array2string(bound.ravel(), threshold=6, edgeitems=2, max_line_width=1000)
