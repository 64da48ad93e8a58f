"""Moves between placements on different processes: collectives over the devices of both, so that no host handles the data.

A move is planned as hops. A hop sends one part of an array from a device that has it to one that needs it. Hops that share
neither sender nor receiver form a round, one `ppermute`. A device that has received a part may pass it on, so a broadcast to
`n` devices takes about `log2(n)` rounds. Nothing is summed: the bits do not change.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.executables import SMALLER_THAN_A_BYTE
from msrl_jax.fragments.support.random_keys import is_key

Block = tuple[tuple[int, int], ...]
"""A part of an array: the first index and the end along each dimension."""

# Arrays of at most this many bytes per device are sent together with others.
_SMALL = 2**20

_AXIS = "devices"


def blocks(sharding: NamedSharding, shape: Sequence[int]) -> dict[Device, Block]:
    """Returns the block of an array that each device of a sharding holds."""
    indices = sharding.devices_indices_map(tuple(shape))
    return {d: tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True)) for d, index in indices.items()}


@dataclass(frozen=True)
class Hop:
    """The transfer of one part between two devices, or within one."""

    sender: Device  # the device that has the part
    receiver: Device  # the device that needs it
    part: Block
    passed_on: bool = False  # whether the sender received the part before, instead of having it at the start


def plan_hops(source: Mapping[Device, Block], target: Mapping[Device, Block]) -> list[list[Hop]]:
    """Plans how an array changes its sharding, from the block of each device at the start to that at the end.

    Together, the blocks at the start are the whole array; equal blocks are copies. The first rounds contain the copies from the
    devices' own blocks. In each round, all parts have equal sizes, and every device sends at most one part and receives at most
    one. A part enters each process once.
    """
    distinct = list(dict.fromkeys(source.values()))
    demands = [
        (d, part)
        for d, block in target.items()
        for source_block in distinct
        if (part := _intersection(source_block, block)) is not None
    ]
    # For each part, the devices that have it, and whether they received it.
    holders = {
        part: {d: False for d, source_block in source.items() if _intersection(source_block, part) == part}
        for _, part in demands
    }
    local_demands = [(d, part) for d, part in demands if d in holders[part]]
    rounds: list[list[Hop]] = []
    for pending in (local_demands, [(d, part) for d, part in demands if d not in holders[part]]):
        while pending:
            hops = _first_round(pending, holders)
            for hop in hops:
                holders[hop.part].setdefault(hop.receiver, True)
                pending.remove((hop.receiver, hop.part))
            rounds.append(hops)
    return rounds


def _first_round(pending: Sequence[tuple[Device, Block]], holders: Mapping[Block, Mapping[Device, bool]]) -> list[Hop]:
    """Returns the first hops that fit into one round, among those that bring parts to the devices that need them."""
    size = _size(pending[0][1])
    senders: set[Device] = set()
    receivers: set[Device] = set()
    entering: set[tuple[int, Block]] = set()
    hops: list[Hop] = []
    for receiver, part in pending:
        process, part_holders = receiver.process_index, holders[part]
        local_holders = [receiver] if receiver in part_holders else [d for d in part_holders if d.process_index == process]
        free = next((d for d in local_holders or part_holders if d not in senders), None)
        if free is None or receiver in receivers or _size(part) != size or (not local_holders and (process, part) in entering):
            continue
        hops.append(Hop(free, receiver, part, part_holders[free]))
        senders.add(free)
        receivers.add(receiver)
        entering.add((process, part))
    return hops


def _intersection(a: Block, b: Block) -> Block | None:
    """Returns the intersection of two blocks; None if it is empty."""
    part = tuple((max(low, low_b), min(high, high_b)) for (low, high), (low_b, high_b) in zip(a, b, strict=True))
    return part if all(low < high for low, high in part) else None


def _size(block: Block) -> tuple[int, ...]:
    return tuple(high - low for low, high in block)


def connected_devices(plans: Sequence[Sequence[Sequence[Hop]]]) -> list[list[Device]]:
    """Groups of devices that exchange data, directly or indirectly, ordered by process and number; each needs a program."""
    groups: dict[Device, set[Device]] = {}
    for hop in itertools.chain.from_iterable(itertools.chain.from_iterable(plans)):
        joined = groups.get(hop.sender, {hop.sender}) | groups.get(hop.receiver, {hop.receiver})
        groups |= dict.fromkeys(joined, joined)
    distinct = {id(group): group for group in groups.values()}
    return [sorted(group, key=lambda d: (d.process_index, d.id)) for group in distinct.values()]


@dataclass(frozen=True)
class _Leg:
    """A round of one array, from the view of every device of a group; the tables have one row per device."""

    pairs: tuple[tuple[int, int], ...]  # the positions of senders and receivers
    size: tuple[int, ...]  # the shape of the parts
    sender_start: tuple[tuple[int, ...], ...]  # where the sender's part starts in its block. `[N, D]`
    passed_on: tuple[bool, ...]  # whether the sender reads it from what it received. `[N]`
    receiver_start: tuple[tuple[int, ...], ...]  # where the receiver's part starts in its block. `[N, D]`
    receives: tuple[bool, ...]  # whether the device receives a part. `[N]`


def _plan_legs(
    rounds: Sequence[Sequence[Hop]], group: Sequence[Device], source: Mapping[Device, Block], target: Mapping[Device, Block]
) -> list[_Leg]:
    position = {d: k for k, d in enumerate(group)}
    start = lambda part, block: tuple(low - first for (low, _), (first, _) in zip(part, block, strict=True))
    legs = []
    for hops in rounds:
        hops = [hop for hop in hops if hop.receiver in position]
        if not hops:
            continue
        size = _size(hops[0].part)
        zero = (0,) * len(size)
        sender_start, receiver_start = [zero] * len(group), [zero] * len(group)
        passed_on, receives = [False] * len(group), [False] * len(group)
        for hop in hops:
            sender, receiver = position[hop.sender], position[hop.receiver]
            sender_start[sender] = start(hop.part, (target if hop.passed_on else source)[hop.sender])
            receiver_start[receiver] = start(hop.part, target[hop.receiver])
            passed_on[sender], receives[receiver] = hop.passed_on, True
        pairs = tuple((position[hop.sender], position[hop.receiver]) for hop in hops)
        legs.append(_Leg(pairs, size, tuple(sender_start), tuple(passed_on), tuple(receiver_start), tuple(receives)))
    return legs


def _entry_of(table: Sequence[Any], me: jax.Array) -> Any:
    """Returns the device's entry of a table; a constant if all entries are equal."""
    return table[0] if len(set(table)) == 1 else jnp.asarray(table)[me]


