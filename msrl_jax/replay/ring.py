"""The ring that holds the items: its sizes, insertion, and reading of windows."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.replay.base import Indices
from msrl_jax.replay.checks import check_integers, check_numbers
from msrl_jax.replay.storage import ItemFormat, Storage, item_format

_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")
_COUNT = 2**30  # steps are counted modulo the largest multiple of the ring's length up to this: int32 cannot overflow


@dataclasses.dataclass(frozen=True)
class Ring:
    """The sizes of a ring. Windows start at multiples of `stride`, counted from the first inserted step.

    Attributes:
      num_envs: environments, `E`.
      steps: steps held per environment, `L`; a multiple of `unroll_length` and of `stride`.
      unroll_length: steps per environment of one insertion, `T`.
      batch_size: windows in a batch, `B`.
      length: steps of a window, `S`.
      stride: steps between starts of windows.
      shards: `G`.
      format: how items are stored.
      min_steps: steps per environment that the buffer must hold to be ready.
    """

    num_envs: int
    steps: int
    unroll_length: int
    batch_size: int
    length: int
    stride: int
    shards: int
    format: ItemFormat
    min_steps: int

    @property
    def envs(self) -> int:
        """Environments of a shard."""
        return self.num_envs // self.shards

    @property
    def modulus(self) -> int:
        """The modulus of step counts."""
        return _COUNT // self.steps * self.steps

    def count(self, filled: jax.Array) -> jax.Array:
        """Number of complete windows in `filled` steps, if the first step may start a window."""
        return jnp.maximum((filled - self.length) // self.stride + 1, 0)

    @property
    def lag(self) -> int:
        """The largest distance from the oldest step to the first step that may start a window."""
        return self.stride - math.gcd(self.stride, self.unroll_length)

    @property
    def fewest_windows(self) -> int:
        """The smallest number of windows per environment in a full ring."""
        return max((self.steps - self.lag - self.length) // self.stride + 1, 0)

    @property
    def steps_of_batch(self) -> int:
        """Steps per environment that contain a batch of windows, if the first step may start a window.

        In a buffer that is not full it may, because it is step 0.
        """
        return self.length + (-(-self.batch_size // self.num_envs) - 1) * self.stride

    def oldest(self, added: jax.Array, filled: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first step at which a window starts, and the number of windows per environment."""
        begin = (added - filled) % self.modulus
        skipped = -begin % self.stride
        return begin + skipped, self.count(filled - skipped)

    def empty(self) -> list[Any]:
        """Leaves of zeros to hold the items. `[G, L, E/G, ...]`"""
        lead = (self.shards, self.steps, self.envs)
        return jax.tree.map(lambda x: jnp.zeros(lead + x.shape, x.dtype), self.format.packed)

    def insert(self, held: list[Any], added: jax.Array, items: Any) -> tuple[list[Any], jax.Array]:
        """Writes items over the oldest steps.

        Args:
          held: the leaves. `[G, L, E/G, ...]`
          added: steps inserted before.
          items: the items. `[T, E, ...]`

        Returns:
          The leaves, and the number of items in each shard that a codec could not hold. `[G]`

        Raises:
          ValueError: if the items do not have the structure, shapes (after `[T, E]`) and dtypes of the buffer's example.
        """
        self._check(items)

        def by_shard(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(x.reshape(x.shape[0], self.shards, self.envs, *x.shape[2:]), 0, 1)

        packed, lost = self.format.encode(jax.tree.map(by_shard, items), 3)
        row = added % self.steps
        held = jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, row, 1), held, packed)
        return held, lost.sum((1, 2), dtype=jnp.int32)

    def _check(self, items: Any) -> None:
        def expected(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.unroll_length, self.num_envs, *x.shape), x.dtype)

        wanted = jax.tree.map(expected, self.format.example)
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
          select: picks the wanted part of an item.

        Returns:
          The part. `[..., b, ...]`
        """
        rows = (indices.step + offset) % self.steps
        envs = jnp.broadcast_to(indices.env, rows.shape)
        tree = jax.tree.structure(self.format.example)
        part, shape = jax.tree.flatten(select(jax.tree.unflatten(tree, range(tree.num_leaves))))

        def read(leaf: int) -> jax.Array:
            packed = jax.tree.map(lambda x: x.at[rows, envs].get(mode="promise_in_bounds"), held[leaf])
            return self.format.decode(leaf, packed, rows.ndim)

        return jax.tree.unflatten(shape, [read(leaf) for leaf in part])


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
    """Makes the ring of a buffer, after checks of its arguments.

    Args:
      example: one item.
      capacity: steps of all environments to hold at most.
      num_envs: environments.
      unroll_length: steps inserted at once.
      batch_size: windows per batch.
      length: steps of a window.
      stride: steps between starts of windows.
      min_size: steps of all environments that the buffer must hold to be ready, or None.
      shards: shards, or None.
      storage: codecs.
      discount: discount factor of n-step transitions, or None.

    Returns:
      The ring.

    Raises:
      ValueError: if the arguments do not fit each other.
    """
    sizes = {"capacity": capacity, "num_envs": num_envs, "unroll_length": unroll_length, "batch_size": batch_size}
    sizes |= {"length": length, "stride": stride}
    optional = {"min_size": min_size, "shards": shards}
    check_integers(**sizes, **{name: value for name, value in optional.items() if value is not None})
    if discount is not None:
        check_numbers(discount=discount)
        missing = [field for field in _FIELDS if not hasattr(example, field)]
        if missing:
            raise ValueError(
                f"discount={discount} asks for n-step transitions, but the example has no {', '.join(missing)}; "
                f"give a msrl_jax.replay.Transition, or discount=None"
            )
    both = math.gcd(num_envs, batch_size)
    shards = math.gcd(both, 8) if shards is None else shards
    if both % shards:
        raise ValueError(
            f"shards={shards} does not divide both num_envs={num_envs} and batch_size={batch_size}; use a divisor of {both}"
        )
    unit = math.lcm(unroll_length, stride)
    steps = capacity // num_envs // unit * unit
    format = item_format(example, storage)
    ring = Ring(num_envs, steps, unroll_length, batch_size, length, stride, shards, format, min_steps=0)
    what = f"capacity={capacity} holds {steps} steps of each of num_envs={num_envs} environments"
    enough = num_envs * -(-(ring.steps_of_batch + ring.lag) // unit) * unit
    if steps < length:
        raise ValueError(
            f"{what} (in whole multiples of {unit}: unroll_length={unroll_length}, stride={stride}), but a window is "
            f"length={length} steps long; use a capacity of at least {enough}, or shorter windows"
        )
    if ring.fewest_windows * num_envs < batch_size:
        raise ValueError(
            f"{what}, which are {ring.fewest_windows * num_envs} windows of length={length}, fewer than "
            f"batch_size={batch_size}; use a capacity of at least {enough}, or smaller batches"
        )
    if steps * ring.envs > 2**30:
        raise ValueError(f"{what}, more than can be counted with 32 bits; use a smaller capacity, or more shards")
    serves = -(-ring.steps_of_batch // unroll_length) * unroll_length
    if min_size is not None and not serves * num_envs <= min_size <= steps * num_envs:
        raise ValueError(
            f"min_size={min_size}: a batch of {batch_size} windows of length={length} needs {serves * num_envs} steps of all "
            f"environments, and the buffer holds {steps * num_envs}; use a number between these"
        )
    return dataclasses.replace(ring, min_steps=serves if min_size is None else -(-min_size // num_envs))
