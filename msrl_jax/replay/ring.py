"""The ring that stores the items of a buffer: codecs that pack them, sizes, insertion, and reading of windows."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import ShapedArray
from msrl_jax.fragments import codecs
from msrl_jax.fragments.codecs import Codec
from msrl_jax.fragments.support.checks import suggestion, whole
from msrl_jax.replay.base import Indices, Transition, check_numbers
from msrl_jax.replay.frames import Stacks, pair_stacks

Storage = Mapping[str, str | Codec | None]
"""Codecs by names on the paths of leaves: each packs the leaves under its name. The last matching name on a path wins."""


def _vmap_over(fn: Callable[[Any], Any], dims: int) -> Callable[[Any], Any]:
    """Applies `vmap` over `dims` leading dimensions."""
    for _ in range(dims):
        fn = jax.vmap(fn)
    return fn


def _codecs_of(example: Any, storage: Storage | None) -> tuple[Codec | None, ...]:
    """Returns the codec of each leaf of an item; raises ValueError if a codec is unknown, has no leaf, or cannot pack it."""
    leaves = jax.tree.leaves_with_path(example)
    if not leaves:
        raise ValueError("the example of an item has no leaves; pass a pytree of arrays")
    leaf_codecs: list[Codec | None] = []
    names: set[str] = set()
    storage = storage or {}
    for path, x in leaves:
        parts = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
        names.update(parts)
        names_on_path = [name for name in storage if name in parts]
        codec_name = storage[names_on_path[-1]] if names_on_path else None
        codec = None if codec_name is None else codecs.get(codec_name, stored=True)
        if codec and codec.frames and x.ndim and x.shape[-1] % codec.frames == 0:
            leaf_codecs.append(codec)
            continue
        if codec and (codec.frames or not codec.takes(x)):
            place, leaf = f"storage={{{names_on_path[-1]!r}: {codec.name!r}}}", f"item{jax.tree_util.keystr(path)}"
            if codec.name == np.dtype(x.dtype).name:
                raise ValueError(f"{place}: {leaf} is already {codec.name}; remove it")
            fit = "".join(f", or use {name}" for name, other in codecs.CODECS.items() if other.takes(x) and not other.changes)
            raise ValueError(f"{place}: the codec cannot pack {leaf}, which is {x.dtype}{list(x.shape)}; remove it{fit}")
        leaf_codecs.append(codec)
    for name in storage:
        if name not in names:
            raise ValueError(f"storage has {name!r}{suggestion(name, names)}, which is not in an item; it has {sorted(names)}")
    return tuple(leaf_codecs)


@dataclasses.dataclass(frozen=True)
class Ring:
    """The sizes of a ring, as in `uniform`. Windows start at multiples of `stride`, counted from the first inserted step."""

    num_envs: int
    steps: int  # stored steps per environment, `L`: a multiple of `unroll_length` and of `stride`
    unroll_length: int
    batch_size: int
    length: int
    stride: int
    shards: int
    example: Any  # shapes and dtypes of an item
    codecs: tuple[Codec | None, ...]  # one per leaf
    stacks: tuple[Stacks, ...]  # the leaves whose frames are kept once
    min_steps: int  # number of steps from which it is ready

    @property
    def envs(self) -> int:
        """The number of environments per shard."""
        return self.num_envs // self.shards

    @property
    def modulus(self) -> int:
        """The modulus of step counts, which prevents overflow of int32."""
        return 2**30 // self.steps * self.steps

    def oldest(self, added: jax.Array, filled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the first step at which a window starts, and the number of windows per environment."""
        begin = (added - filled) % self.modulus
        skipped = -begin % self.stride
        return begin + skipped, jnp.maximum((filled - skipped - self.length) // self.stride + 1, 0)

    def empty(self) -> list[Any]:
        """All-zero leaves that hold the items. `[G, L, E/G, ...]`"""
        lead, leaves = (self.shards, self.steps, self.envs), zip(self.codecs, jax.tree.leaves(self.example), strict=True)
        packed = [() if c and c.frames else jax.eval_shape(c.encode, x) if c else x for c, x in leaves]
        ring_leaves = jax.tree.map(lambda x: jnp.zeros(lead + x.shape, x.dtype), packed)
        for stacks in self.stacks:
            ring_leaves[stacks.obs] = stacks.empty(lead, jax.tree.leaves(self.example)[stacks.obs])
        return ring_leaves

    def insert(self, ring_leaves: list[Any], added: jax.Array, items: Any) -> tuple[list[Any], jax.Array]:
        """Overwrites the oldest steps with items `[T, E, ...]`; also returns the number lost in each shard, `[G]`."""
        self._check(items)

        def split_shards(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(x.reshape(x.shape[0], self.shards, self.envs, *x.shape[2:]), 0, 1)

        lost = jnp.zeros((self.shards, self.unroll_length, self.envs), bool)
        row, leaves, new = added % self.steps, [split_shards(x) for x in jax.tree.leaves(items)], list(ring_leaves)
        for leaf, (c, x) in enumerate(zip(self.codecs, leaves, strict=True)):
            if c and c.frames:
                continue
            packed = _vmap_over(c.encode, 3)(x) if c else x
            new[leaf] = jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, 1), ring_leaves[leaf], packed)
            lost |= ~_vmap_over(c.holds, 3)(x) if c and c.holds else False
        for stacks in self.stacks:
            insert = jax.vmap(stacks.insert, (0, None, 0, 0))
            new[stacks.obs], lost_frames = insert(ring_leaves[stacks.obs], row, leaves[stacks.obs], leaves[stacks.next_obs])
            lost |= lost_frames
        return new, lost.sum((1, 2), dtype=jnp.int32)

    def _check(self, items: Any) -> None:
        lead = self.unroll_length, self.num_envs
        expected = jax.tree.map(lambda x: jax.ShapeDtypeStruct(lead + x.shape, x.dtype), self.example)
        if jax.tree.structure(items) != jax.tree.structure(expected):
            raise ValueError(f"items are {jax.tree.structure(items)}, but the buffer holds {jax.tree.structure(expected)}")
        for (path, x), expected_leaf in zip(jax.tree.leaves_with_path(items), jax.tree.leaves(expected), strict=True):
            if x.shape != expected_leaf.shape or x.dtype != expected_leaf.dtype:
                raise ValueError(
                    f"items{jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)}, but the buffer takes "
                    f"{expected_leaf.dtype}{list(expected_leaf.shape)}, [unroll_length, num_envs, ...] of its example"
                )

    def take(self, leaves: list[Any], indices: Indices, offset: jax.Array, select: Callable[[Any], Any]) -> Any:
        """Reads a selection of the items `offset` `[..., b]` steps after `indices` `[b]` from a shard `[L, E/G, ...]`."""
        rows, envs = self._rows(indices, offset)
        kinds, tree = jax.tree.flatten(self.example)
        part, shape = jax.tree.flatten(select(jax.tree.unflatten(tree, range(tree.num_leaves))))

        def read(leaf: int) -> jax.Array:
            for stacks in self.stacks:
                if leaf in (stacks.obs, stacks.next_obs):
                    return stacks.read(leaves[stacks.obs], rows, envs, later=int(leaf == stacks.next_obs))
            packed = jax.tree.map(lambda x: x.at[rows, envs].get(mode="promise_in_bounds"), leaves[leaf])
            if (codec := self.codecs[leaf]) is None:
                return packed
            aval = ShapedArray(kinds[leaf].shape, kinds[leaf].dtype)
            return _vmap_over(lambda p: codec.decode(p, aval), rows.ndim)(packed)

        return jax.tree.unflatten(shape, [read(leaf) for leaf in part])

    @property
    def may_be_invalid(self) -> bool:
        """Whether some stored steps may be invalid."""
        return bool(self.stacks) or getattr(self.example, "valid", None) is not None

    def valid(self, leaves: list[Any], indices: Indices, offset: jax.Array) -> jax.Array:
        """Whether the steps `offset` `[..., b]` after `indices` `[b]` of a shard are valid and whole."""
        rows, envs = self._rows(indices, offset)
        is_valid = jnp.ones(rows.shape, bool)
        if getattr(self.example, "valid", None) is not None:
            is_valid = self.take(leaves, indices, offset, lambda item: item.valid)
        for stacks in self.stacks:
            is_valid &= stacks.remains(leaves[stacks.obs], rows, envs)
        return is_valid

    def _rows(self, indices: Indices, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = (indices.step + offset) % self.steps
        return rows, jnp.broadcast_to(indices.env, rows.shape)


def make_ring(
    example: Any,
    *,
    capacity: int,
    num_envs: int,
    unroll_length: int,
    batch_size: int,
    length: int,
    stride: int,
    min_size: int | None,
    shards: int | None,
    storage: Storage | None,
    discount: float | None,
) -> Ring:
    """Makes the ring of a buffer from the arguments of `uniform`; raises ValueError if they are incompatible."""
    capacity, num_envs = whole("capacity", capacity), whole("num_envs", num_envs)
    unroll_length, batch_size = whole("unroll_length", unroll_length), whole("batch_size", batch_size)
    length, stride = whole("length", length), whole("stride", stride)
    min_size, shards = (x if x is None else whole(name, x) for name, x in (("min_size", min_size), ("shards", shards)))
    if discount is not None:
        check_numbers(discount=discount)
        if missing_fields := [field for field in Transition._fields[:6] if not hasattr(example, field)]:
            raise ValueError(
                f"discount={discount} requires n-step transitions, but the example has no {', '.join(missing_fields)}; "
                f"pass a msrl_jax.replay.Transition, or discount=None"
            )
    divisor = math.gcd(num_envs, batch_size)
    shards = math.gcd(divisor, 8) if shards is None else shards
    if divisor % shards:
        raise ValueError(
            f"shards={shards} does not divide both num_envs={num_envs} and batch_size={batch_size}; use a divisor of {divisor}"
        )
    unit = math.lcm(unroll_length, stride)
    steps = capacity // num_envs // unit * unit
    # The largest distance from the oldest step to the first window start, and the fewest windows in a full ring.
    lag = stride - math.gcd(stride, unroll_length)
    min_windows = max((steps - lag - length) // stride + 1, 0) * num_envs
    # Steps that contain a batch of windows if a window starts at the first; it does unless the buffer is full (step 0).
    steps_of_batch = length + (-(-batch_size // num_envs) - 1) * stride
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), example)
    leaf_codecs = _codecs_of(example, storage)
    fact = f"capacity={capacity} holds {steps} steps of each of num_envs={num_envs} environments"
    min_capacity = num_envs * -(-(steps_of_batch + lag) // unit) * unit
    if steps < length:
        raise ValueError(
            f"{fact} (in whole multiples of {unit}: unroll_length={unroll_length}, stride={stride}), but a window is "
            f"length={length} steps long; use a capacity of at least {min_capacity}, or shorter windows"
        )
    if min_windows < batch_size:
        raise ValueError(
            f"{fact}, which is {min_windows} windows of length={length}, fewer than batch_size={batch_size}; use a capacity of "
            f"at least {min_capacity}, or smaller batches"
        )
    if steps * num_envs // shards > 2**30:
        raise ValueError(f"{fact}, which exceeds 32-bit counts; use a smaller capacity, or more shards")
    steps_needed = -(-steps_of_batch // unroll_length) * unroll_length
    if min_size is not None and not steps_needed * num_envs <= min_size <= steps * num_envs:
        raise ValueError(
            f"min_size={min_size}: a batch of {batch_size} windows of length={length} needs {steps_needed * num_envs} steps of "
            f"all environments, and the buffer holds {steps * num_envs}; use a number between these"
        )
    min_steps = steps_needed if min_size is None else -(-min_size // num_envs)
    frames, paths = [c.frames if c else 0 for c in leaf_codecs], [path for path, _ in jax.tree.leaves_with_path(example)]
    stacks = pair_stacks(paths, frames, steps, unroll_length)
    return Ring(num_envs, steps, unroll_length, batch_size, length, stride, shards, example, leaf_codecs, stacks, min_steps)