def _execute_leg(legs: Sequence[_Leg], sources: Sequence[jax.Array], targets: Sequence[jax.Array]) -> list[jax.Array]:
    """Executes one leg of arrays that are sent together; returns the next `targets`."""
    me = jax.lax.axis_index(_AXIS)
    parts = []
    for leg, source, result in zip(legs, sources, targets, strict=True):
        start = list(_entry_of(leg.sender_start, me))
        source, result = (x if x.shape == leg.size else jax.lax.dynamic_slice(x, start, leg.size) for x in (source, result))
        passed_on = _entry_of(leg.passed_on, me)
        parts.append(jnp.where(passed_on, result, source) if len(set(leg.passed_on)) > 1 else (source, result)[passed_on])
    if any(sender != receiver for sender, receiver in legs[0].pairs):
        flat = parts[0] if len(parts) == 1 else jnp.concatenate([part.reshape(-1) for part in parts])
        flat = jax.lax.ppermute(flat, _AXIS, legs[0].pairs)
        ends = itertools.accumulate(part.size for part in parts)
        if len(parts) == 1:
            parts = [flat]
        else:
            parts = [flat[end - part.size : end].reshape(part.shape) for end, part in zip(ends, parts, strict=True)]
    results = []
    for leg, part, result in zip(legs, parts, targets, strict=True):
        updated = (
            part
            if result.shape == leg.size
            else jax.lax.dynamic_update_slice(result, part, list(_entry_of(leg.receiver_start, me)))
        )
        results.append(updated if all(leg.receives) else jnp.where(_entry_of(leg.receives, me), updated, result))
    return results


