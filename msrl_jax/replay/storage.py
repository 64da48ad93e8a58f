"""How a buffer stores items: leaves may have codecs that pack them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import codecs
from msrl_jax._compat import ShapedArray
from msrl_jax._spelling import suggestion
from msrl_jax.codecs import Codec

Storage = Mapping[str, str | Codec | None]


@dataclasses.dataclass(frozen=True)
class ItemFormat:
    """How items are stored.

    Attributes:
      example: the shapes and dtypes of an item.
      codecs: the codec of each leaf, or None.
    """

    example: Any
    codecs: tuple[Codec | None, ...]

    @property
    def packed(self) -> list[Any]:
        """The shapes and dtypes of the stored arrays, for each leaf of an item."""
        leaves = zip(self.codecs, jax.tree.leaves(self.example), strict=True)
        return [jax.eval_shape(c.encode, x) if c else x for c, x in leaves]

    @property
    def nbytes(self) -> int:
        """Bytes of one item as it is stored."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self.packed))

    def encode(self, items: Any, dims: int) -> tuple[list[Any], jax.Array]:
        """Packs items.

        Args:
          items: items with `dims` leading dimensions.
          dims: number of leading dimensions.

        Returns:
          The stored arrays, with the same leading dimensions, and a mask of the items that a codec could not hold.
        """
        leaves = jax.tree.leaves(items)
        packed: list[Any] = []
        lost = jnp.zeros(leaves[0].shape[:dims], bool)
        for c, x in zip(self.codecs, leaves, strict=True):
            packed.append(_over(c.encode, dims)(x) if c else x)
            lost |= ~_over(c.holds, dims)(x) if c and c.holds else False
        return packed, lost

    def decode(self, leaf: int, packed: Any, dims: int) -> jax.Array:
        """Unpacks a leaf that `encode` packed.

        Args:
          leaf: the number of the leaf.
          packed: its stored arrays, with `dims` leading dimensions.
          dims: number of leading dimensions.

        Returns:
          The leaf.
        """
        codec, x = self.codecs[leaf], jax.tree.leaves(self.example)[leaf]
        if codec is None:
            return packed
        aval = ShapedArray(x.shape, x.dtype)
        return _over(lambda p: codec.decode(p, aval), dims)(packed)


def _over(fn: Callable[[Any], Any], dims: int) -> Callable[[Any], Any]:
    """Maps over `dims` leading dimensions."""
    for _ in range(dims):
        fn = jax.vmap(fn)
    return fn


def item_format(example: Any, storage: Storage | None) -> ItemFormat:
    """Decides how items are stored.

    Args:
      example: one item: a pytree of arrays or of `jax.ShapeDtypeStruct`.
      storage: codecs by names on the paths of leaves, such as `"obs"`; a codec packs every leaf under its name, and None
        packs none. The last one counts if several names are on a path.

    Returns:
      The format.

    Raises:
      ValueError: if a name is on no path, or a codec is unknown or cannot pack its leaves.
    """
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), example)
    leaves = jax.tree.leaves_with_path(example)
    if not leaves:
        raise ValueError("the example of an item has no leaf; give a pytree of arrays")
    used: list[Codec | None] = []
    names: set[str] = set()
    storage = storage or {}
    for path, x in leaves:
        parts = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
        names.update(parts)
        found = [name for name in storage if name in parts]
        chosen = storage[found[-1]] if found else None
        c = None if chosen is None else codecs.get(chosen)
        if c and (c.name.startswith("frame_stack") or not c.takes(x)):
            if c.name == np.dtype(x.dtype).name:
                raise ValueError(
                    f"storage={{{found[-1]!r}: {c.name!r}}}: item{jax.tree_util.keystr(path)} is {c.name} already; leave it out"
                )
            raise ValueError(
                f"storage={{{found[-1]!r}: {c.name!r}}}: the codec cannot pack item{jax.tree_util.keystr(path)}, which is "
                f"{x.dtype}{list(x.shape)}; leave it out, or use another of {', '.join(codecs.CODECS)}"
            )
        used.append(c)
    for name in storage:
        if name not in names:
            raise ValueError(
                f"storage names {name!r}{suggestion(name, names)}, which an item does not have; there are {sorted(names)}"
            )
    return ItemFormat(example, tuple(used))
