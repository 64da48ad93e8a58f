"""Codecs: pack arrays that are sent from one placement to another."""

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax._compat import ShapedArray
from msrl_jax.fragments.support import checks
from msrl_jax.fragments.support.checks import shown, suggestion


@dataclass(frozen=True)
class Changes:
    """How to send packed 16-bit words whose receiver keeps the previous ones: only changed words, with their positions.

    Attributes:
      one_in: changes are sent if at most one in `one_in` words has changed; otherwise all words are sent.
      every: all words are sent in one of `every` exchanges.
    """

    one_in: int
    every: int


@dataclass(frozen=True)
class Codec:
    """Packs and unpacks arrays with pure functions that JAX can trace.

    Attributes:
      name: its name in plans.
      encode: array -> pytree of arrays, the packed form.
      decode: `(pytree, aval) -> array` of the original shape and dtype.
      takes: whether an array of this shape and dtype can be packed; other arrays are sent unpacked.
      holds: array -> bool, whether `decode` keeps the codec's promise; None if it always does.
      promise: the precision of the unpacked values as text, for plans and errors.
      lossless: whether unpacked values equal the original in XLA's comparison: -0.0 and numbers below 1.2e-38 may equal 0.0.
      changes: how to send only changes; None to send the whole packed form.
      frames: number of frames of the stacks that it packs; 0 for codecs of other arrays.
    """

    name: str
    encode: Callable[[jax.Array], Any]
    decode: Callable[[Any, ShapedArray], jax.Array]
    takes: Callable[[ShapedArray], bool]
    holds: Callable[[jax.Array], jax.Array] | None
    promise: str
    lossless: bool
    changes: Changes | None = None
    frames: int = 0

    def __repr__(self) -> str:
        return self.name


BFLOAT16 = Codec(
    name="bfloat16",
    encode=lambda x: x.astype(jnp.bfloat16),
    decode=lambda x, aval: x.astype(aval.dtype),
    takes=lambda aval: aval.dtype == jnp.float32 and aval.size > 1,
    holds=None,
    promise="a relative error of at most 2**-8 for numbers from 1.2e-38 to 3.38e38 (round to nearest)",
    lossless=False,
)


