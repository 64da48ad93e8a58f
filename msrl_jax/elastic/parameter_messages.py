"""How a learner sends parameters to its actors: unchanged or in bfloat16, all of them or only the changes."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.fragments import codecs
from msrl_jax.fragments.codecs import BFLOAT16, Codec
from msrl_jax.fragments.support.checks import shown


@dataclass(frozen=True, eq=False)
class Packing:
    """How published arrays are sent: unchanged, in bfloat16, or as changes of those since the last message to an actor."""

    codec: Codec | None
    kinds: Sequence[Any]  # shapes and dtypes of the published arrays

    @classmethod
    def from_codec(cls, codec: Any, kinds: Sequence[Any]) -> "Packing":
        """Returns the packing of a codec name; raises ValueError if the codec is not for parameters."""
        resolved = None if codec is None else codecs.get(codec) if isinstance(codec, str | Codec) else codec
        if resolved is not None and not (isinstance(resolved, Codec) and resolved.encode is BFLOAT16.encode):
            raise ValueError(f"parameter_codec={shown(codec)}: actors in other processes support 'bfloat16', 'delta' or none")
        return cls(resolved, kinds)

    @property
    def name(self) -> str | None:
        """The name of the codec."""
        return None if self.codec is None else self.codec.name

    @functools.cached_property
    def packs(self) -> tuple[bool, ...]:
        """Which arrays are packed."""
        return tuple(self.codec is not None and self.codec.takes(kind) for kind in self.kinds)

    @functools.cached_property
    def packed_kinds(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of the packed arrays."""
        pairs = zip(self.kinds, self.packs, strict=True)
        return [jax.ShapeDtypeStruct(kind.shape, jnp.bfloat16 if packs else kind.dtype) for kind, packs in pairs]

    def pack(self, arrays: Sequence[jax.Array]) -> list[np.ndarray]:
        """Packs arrays for sending."""
        return [np.asarray(x).astype(kind.dtype) for x, kind in zip(arrays, self.packed_kinds, strict=True)]

    def unpack(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Unpacks arrays that were received."""
        return [x.astype(kind.dtype) for x, kind in zip(arrays, self.kinds, strict=True)]

    def words(self, packed: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the packed numbers, concatenated. `[N]` uint16"""
        parts = [x.reshape(-1).view(np.uint16) for x, packs in zip(packed, self.packs, strict=True) if packs]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint16)

    def not_packed(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the arrays that are not packed."""
        return [x for x, packs in zip(arrays, self.packs, strict=True) if not packs]


@dataclass
class ActorSender:
    """Creates the messages to one actor, and counts them."""

    packing: Packing
    last_words: np.ndarray | None = None  # the packed values that the actor has
    exchanges: int = field(default=0)

    def message(self, packed: Sequence[np.ndarray]) -> tuple[int | None, list[np.ndarray]]:
        """Returns the number of changed words and the arrays to send; the number is None if everything is sent."""
        changes = None if self.packing.codec is None else self.packing.codec.changes
        if changes is None:
            return None, list(packed)
        words, last_words = self.packing.words(packed), self.last_words
        self.last_words, self.exchanges = words, self.exchanges + 1
        if last_words is None or self.exchanges % changes.every == 0:
            return None, list(packed)
        (places,) = np.nonzero(words != last_words)
        if len(places) > len(words) // changes.one_in:
            return None, list(packed)
        return len(places), [places.astype(np.int32), words[places], *self.packing.not_packed(packed)]


def apply_changes(packing: Packing, arrays: Sequence[np.ndarray], changes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Applies changes to the arrays of the last message: positions, words, and the arrays that are not packed."""
    places, words, *unpacked_arrays = changes
    new_words = packing.words(arrays).copy()
    new_words[places] = words
    new_arrays, start, unpacked_iterator = [], 0, iter(unpacked_arrays)
    for kind, packs in zip(packing.packed_kinds, packing.packs, strict=True):
        if packs:
            new_arrays.append(new_words[start : start + kind.size].view(kind.dtype).reshape(kind.shape))
            start += kind.size
        else:
            new_arrays.append(next(unpacked_iterator))
    return new_arrays
