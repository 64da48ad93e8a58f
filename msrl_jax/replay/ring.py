"""The ring that holds the items: its geometry, insertion, and the reading of windows."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.replay.base import Indices
from msrl_jax.replay.storage import Layout

_COUNT = 2**30  # steps are counted modulo the largest multiple of the ring's length up to this: int32 cannot overflow


@dataclasses.dataclass(frozen=True)
class Ring:
    """Sizes. A window starts at a multiple of `stride`, as steps are counted from the first insertion.

    Attributes:
      num_envs: environments, `E`.
      steps: steps held of each, `L`; a multiple of `unroll_length` and of `stride`.
      unroll_length: steps of each inserted at once, `T`.
      batch_size: windows in a batch, `B`.
      length: steps of a window, `S`.
      stride: steps between starts of windows.
      shards: `G`.
      layout: how items are stored.
    """

    num_envs: int
    steps: int
    unroll_length: int
    batch_size: int
    length: int
    stride: int
    shards: int
    layout: Layout

    @property
    def envs(self) -> int:
        """Environments of a shard."""
        return self.num_envs // self.shards

    @property
    def modulus(self) -> int:
        """What steps are counted modulo."""
        return _COUNT // self.steps * self.steps

    def count(self, filled: Any) -> Any:
        """Windows of an environment of which `filled` steps are held, from a step on at which a window may start."""
        return jnp.maximum((filled - self.length) // self.stride + 1, 0)

    @property
    def lag(self) -> int:
        """Steps from the oldest one to the first at which a window may start, at most."""
        return self.stride - math.gcd(self.stride, self.unroll_length)

    @property
    def fewest_windows(self) -> int:
        """Windows of an environment in a full ring, wherever its oldest step is."""
        return max((self.steps - self.lag - self.length) // self.stride + 1, 0)

    @property
    def steps_of_batch(self) -> int:
        """Steps of each environment that hold as many windows as a batch, if a window may start at the first of them."""
        return self.length + (-(-self.batch_size // self.num_envs) - 1) * self.stride

    def oldest(self, added: jax.Array, filled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first step at which a window starts, and how many windows an environment has."""
        begin = (added - filled) % self.modulus
        skipped = -begin % self.stride
        return begin + skipped, self.count(filled - skipped)

    def empty(self) -> list[Any]:
        """The leaves that hold the items. `[G, L, E/G, ...]`"""
        lead = (self.shards, self.steps, self.envs)
        return jax.tree.map(lambda x: jnp.zeros(lead + x.shape, x.dtype), self.layout.packed)

    def insert(self, held: list[Any], added: jax.Array, items: Any) -> tuple[list[Any], jax.Array]:
        """Writes items over the oldest steps.

        Args:
          held: the leaves. `[G, L, E/G, ...]`
          added: steps inserted before.
          items: the items. `[T, E, ...]`

        Returns:
          The leaves, and how many items in each shard a codec could not hold. `[G]`

        Raises:
          ValueError: if the items are not `[T, E]` of the buffer's example.
        """
        self._check(items)

        def by_shard(x):
            return jnp.swapaxes(x.reshape(x.shape[0], self.shards, self.envs, *x.shape[2:]), 0, 1)

        packed, lost = self.layout.encode(jax.tree.map(by_shard, items), 3)
        row = added % self.steps
        held = jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, 1), held, packed)
        return held, lost.sum((1, 2), dtype=jnp.int32)

    def _check(self, items: Any) -> None:
        def expected(x):
            return jax.ShapeDtypeStruct((self.unroll_length, self.num_envs, *x.shape), x.dtype)

        wanted = jax.tree.map(expected, self.layout.example)
        if jax.tree.structure(items) != jax.tree.structure(wanted):
            raise ValueError(f"items are {jax.tree.structure(items)}, but the buffer holds {jax.tree.structure(wanted)}")
        for (path, x), want in zip(jax.tree.leaves_with_path(items), jax.tree.leaves(wanted), strict=True):
            if x.shape != want.shape or x.dtype != want.dtype:
                raise ValueError(
                    f"items{jax.tree_util.keystr(path)} is {x.dtype}{list(x.shape)}, but the buffer takes "
                    f"{want.dtype}{list(want.shape)}, [unroll_length, num_envs, ...] of its example"
                )

    def take(self, held: list[Any], indices: Indices, offset: jax.Array, select: Callable[[Any], Any]) -> Any:
        """Reads items of one shard.

        Args:
          held: the shard's leaves. `[L, E/G, ...]`
          indices: the first steps and the shard's environments. `[b]`
          offset: how many steps later to read. `[..., b]`
          select: picks the part of an item that is wanted.

        Returns:
          The part. `[..., b, ...]`
        """
        rows = (indices.step + offset) % self.steps
        envs = jnp.broadcast_to(indices.env, rows.shape)
        tree = jax.tree.structure(self.layout.example)
        part, shape = jax.tree.flatten(select(jax.tree.unflatten(tree, range(tree.num_leaves))))

        def read(leaf):
            packed = jax.tree.map(lambda x: x.at[rows, envs].get(mode="promise_in_bounds"), held[leaf])
            return self.layout.decode(leaf, packed, rows.ndim)

        return jax.tree.unflatten(shape, [read(leaf) for leaf in part])
