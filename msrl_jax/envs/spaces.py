"""Spaces of observations and actions.

A value of a `Tuple` or `Dict` space is a tuple or dict of values of its parts; a value of another space is one array.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from msrl_jax.envs.bounds import bound_of, brief, check_fits_dtype, integer_dtype, real_dtype, uniform_integers
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.tracebacks import entry


@entry
@dataclass(frozen=True)
class Discrete:
    """The integers `start .. start+n-1`. Policies and one-hot vectors count from 0.

    Attributes:
      n: number of values, at least 1.
      dtype: integer dtype of a value. It must hold all values, as must int32, in which policies count.
      start: the first value.
    """

    n: int
    dtype: DTypeLike = jnp.int32
    start: int = 0

    def __post_init__(self):
        most = np.iinfo(np.int32).max
        object.__setattr__(self, "n", whole("Discrete: n", self.n, 1, most))
        object.__setattr__(self, "start", whole("Discrete: start", self.start, -most - 1, most - self.n + 1))
        object.__setattr__(self, "dtype", integer_dtype("Discrete", self.dtype, "; the first value is start=..."))
        for value in (self.start, self.high):
            check_fits_dtype(value, self.dtype, f"the value {value} of {self!r}")

    def __repr__(self) -> str:
        return f"Discrete({self.n}, start={self.start})" if self.start else f"Discrete({self.n})"

    @property
    def shape(self) -> tuple[()]:
        """The shape of a value: a scalar."""
        return ()

    @property
    def low(self) -> int:
        """The first value."""
        return self.start

    @property
    def high(self) -> int:
        """The last value."""
        return self.start + self.n - 1

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws a value uniformly."""
        return uniform_integers(key, (), np.asarray(self.low), np.asarray(self.high), self.dtype)

    def contains(self, x: ArrayLike) -> jax.Array:
        """Whether `x` is an integer of the space; bool[]."""
        x = jnp.asarray(x)
        if x.shape != () or not jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(False)
        limits = jnp.iinfo(x.dtype)
        low, high = max(self.low, int(limits.min)), min(self.high, int(limits.max))  # the values that its dtype has
        if low > high:
            return jnp.asarray(False)
        return (x >= np.asarray(low, x.dtype)) & (x <= np.asarray(high, x.dtype))


@entry
@dataclass(frozen=True, eq=False)
class Box:
    """Arrays with a lower and an upper bound for every element.

    A float bound equal to the largest number of the dtype, or of float32, means "unbounded" and is stored as infinite.

    Attributes:
      low: lower bounds, -inf for none; a number or an array, stored as a NumPy array `[*shape]`.
      high: upper bounds, inf for none; a number or an array, stored as a NumPy array `[*shape]`.
      shape: shape of a value.
      dtype: dtype of a value.
    """

    low: Any
    high: Any
    shape: tuple[int, ...]
    dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        dtype = real_dtype("Box", self.dtype)
        try:
            shape = tuple(operator.index(size) for size in self.shape)
        except TypeError:
            raise ValueError(f"Box: shape={self.shape!r} is not a shape; use a tuple of integers, such as (3,)") from None
        bounds = []
        for name, bound in {"low": self.low, "high": self.high}.items():
            bound = bound_of(np.asarray(bound), dtype, name)
            try:
                bounds.append(np.broadcast_to(bound, shape))  # a read-only view
            except ValueError:
                raise ValueError(f"Box: {name} of shape {bound.shape} does not broadcast to shape={shape}") from None
        low, high = bounds
        if np.any(low > high):
            where = tuple(int(i) for i in np.argwhere(low > high)[0])
            raise ValueError(f"Box is empty: low={low[where]} is above high={high[where]} at index {where}")
        for name, value in {"low": low, "high": high, "shape": shape, "dtype": dtype}.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        low, high = (brief(bound) for bound in (self.low, self.high))
        return f"Box({low}, {high}, {self.shape}, {self.dtype})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Box) or self.dtype != other.dtype:
            return False
        return np.array_equal(self.low, other.low) and np.array_equal(self.high, other.high)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype, self.low.tobytes(), self.high.tobytes()))

    def sample(self, key: jax.Array) -> jax.Array:
        """Draws every element independently.

        An element with two bounds is uniform. An element without bounds is normal. An element with one bound has an
        exponential distance from it.
        """
        if not jnp.issubdtype(self.dtype, jnp.floating):
            return uniform_integers(key, self.shape, self.low, self.high, self.dtype)
        uniform_key, normal_key, tail_key = jax.random.split(key, 3)
        has_low, has_high = np.isfinite(self.low), np.isfinite(self.high)
        low, high = np.where(has_low, self.low, 0), np.where(has_high, self.high, 0)
        unit = jax.random.uniform(uniform_key, self.shape, jnp.float32)
        tail = jax.random.exponential(tail_key, self.shape, jnp.float32)
        between = jnp.clip(low * (1 - unit) + high * unit, low, np.maximum(low, high))  # high - low could overflow
        beyond = jnp.where(has_low, low + tail, high - tail)
        unbounded = jax.random.normal(normal_key, self.shape, jnp.float32)
        sample = jnp.where(has_low & has_high, between, jnp.where(has_low | has_high, beyond, unbounded))
        return sample.astype(jax.dtypes.canonicalize_dtype(self.dtype))

    def contains(self, x: ArrayLike) -> jax.Array:
        """Whether `x` has the space's shape and is within the bounds; bool[]."""
        x = jnp.asarray(x)
        if x.shape != self.shape:
            return jnp.asarray(False)
        return jnp.all((x >= self.low) & (x <= self.high))