def _quantize(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    low, high = x.min(), x.max()
    scale = jnp.maximum(high - low, jnp.finfo(jnp.float32).tiny) / 255
    return jnp.round((x - low) / scale).astype(jnp.uint8), low, scale


SCALED_UINT8 = Codec(
    name="scaled_uint8",
    encode=_quantize,
    decode=lambda packed, aval: (packed[0].astype(jnp.float32) * packed[2] + packed[1]).astype(aval.dtype),
    takes=lambda aval: aval.dtype == jnp.float32 and aval.size > 4,  # offset and scale are sent too
    holds=lambda x: jnp.isfinite(x).all() & jnp.isfinite(x.max() - x.min()),
    promise="an absolute error of at most 1/510 of the array's range, for finite values with a finite range",
    lossless=False,
)

UINT8 = Codec(
    name="uint8",
    encode=lambda x: x.astype(jnp.uint8),
    decode=lambda x, aval: x.astype(aval.dtype),
    takes=lambda aval: aval.dtype in (jnp.float32, jnp.int32, jnp.int16, jnp.uint32) and aval.size > 1,
    holds=lambda x: (x.astype(jnp.uint8).astype(x.dtype) == x).all(),
    promise="the same values, if they are whole numbers from 0 to 255 (-0.0 and subnormal numbers become 0.0)",
    lossless=True,
)


def _newest(x: jax.Array, frames: int) -> jax.Array:
    return x[..., -(x.shape[-1] // frames) :]


def _shifted(x: jax.Array, frames: int) -> jax.Array:
    """Whether the older frames of row t+1 are the newer frames of row t. `[T-1, ...]` bool"""
    old = x.shape[-1] - x.shape[-1] // frames
    same = x[1:, ..., :old] == x[:-1, ..., -old:]
    return same.all(axis=tuple(range(2, x.ndim)))


def _frame_encode(x: jax.Array, *, frames: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return x[0], _newest(x[1:], frames), _shifted(x, frames)


def _frame_decode(packed: tuple[jax.Array, jax.Array, jax.Array], aval: ShapedArray, *, frames: int) -> jax.Array:
    first, newest, shifted = packed

    def step(stack: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        frame, follows = row
        width = frame.shape[-1]
        pushed = jnp.concatenate([stack[..., width:], frame], -1)
        repeated = jnp.concatenate([frame] * frames, -1)
        stack = jnp.where(follows.reshape(follows.shape + (1,) * (stack.ndim - follows.ndim)), pushed, repeated)
        return stack, stack

    return jnp.concatenate([first[None], jax.lax.scan(step, first, (newest, shifted))[1]]).astype(aval.dtype)


def _frame_holds(x: jax.Array, *, frames: int) -> jax.Array:
    repeated = jnp.concatenate([_newest(x[1:], frames)] * frames, -1) == x[1:]
    return (_shifted(x, frames) | repeated.all(axis=tuple(range(2, x.ndim)))).all()


def frame_stack(frames: int, rank: int = 3) -> Codec:
    """Makes a codec that sends every frame of stacked observations once.

    Args:
      frames: number of frames in a stack along the last dimension, oldest first. At the start of an episode the first
        frame fills the stack, as in `FrameStack`.
      rank: number of dimensions of one observation: 3 for images, 1 for vectors.

    Returns:
      A lossless codec for trajectories of observations, `[T, E, ..., frames * C]`; other arrays are sent unpacked.

    Raises:
      ValueError: if there are fewer than 2 frames, or no dimensions.
    """
    if not isinstance(frames, int) or not isinstance(rank, int) or frames < 2 or rank < 1:
        raise ValueError(f"frame_stack({frames!r}, {rank!r}): use at least 2 frames, and at least 1 dimension")

    def takes(aval: ShapedArray) -> bool:
        is_plain = jnp.issubdtype(aval.dtype, jnp.number) or aval.dtype == jnp.bool
        return is_plain and len(aval.shape) == 2 + rank and aval.shape[0] > 1 and aval.shape[-1] % frames == 0

    return Codec(
        name=f"frame_stack({frames})" if rank == 3 else f"frame_stack({frames}, {rank})",
        encode=functools.partial(_frame_encode, frames=frames),
        decode=functools.partial(_frame_decode, frames=frames),
        takes=takes,
        holds=functools.partial(_frame_holds, frames=frames),
        promise="the same values, if each row is the previous one with a new last frame, or one frame repeated",
        lossless=True,
        frames=frames,
    )


def delta(one_in: int = 64, every: int = 100) -> Codec:
    """Makes a codec that sends parameters in bfloat16, and only the values that changed since the last exchange.

    The result is bit-identical to `"bfloat16"`. With a small learning rate, most updates round to nothing in bfloat16:
    AstraFlow reports that over 98% of the words do not change in an update of a language model.

    Args:
      one_in: changes are sent if at most one in `one_in` words has changed, as 6 bytes each: a word and its position.
        Otherwise all words are sent, 2 bytes each.
      every: all words are sent in one of `every` exchanges.

    Returns:
      The codec, for parameters that are replicated over the devices of a placement, in one process.

    Raises:
      ValueError: if `one_in` is below 4, where changes are about as large as all words, or `every` is below 1.
    """
    if not isinstance(one_in, int) or not isinstance(every, int) or one_in < 4 or every < 1:
        raise ValueError(f"delta({one_in!r}, {every!r}): one_in must be at least 4, and every at least 1")
    changes = Changes(one_in, every)
    name = "delta" if changes == Changes(64, 100) else f"delta({one_in}, {every})"
    return dataclasses.replace(BFLOAT16, name=name, changes=changes)


CODECS: dict[str, Codec] = {c.name: c for c in (BFLOAT16, SCALED_UINT8, UINT8, delta())}


def register(codec: Codec) -> Codec:
    """Adds a codec to the registry, so that `get` finds it by its name.

    Args:
      codec: the codec.

    Returns:
      The same codec.

    Raises:
      ValueError: if another codec has that name.
    """
    return checks.add("codec", CODECS, codec.name, codec)


def names() -> list[str]:
    """Returns the names of all codecs; `get` also accepts `"frame_stack(n)"` and `"delta(n, every)"`."""
    return sorted(CODECS)


def get(codec: str | Codec, *, stored: bool = False) -> Codec:
    """Looks up a codec.

    Args:
      codec: a key of `CODECS`, such as "uint8"; "frame_stack(n)" or "delta(n, every)" with numbers; or a codec.
      stored: whether arrays are stored instead of sent, which excludes codecs that send changes.

    Returns:
      The codec.

    Raises:
      TypeError: if `codec` is neither a codec nor a string.
      ValueError: if the name is unknown, or the codec cannot be used for storage.
    """
    if not isinstance(codec, str | Codec):
        raise TypeError(f"{shown(codec)} is not a codec; use {', '.join(map(repr, CODECS))}, 'frame_stack(n)' or a Codec")
    if isinstance(codec, Codec):
        selected = codec
    elif call := re.fullmatch(r"(frame_stack|delta)\((\d+)(?:, *(\d+))?\)", codec):
        name, *numbers = call.groups()
        selected = (frame_stack if name == "frame_stack" else delta)(*(int(n) for n in numbers if n))
    else:
        selected = CODECS.get(codec)
    if selected is None or (stored and selected.changes):
        valid_names = [name for name, c in CODECS.items() if not (stored and c.changes)] + ["frame_stack(n)"]
        valid_names += [] if stored else ["delta(n, every)"]
        fact = (
            f"unknown codec {codec!r}{suggestion(str(codec), valid_names)}"
            if selected is None
            else f"{selected} is only for sending"
        )
        raise ValueError(f"{fact}; use one of {', '.join(valid_names)}")
    return selected
