"""The dtypes and bounds of spaces: checks, and uniform integers between bounds."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from msrl_jax.fragments.support.checks import shown


def real_dtype(space: str, given: Any) -> np.dtype[Any]:
    """Returns a dtype of bools or real numbers; raises ValueError otherwise, also for a value, whose dtype NumPy would use."""
    if isinstance(given, str | type | np.dtype):
        with contextlib.suppress(TypeError):
            dtype = np.dtype(given)
            if any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
                return dtype
    raise ValueError(f"{space}: dtype={given!r} is not a numeric dtype; use one, such as float32 or int32")


def integer_dtype(space: str, given: Any, remedy: str) -> np.dtype[Any]:
    """Returns an integer dtype; raises ValueError otherwise, with a hint about what may have been meant."""
    if not isinstance(given, str | type | np.dtype) or not jnp.issubdtype(dtype := real_dtype(space, given), jnp.integer):
        raise ValueError(f"{space}: dtype={given!r} is not an integer dtype; use int32{remedy}")
    return dtype


def bound_of(given: np.ndarray, dtype: np.dtype[Any], name: str) -> np.ndarray:
    """Returns a bound in the dtype of its space; raises ValueError if the dtype does not hold it, or if it is nan."""
    if not (jnp.issubdtype(given.dtype, jnp.number) or given.dtype == bool):
        raise ValueError(f"Box: {name}={shown(given.tolist())}; use a number, or an array of numbers")
    if jnp.issubdtype(dtype, jnp.floating):
        if np.isnan(given).any():
            raise ValueError(f"Box: {name} is nan; use a number, or an infinite one for no bound")
        most = min(float(jnp.finfo(dtype).max), float(np.finfo(np.float32).max))
        return np.where(np.abs(given) >= most, np.copysign(np.inf, given), given).astype(dtype)
    for value in np.unique(given):
        check_fits_dtype(value, dtype, f"Box: {name}={value}")
    return given.astype(dtype)


def check_fits_dtype(value: Any, dtype: DTypeLike, what: str) -> None:
    """Raises ValueError unless an integer or bool dtype can hold a value, also if JAX has no 64-bit numbers."""
    limits = jnp.iinfo(jax.dtypes.canonicalize_dtype(dtype)) if jnp.issubdtype(dtype, jnp.integer) else None
    least, most = (0, 1) if limits is None else (limits.min, limits.max)
    if not least <= value <= most or value != int(value):
        raise ValueError(f"{what} does not fit {dtype}, which holds {least} to {most}; use a dtype that holds it")


def uniform_integers(key: jax.Array, shape: tuple[int, ...], low: np.ndarray, high: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """Draws integers or bools between two inclusive bounds."""
    word = np.uint64 if jax.dtypes.canonicalize_dtype(dtype).itemsize == 8 else np.uint32
    first = jnp.asarray(low.astype(word))
    span = high.astype(word) - low.astype(word)  # modulo the word size, as is the sum below
    last = np.iinfo(word).max
    drawn = jax.random.randint(key, shape, 0, np.minimum(span, last - 1) + word(1), word)
    if (span == last).any():
        drawn = jnp.where(span == last, jax.random.bits(key, shape, word), drawn)
    return (first + drawn).astype(jax.dtypes.canonicalize_dtype(dtype))


def brief(bound: np.ndarray) -> str:
    """Returns a bound as text: one number if all elements are equal."""
    if bound.size and np.all(bound == bound.flat[0]):
        return str(bound.flat[0])
    return np.array2string(bound.ravel(), threshold=6, edgeitems=2, max_line_width=1000)
