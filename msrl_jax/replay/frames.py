"""Keeps each frame of stacked observations once: reading combines them to the stacks of `obs` and `next_obs`.

The frames of an environment have a separate ring, in the order in which they were seen. An observation that continues the
one before adds its newest frame; any other observation, such as the first of an episode, adds all of its frames. So the stack
of a step ends at one position of the ring, that of its successor one later, and a step keeps that position alone.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

EPISODE = 64
"""The ring has room for episodes of this mean number of steps. Of shorter ones, it forgets the oldest steps."""

LARGEST = 2**30
"""The most that a count of frames reaches."""

GONE = -1
"""The position of a step whose stack is not its predecessor's with one new frame."""


class Frames(NamedTuple):
    """The frames of one observation array, per shard."""

    ring: jax.Array  # each frame as a vector. `[G, F, E/G, size of a frame]`
    pushed: jax.Array  # number of frames so far, modulo `Stacks.modulus`. `[G, E/G]` int32
    last: jax.Array  # the newest `next_obs`. `[G, E/G, *stack]`
    position: jax.Array  # of the newest frame of each step's `obs`, or GONE. `[G, L, E/G]` int32


@dataclasses.dataclass(frozen=True)
class Stacks:
    """How a ring of steps keeps a pair of arrays, `obs` and `next_obs`.

    Attributes:
      obs: the number of the leaf in `obs`.
      next_obs: the number of the leaf in `next_obs`.
      frames: number of frames in a stack, along the last dimension, oldest first.
      steps: number of steps per environment, `L`.
      unroll_length: number of steps of one insertion, `T`.
    """

    obs: int
    next_obs: int
    frames: int
    steps: int
    unroll_length: int

    @property
    def size(self) -> int:
        """The number of frames per environment, `F`; one insertion never overwrites its own frames."""
        return self.steps + self.frames * -(-self.steps // EPISODE) + (self.frames + 1) * self.unroll_length

    @property
    def modulus(self) -> int:
        """The modulus of frame counts, which prevents overflow of int32."""
        return LARGEST // self.size * self.size

    def empty(self, lead: tuple[int, int, int], stack: jax.ShapeDtypeStruct) -> Frames:
        """Returns the state without frames; `lead` is `(G, L, E/G)`."""
        shards, _, envs = lead
        return Frames(
            jnp.zeros((shards, self.size, envs, stack.size // self.frames), stack.dtype),
            jnp.zeros((shards, envs), jnp.int32),
            jnp.zeros((shards, envs, *stack.shape), stack.dtype),
            jnp.full(lead, GONE, jnp.int32),
        )

    def insert(self, state: Frames, row: jax.Array, obs: jax.Array, next_obs: jax.Array) -> tuple[Frames, jax.Array]:
        """Adds steps `[T, E/G, ...]` to the arrays of a shard, at `row`; also returns which steps are lost, `[T, E/G]`.

        A step is lost if its `next_obs` is not its `obs` with one new frame. A step that leaves the ring counts as lost if its
        frames had left it before.
        """
        n, width = self.frames, obs.shape[-1] // self.frames
        follows = _equal(obs[..., width:], next_obs[..., :-width])
        previous_obs = jnp.concatenate([state.last[None], next_obs[:-1]])
        is_kept = jnp.concatenate([state.position[(row - 1) % self.steps][None] != GONE, follows[:-1]])
        new = jnp.where(_equal(obs, previous_obs) & is_kept, jnp.int32(1), jnp.int32(n + 1))
        newest = state.pushed + jnp.cumsum(new, 0, jnp.int32) - 2  # of `obs`; that of `next_obs` comes after it

        stack = newest + jnp.arange(1 - n, 1, dtype=jnp.int32)[:, None, None]
        stack = jnp.where(new == 1, self.size, stack % self.size)  # frames that the ring has are not written again
        slots = jnp.concatenate([stack, (newest + 1)[None] % self.size])
        frames = [obs[..., k * width : (k + 1) * width] for k in range(n)] + [next_obs[..., -width:]]
        vectors = jnp.stack([frame.reshape(*frame.shape[:2], -1) for frame in frames])
        ring = state.ring.at[slots, jnp.arange(obs.shape[1])].set(vectors, mode="drop")

        leaves = jax.lax.dynamic_slice_in_dim(state.position, row, self.unroll_length)
        lost = ~follows | ((leaves != GONE) & ~self._remains(state.pushed, leaves))
        position = jnp.where(follows, newest % self.modulus, GONE)
        position = jax.lax.dynamic_update_slice_in_dim(state.position, position, row, 0)
        return Frames(ring, (newest[-1] + 2) % self.modulus, next_obs[-1], position), lost

    def remains(self, state: Frames, rows: jax.Array, envs: jax.Array) -> jax.Array:
        """Whether the frames of steps are there. Arrays of a shard; `[..., b]` bool"""
        return self._remains(state.pushed[envs], state.position[rows, envs])

    def _remains(self, pushed: jax.Array, position: jax.Array) -> jax.Array:
        return (position != GONE) & ((pushed - position) % self.modulus <= self.size - self.frames + 1)

    def read(self, state: Frames, rows: jax.Array, envs: jax.Array, later: int) -> jax.Array:
        """Returns the stacks that end at steps' positions, or `later` by one frame. Arrays of a shard; `[..., b, *stack]`"""
        newest = state.position[rows, envs] + later
        slots = (newest[..., None] + jnp.arange(1 - self.frames, 1, dtype=jnp.int32)) % self.size
        frames = state.ring.at[slots, envs[..., None]].get(mode="promise_in_bounds")
        frames = jax.lax.optimization_barrier(frames)  # XLA's CPU compiler takes minutes for a user that it fuses with this
        shape = state.last.shape[1:]
        return interleave(frames.reshape(*slots.shape, -1, shape[-1] // self.frames)).reshape(*rows.shape, *shape)


def interleave(frames: jax.Array) -> jax.Array:
    """Puts the channels of `n` frames side by side: `[..., n, P, C]` -> `[..., P, n * C]`.

    Bytes of two or four frames are put into words, since XLA's CPU compiler does not vectorize a transposition of bytes.
    """
    *lead, n, pixels, channels = frames.shape
    planes = [frames[..., k, :, :] for k in range(n)]
    if frames.dtype != jnp.uint8 or channels > 1 or n not in (2, 4):
        return jnp.concatenate(planes, -1)
    word = jnp.uint16 if n == 2 else jnp.uint32
    packed = sum((x.squeeze(-1).astype(word) << 8 * k for k, x in enumerate(planes)), jnp.zeros((), word))
    return jax.lax.bitcast_convert_type(packed, jnp.uint8).reshape(*lead, pixels, n)


def _equal(a: jax.Array, b: jax.Array) -> jax.Array:
    """Whether the observations of two arrays are equal. `[T, E, ...]` -> `[T, E]`"""
    return (a == b).all(tuple(range(2, a.ndim)))


def pair_stacks(paths: list[tuple[Any, ...]], frames: list[int], steps: int, unroll_length: int) -> tuple[Stacks, ...]:
    """Pairs the leaves in `obs` that are stacks with those in `next_obs`; `frames` is 0 for other leaves.

    Raises ValueError if one of a pair is missing.
    """
    pairs = []
    leaf_at = {path: leaf for leaf, path in enumerate(paths)}
    for leaf, path in enumerate(paths):
        if not frames[leaf]:
            continue
        first = path[0]
        partner_field = {"obs": "next_obs", "next_obs": "obs"}.get(getattr(first, "name", ""))
        partner = leaf_at.get((type(first)(partner_field), *path[1:])) if partner_field else None
        if partner is None or frames[partner] != frames[leaf]:
            raise ValueError(
                f"storage keeps item{jax.tree_util.keystr(path)} as frame_stack({frames[leaf]}), which needs both obs and "
                "next_obs of a msrl_jax.replay.Transition; give it for both, or use another codec"
            )
        if partner_field == "next_obs":
            pairs.append(Stacks(leaf, partner, frames[leaf], steps, unroll_length))
    return tuple(pairs)