@entry
def MultiDiscrete(nvec: ArrayLike, dtype: DTypeLike = jnp.int32) -> Box:
    """Makes the space of several integers, each with its own range: a `Box` from 0 to `nvec - 1`.

    Args:
      nvec: the number of values of each integer, at least 1. `[*shape]`
      dtype: integer dtype of a value.

    Returns:
      The space. A `Box` of integers with other lower bounds is a space of the same kind.

    Raises:
      ValueError: if an integer has no values, or if `dtype` is not an integer dtype.
    """
    sizes = np.asarray(nvec)
    if not np.issubdtype(sizes.dtype, np.integer) or (sizes < 1).any():
        raise ValueError(f"MultiDiscrete(nvec={nvec}): pass integers of at least 1, the number of values of each component")
    return Box(0, sizes - 1, sizes.shape, integer_dtype("MultiDiscrete", dtype, "; other lower bounds need a Box of integers"))


class _Compound:
    """Base class of `Tuple` and `Dict`."""

    spaces: Any

    def items(self) -> Iterable[tuple[Any, "Space"]]:
        """Returns the parts, with their names or positions."""
        return self.spaces.items() if isinstance(self.spaces, Mapping) else enumerate(self.spaces)

    @property
    def shape(self) -> Any:
        """The shapes of the parts."""
        return jax.tree.map(lambda space: space.shape, self.spaces)

    @property
    def dtype(self) -> Any:
        """The dtypes of the parts."""
        return jax.tree.map(lambda space: space.dtype, self.spaces)

    def sample(self, key: jax.Array) -> Any:
        """Draws a value of every part."""
        parts, tree = jax.tree.flatten(self.spaces)
        keys = jax.random.split(key, len(parts))
        return jax.tree.unflatten(tree, [part.sample(k) for part, k in zip(parts, keys, strict=True)])


