"""The shardings that follow from placements and declared axes, before XLA chooses any."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax.fragments.passes.instructions import Instruction, Loop, Move, Schedule, Value, walk
from msrl_jax.fragments.runtime.executables import replicated_sharding

Shardings: TypeAlias = dict[Value, NamedSharding | None]
"""The sharding of each value; None while the program that reads the value may choose it."""


def declared_axes(schedule: Schedule, axes: Sequence[PartitionSpec]) -> dict[Value, PartitionSpec]:
    """Returns the logical axes of the state's leaves, and of the same values in loops and at other placements."""
    specs = {v: spec for copies, spec in zip(schedule.inputs, axes, strict=True) for v in copies}
    for i, _ in walk(schedule.body):
        pairs: Iterable[tuple[Value, Value]] = ()
        if isinstance(i, Loop):
            pairs = [(c.init, c.body_in) for c in i.carry]
        elif isinstance(i, Move) and not i.is_copy:
            pairs = zip(i.sources, i.results, strict=True)
        specs.update({same: specs[value] for value, same in pairs if value in specs})
    return specs


def moved_sharding(
    source: Value, result: Value, shardings: Shardings, axes: Mapping[Value, PartitionSpec]
) -> NamedSharding | None:
    """Returns the sharding of a Move's result, which splits the same logical axes as the source; None if its reader chooses."""
    if source in axes:
        return result.placement.sharding(axes[source], result.aval.shape)
    if result.placement.mesh.size == 1:
        return replicated_sharding(result)
    source_sharding = shardings[source]
    if source_sharding is None or source.placement.mesh.size == 1:
        return None
    return result.placement.sharding(source.placement.logical(source_sharding), result.aval.shape)


def sent_to_shards(instructions: Iterable[Instruction]) -> set[Value]:
    """Values that are read only by moves to placements that keep shards."""
    shard_reads: set[Value] = set()
    other_reads: set[Value] = set()
    for i in instructions:
        shards = isinstance(i, Move) and i.results[0].placement.scatter is not None and not i.is_copy
        (shard_reads if shards else other_reads).update(i.reads())
    return shard_reads - other_reads


def scattered_sharding(value: Value) -> NamedSharding:
    """Returns the sharding that splits an array over all devices of its placement, along its largest dimension."""
    axis = str(value.placement.mesh.axis_names[0])
    return replace(value.placement, rules=(), scatter=axis).sharding(PartitionSpec(), value.aval.shape)


def is_same(a: NamedSharding, b: NamedSharding, value: Value) -> bool:
    """Whether two shardings of a value are equivalent."""
    return a.is_equivalent_to(b, len(value.aval.shape))