class _CollectiveProgram:
    """The collective program of one group of devices, for all arrays of a crossing."""

    def __init__(
        self,
        group: Sequence[Device],
        plans: Sequence[Sequence[Sequence[Hop]]],
        dtypes: Sequence[np.dtype],
        sources: Sequence[Mapping[Device, Block]],
        targets: Sequence[Mapping[Device, Block]],
    ):
        self._group = group
        self._sharding = _split_sharding(group)
        before, after = ([_size(next(iter(blocks.values()))) for blocks in side] for side in (sources, targets))
        legs = [_plan_legs(rounds, group, s, t) for rounds, s, t in zip(plans, sources, targets, strict=True)]
        groups: dict[Hashable, list[int]] = {}
        for i, (line, size, dtype) in enumerate(zip(legs, before, dtypes, strict=True)):
            small = math.prod(size) * dtype.itemsize <= _SMALL
            groups.setdefault((tuple(leg.pairs for leg in line), dtype) if small else i, []).append(i)

        def cross(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            outputs = [jnp.zeros(size, dtype) for size, dtype in zip(after, dtypes, strict=True)]
            for numbers in groups.values():
                for line in zip(*(legs[i] for i in numbers), strict=True):
                    results = _execute_leg(line, [arrays[i] for i in numbers], [outputs[i] for i in numbers])
                    for i, x in zip(numbers, results, strict=True):
                        outputs[i] = x
            return tuple(outputs)

        spec = self._sharding.spec
        mapped = jax.shard_map(cross, mesh=self._sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        self._shapes = [_joined_shape(size, len(group)) for size in before]
        args = [jax.ShapeDtypeStruct(*kind, sharding=self._sharding) for kind in zip(self._shapes, dtypes, strict=True)]
        self._run = jax.jit(mapped).lower(*args).compile()
        # Devices that have nothing at the start participate with memory that no device reads.
        idle = [d for d in group if d not in sources[0] and d.process_index == jax.process_index()]
        self._fill: Callable[[], Sequence[jax.Array]] = lambda: ()
        if idle:
            kinds = [(_joined_shape(size, len(idle)), dtype) for size, dtype in zip(before, dtypes, strict=True)]
            empty = functools.partial(_empty, kinds)
            self._fill = jax.jit(empty, out_shardings=[_split_sharding(idle)] * len(kinds)).lower().compile()

    def __call__(self, shards: Sequence[Mapping[Device, jax.Array]]) -> list[dict[Device, jax.Array]]:
        """Maps the blocks of the devices of this process before the crossing to those after it."""
        fill = [_shards_by_device(x) for x in self._fill()] or [{}] * len(shards)
        args = []
        for shape, local_shards, fillers in zip(self._shapes, shards, fill, strict=True):
            parts = [x for d in self._group if (x := local_shards.get(d, fillers.get(d))) is not None]
            args.append(jax.make_array_from_single_device_arrays(shape, self._sharding, parts))
        results = self._run(*args)
        if self._group[0].platform == "cpu":
            jax.block_until_ready(results)
        return [_shards_by_device(x) for x in results]


def _empty(kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[jax.Array]:
    return [jax.lax.empty(*kind) for kind in kinds]


def _split_sharding(devices: Sequence[Device]) -> NamedSharding:
    return NamedSharding(Mesh(np.asarray(devices, dtype=object), (_AXIS,)), PartitionSpec(_AXIS))


def _joined_shape(size: Sequence[int], count: int) -> tuple[int, ...]:
    """Returns the shape of an array whose blocks on `count` devices have the shape `size`."""
    return count * size[0], *size[1:]


def _shards_by_device(x: jax.Array) -> dict[Device, jax.Array]:
    return {shard.device: shard.data for shard in x.addressable_shards}


class MeshCrossing:
    """Copies arrays from one mesh to another; the meshes may be on any processes.

    All processes must create and call it. The programs of the groups of devices in which this process participates are compiled
    on creation.
    """

    def __init__(
        self, avals: Sequence[jax.ShapeDtypeStruct], sources: Sequence[NamedSharding], targets: Sequence[NamedSharding]
    ):
        """Plans and compiles; all sources are on one mesh, and all targets on another."""
        self._full = [i for i, a in enumerate(avals) if math.prod(a.shape)]
        empty = [i for i in range(len(avals)) if i not in self._full]
        make = functools.partial(_empty, [(avals[i].shape, avals[i].dtype) for i in empty])
        self._empty = jax.jit(make, out_shardings=[targets[i] for i in empty]) if empty else list
        sources, targets = [sources[i] for i in self._full], [targets[i] for i in self._full]
        avals = [avals[i] for i in self._full]
        wires = jax.eval_shape(lambda xs: [_to_wire(x) for x in xs], avals)
        self._wires = [(a.shape, a.dtype) for a in wires]
        self._targets = targets
        odd = self._odd = [i for i, a in enumerate(avals) if (a.shape, a.dtype) != self._wires[i]]
        kinds = [(avals[i].shape, avals[i].dtype, key_impl(avals[i])) for i in odd]
        unpack = lambda xs: [_from_wire(x, *kind) for x, kind in zip(xs, kinds, strict=True)]
        self._pack = jax.jit(lambda xs: [_to_wire(x) for x in xs], out_shardings=[sources[i] for i in odd])
        self._unpack = jax.jit(unpack, out_shardings=[targets[i] for i in odd])
        source_blocks = [blocks(sharding, wire.shape) for sharding, wire in zip(sources, wires, strict=True)]
        target_blocks = [blocks(sharding, wire.shape) for sharding, wire in zip(targets, wires, strict=True)]
        plans = [plan_hops(source, target) for source, target in zip(source_blocks, target_blocks, strict=True)]
        me = jax.process_index()
        self._programs = [
            _CollectiveProgram(group, plans, [wire.dtype for wire in wires], source_blocks, target_blocks)
            for group in connected_devices(plans)
            if any(d.process_index == me for d in group)
        ]

    def __call__(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Copies arrays into new memory."""
        nonempty = [arrays[i] for i in self._full]
        if self._odd:
            for i, x in zip(self._odd, self._pack([nonempty[i] for i in self._odd]), strict=True):
                nonempty[i] = x
        source_shards = [_shards_by_device(x) for x in nonempty]
        target_shards: list[dict[Device, jax.Array]] = [{} for _ in source_shards]
        for program in self._programs:
            for shards, new_shards in zip(target_shards, program(source_shards), strict=True):
                shards |= new_shards
        for i, ((shape, dtype), to, shards) in enumerate(zip(self._wires, self._targets, target_shards, strict=True)):
            parts = [shards[d] for d in sorted(to.device_set, key=lambda d: d.id) if d in shards]
            nonempty[i] = jax.make_array_from_single_device_arrays(shape, to, parts, dtype=dtype)
        if self._odd:
            for i, x in zip(self._odd, self._unpack([nonempty[i] for i in self._odd]), strict=True):
                nonempty[i] = x
        results, empty = dict(zip(self._full, nonempty, strict=True)), iter(self._empty())
        return [results[i] if i in results else next(empty) for i in range(len(arrays))]


def _to_wire(x: jax.Array) -> jax.Array:
    """Returns an array as it is sent: with a dimension to concatenate along, and elements of whole bytes."""
    if is_key(x):
        x = jax.random.key_data(x)
    elif x.dtype.name in SMALLER_THAN_A_BYTE:
        x = x.astype(jnp.int8 if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float16)
    return x if x.shape else x.reshape(1)


def _from_wire(x: jax.Array, shape: Sequence[int], dtype: np.dtype, impl: str | None) -> jax.Array:
    return (x.astype(dtype) if impl is None else jax.random.wrap_key_data(x, impl=impl)).reshape(shape)


def key_impl(aval: jax.ShapeDtypeStruct) -> Any:
    """Returns the generator of typed keys; None for other arrays."""
    if not is_key(aval):
        return None
    impls: list[Any] = []
    jax.eval_shape(lambda key: impls.append(jax.random.key_impl(key)), aval)
    return impls[0]
