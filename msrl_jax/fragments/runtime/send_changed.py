"""Sends changes: only the packed words which differ from the last ones sent, with their positions; the receiver has the rest.

All values of a Move form one vector of words. The host reads how many words changed, so it waits for the program that makes
them. The copies at both ends are not part of the state: after a start, a resume or an error, all words are sent.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax.fragments.codecs import Changes, get
from msrl_jax.fragments.passes.instructions import Move, Value
from msrl_jax.fragments.runtime.executables import DeltaTransfer, Executables, Request

_WORD, _PLACE = np.dtype(np.uint16), np.dtype(np.int32)


@dataclass
class DeltaStats:
    """The amount that a Move has sent so far.

    Attributes:
      exchanges: number of exchanges.
      whole: number of exchanges in which all words were sent.
      words: number of words.
      changed: number of changed words, summed over the exchanges that compared them.
      compared: number of exchanges that compared them.
      nbytes: bytes received by each device.
    """

    words: int
    exchanges: int = 0
    whole: int = 0
    changed: int = 0
    compared: int = 0
    nbytes: int = 0


class _LastExchange(NamedTuple):
    """The words of the last exchange."""

    sent_words: jax.Array
    received_words: jax.Array
    since: int  # exchanges since all words were sent


def changes_of(move: Move) -> Changes | None:
    """How a Move sends only changes; None if it sends everything."""
    packed = move.results[0].packed
    return get(packed.edge.codec).changes if packed else None


def label_of(value: Value) -> str:
    """Returns the name of an array, or of the value that is packed into it."""
    return value.packed.label if value.packed else value.label


def compile_patching(move: Move, changes: Changes, executables: Executables) -> DeltaTransfer:
    """Compiles the programs of a Move that sends changes.

    Raises:
      ValueError: if a value is split over devices or is not of 16-bit words, or there are several processes or 2**31 words.
    """
    shardings, name = executables.shardings, move.results[0].packed.codec if move.results[0].packed else ""
    ends = f"from {move.sources[0].placement.name!r} to {move.results[0].placement.name!r}"
    for pair in zip(move.sources, move.results, strict=True):
        if not all(shardings[v].is_fully_replicated for v in pair):
            raise ValueError(
                f"codec {name!r} sends the changes of values that are whole on each device, but {label_of(pair[1])} is split "
                f"over devices on its way {ends}. Use 'bfloat16', or a policy that keeps it whole"
            )
    if jax.process_count() > 1:
        raise ValueError(
            f"codec {name!r} counts changes on one host, and there are {jax.process_count()} processes, in which "
            f"{label_of(move.results[0])} crosses {ends}. Use 'bfloat16', or one process"
        )
    if wide := [v for v in move.sources if v.aval.dtype.itemsize != _WORD.itemsize]:
        raise ValueError(
            f"codec {name!r} sends the changes of words of 16 bits, but packs {label_of(wide[0])} into {wide[0].aval.dtype}; "
            "make it without changes"
        )
    shapes = [v.aval.shape for v in move.sources]
    dtypes = [v.aval.dtype for v in move.sources]
    sizes = [math.prod(shape) for shape in shapes]
    words = sum(sizes)
    if words >= 2**31:
        raise ValueError(f"codec {name!r} supports at most 2**31 - 1 words, but {words:,} cross {ends}; use 'bfloat16'")
    capacity = max(1, words // changes.one_in)

    def join(*arrays: jax.Array) -> jax.Array:
        return jnp.concatenate([jax.lax.bitcast_convert_type(x, _WORD).reshape(-1) for x in arrays])

    def compare(last: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        now = join(*arrays)
        differs = now != last
        (places,) = jnp.nonzero(differs, size=capacity, fill_value=words)
        return now, places.astype(_PLACE), now.at[places].get(mode="fill", fill_value=0), differs.sum(dtype=_PLACE)

    def split(vector: jax.Array) -> tuple[jax.Array, ...]:
        parts = zip(jnp.split(vector, np.cumsum(sizes)[:-1]), shapes, dtypes, strict=True)
        return tuple(jax.lax.bitcast_convert_type(x.reshape(shape), dtype) for x, shape, dtype in parts)

    def patch(vector: jax.Array, places: jax.Array, changed: jax.Array) -> tuple[jax.Array, ...]:
        patched = vector.at[places].set(changed, mode="drop")
        return (patched, *split(patched))

    source_sharding, target_sharding = (
        NamedSharding(v.placement.mesh, PartitionSpec()) for v in (move.sources[0], move.results[0])
    )

    def program(name: str, fn: Callable[..., Any], args: Sequence[Any], out: Sequence[NamedSharding]) -> jax.stages.Compiled:
        return executables.compile(Request((name, tuple(shapes), capacity), fn, args, (), out))

    values = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=shardings[v]) for v in move.sources]
    vectors = [jax.ShapeDtypeStruct((words,), _WORD, sharding=s) for s in (source_sharding, target_sharding)]
    arrived = [jax.ShapeDtypeStruct((capacity,), dtype, sharding=target_sharding) for dtype in (_PLACE, _WORD)]
    to = [shardings[v] for v in move.results]
    return DeltaTransfer(
        changes,
        words,
        program("words", lambda *xs: (join(*xs),), values, [source_sharding]),
        program("changes", compare, [vectors[0], *values], [source_sharding] * 4),
        program("values", split, [vectors[1]], to),
        program("patch", patch, [vectors[1], *arrived], [target_sharding, *to]),
        target_sharding,
    )


class DeltaSender:
    """Sends the values of a Move, and remembers what its receiver has."""

    def __init__(
        self,
        patching: DeltaTransfer,
        programs: Sequence[Callable[..., Any]],
        place: Callable[..., Sequence[jax.Array]],
        wait: Callable[[jax.Array], object],
        stats: DeltaStats,
    ):
        """`programs` run those of `patching` in order, `place` transfers arrays, `wait` waits for one; counts in `stats`."""
        self._patching, self._place, self._wait = patching, place, wait
        self._join, self._compare, self._split, self._patch = programs
        self._last: _LastExchange | None = None
        self.stats = stats

    def __call__(self, *arrays: jax.Array) -> Sequence[jax.Array]:
        """Sends the values; returns them at the destination."""
        last, self._last = self._last, None  # if something fails below, all words are sent next time
        if last is None:
            (now,) = self._join(*arrays)
            return self._send_whole(now)
        now, places, changed, number = self._compare(last.sent_words, *arrays)
        self._wait(number)
        num_changed = int(np.asarray(number.addressable_data(0)))
        self.stats.changed += num_changed
        self.stats.compared += 1
        if num_changed > places.size or last.since + 1 >= self._patching.changes.every:
            return self._send_whole(now)
        arrivals = self._place([places, changed], [self._patching.target_sharding] * 2)
        received, *values = self._patch(last.received_words, *arrivals)
        self._account(_LastExchange(now, received, last.since + 1), places.nbytes + changed.nbytes, is_whole=False)
        return values

    def _send_whole(self, now: jax.Array) -> Sequence[jax.Array]:
        self._wait(now)  # do not keep the result of a failed program
        (received,) = self._place([now], [self._patching.target_sharding])
        values = self._split(received)
        self._account(_LastExchange(now, received, 0), now.nbytes, is_whole=True)
        return values

    def _account(self, last: _LastExchange, nbytes: int, is_whole: bool) -> None:
        self._last = last
        self.stats.exchanges += 1
        self.stats.whole += is_whole
        self.stats.nbytes += nbytes