@entry
@dataclass(frozen=True)
class Tuple(_Compound):
    """Tuples with one value of each space; named tuples if `spaces` is a named tuple."""

    spaces: tuple["Space", ...]

    def __post_init__(self):
        if not isinstance(self.spaces, Iterable) or isinstance(self.spaces, Mapping):
            raise TypeError(f"Tuple({self.spaces!r}): pass one tuple of spaces, such as Tuple((Discrete(2), Discrete(3)))")
        if not isinstance(self.spaces, tuple):
            object.__setattr__(self, "spaces", tuple(self.spaces))

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` is a tuple of values of the parts; bool[]."""
        if not isinstance(x, tuple) or len(x) != len(self.spaces):
            return jnp.asarray(False)
        return jnp.all(jnp.stack([space.contains(v) for space, v in zip(self.spaces, x, strict=True)]))


@entry
@dataclass(frozen=True)
class Dict(_Compound):
    """Dicts with one value of each named space, sorted by name as in JAX."""

    spaces: Mapping[str, "Space"]

    def __post_init__(self):
        if not isinstance(self.spaces, Mapping):
            raise TypeError(f"Dict({self.spaces!r}): pass one dict of spaces by name, such as Dict({{'a': Discrete(2)}})")
        object.__setattr__(self, "spaces", dict(sorted(self.spaces.items())))

    def __hash__(self) -> int:
        return hash(tuple(self.spaces.items()))

    def contains(self, x: Any) -> jax.Array:
        """Whether `x` is a dict of values of the parts; bool[]."""
        if not isinstance(x, Mapping) or set(x) != set(self.spaces):
            return jnp.asarray(False)
        return jnp.all(jnp.stack([space.contains(x[name]) for name, space in self.spaces.items()]))


Space: TypeAlias = Discrete | Box | Tuple | Dict


def arrays_of(space: Space, x: Any = None, path: str = "") -> Iterator[tuple[str, Discrete | Box, Any]]:
    """Yields the spaces of the arrays in a space, with their paths and, if a value `x` of the space is given, the arrays."""
    if isinstance(space, Tuple | Dict):
        for key, part in space.items():
            yield from arrays_of(part, None if x is None else x[key], f"{path}[{key!r}]")
    else:
        yield path, space, x


def map_arrays(convert: Callable[[Discrete | Box], Space], space: Space) -> Space:
    """Returns the space with other spaces of its arrays."""
    if isinstance(space, Tuple | Dict):
        return type(space)(jax.tree.map(lambda part: map_arrays(convert, part), space.spaces))
    return convert(space)


def unbounded(values: Any) -> Space:
    """Returns the space of arrays, or of dicts and tuples of arrays, of which only shapes and dtypes are known."""
    if isinstance(values, Mapping | tuple) and not values:
        raise TypeError(f"an empty {type(values).__name__}")
    if isinstance(values, Mapping):
        return Dict({name: unbounded(part) for name, part in values.items()})
    if isinstance(values, tuple):
        return Tuple(tuple(map(unbounded, values)))
    kind = getattr(values, "dtype", None)
    if kind is None or not any(jnp.issubdtype(kind, number) for number in (jnp.bool_, jnp.integer, jnp.floating)):
        raise TypeError(f"a {type(values).__name__}" if kind is None else f"{kind}{list(values.shape)}")
    dtype = np.dtype(kind)
    if np.issubdtype(dtype, np.bool_):
        low, high = False, True
    elif np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    else:
        low, high = -np.inf, np.inf
    return Box(low, high, values.shape, dtype)


def is_integers(space: Space) -> TypeGuard[Box]:
    """Whether a space is a `Box` of integers, such as `MultiDiscrete` makes."""
    return isinstance(space, Box) and bool(jnp.issubdtype(space.dtype, jnp.integer))


def is_continuous(space: Space) -> TypeGuard[Box]:
    """Whether a space is a `Box` of floats."""
    return isinstance(space, Box) and not is_integers(space)


def num_values(space: Box) -> tuple[int, ...]:
    """Returns the number of values of every component of a `Box` of integers, in row-major order."""
    return tuple(int(high) - int(low) + 1 for low, high in zip(space.low.flat, space.high.flat, strict=True))


def struct(space: Space) -> Any:
    """Returns the shapes and dtypes of a space's values, as a pytree of `jax.ShapeDtypeStruct`."""
    return jax.eval_shape(space.sample, jax.eval_shape(lambda: jax.random.key(0)))


def zeros(space: Space) -> Any:
    """Returns a batch with one all-zero value of a space, for initializing a network. `[1, ...]`"""
    return jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), struct(space))


def flat_space(space: Space) -> Box:
    """Returns the space of the vectors that `flatten` returns: a `Box` of shape `[D]`, float32."""
    if isinstance(space, Discrete):
        return Box(0, 1, (space.n,))
    if isinstance(space, Box):
        low, high = (np.ravel(bound).astype(np.float32) for bound in (space.low, space.high))
        return Box(low, high, low.shape)
    parts = [flat_space(part) for _, part, _ in arrays_of(space)]
    low, high = (np.concatenate([getattr(part, bound) for part in parts]) for bound in ("low", "high"))
    return Box(low, high, low.shape)


def flatten(space: Space, x: Any) -> jax.Array:
    """Flattens values of a space, arrays `[..., *shape]`, to elements of `flat_space(space)`, vectors `[..., D]` float32.

    It ravels arrays, one-hot encodes integers, and concatenates parts.
    """
    if isinstance(space, Discrete):
        return jax.nn.one_hot(jnp.asarray(x, jnp.int32) - space.start if space.start else x, space.n, dtype=jnp.float32)
    if isinstance(space, Box):
        x = jnp.asarray(x)
        return x.reshape(*x.shape[: x.ndim - len(space.shape)], -1).astype(jnp.float32)
    return jnp.concatenate([flatten(part, value) for _, part, value in arrays_of(space, x)], axis=-1)
