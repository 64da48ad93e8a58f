"""Lowering: compiles every program of a schedule once, and passes shardings from each program to the next.

Inputs of the iteration have declared logical axes. A program's results have the shardings that XLA propagated. A Move
translates a sharding by its logical axes. A value made on a single device has no sharding to translate: XLA chooses one for
it, as a parameter of the program that reads it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax.fragments.passes.instructions import (
    Alloc,
    HostCall,
    Instruction,
    Loop,
    LoopCarry,
    Move,
    RunProgram,
    Schedule,
    Value,
    walk,
)
from msrl_jax.fragments.runtime.coalesce import coalesce
from msrl_jax.fragments.runtime.compile_program import compile_program
from msrl_jax.fragments.runtime.copies import compile_copies
from msrl_jax.fragments.runtime.executables import Executables, replicated_sharding
from msrl_jax.fragments.runtime.send_changed import changes_of, compile_patching
from msrl_jax.fragments.runtime.shardings import Shardings, declared_axes, is_same, moved_sharding, sent_to_shards


def lower(schedule: Schedule, axes: Sequence[PartitionSpec], executables: Executables) -> Schedule:
    """Compiles a schedule; `executables` receives the programs and the shardings of all values.

    Carried values whose sharding would otherwise change are copied.
    """
    specs = zip(schedule.inputs, axes, strict=True)
    inputs = {v: v.placement.sharding(spec, v.aval.shape) for copies, spec in specs for v in copies}
    shardings: Shardings = {**inputs, **{v: replicated_sharding(v) for v in schedule.constants}}
    context = _Context(executables, shardings, declared_axes(schedule, axes), itertools.count(schedule.free_index))
    back = [list(zip(outs, entries, strict=True)) for entries, outs in zip(schedule.inputs, schedule.outputs, strict=True)]
    body = _lower_block(schedule.body, {out: inputs[entry] for pairs in back for out, entry in pairs}, {}, context)
    outputs = tuple(tuple(_with_sharding(out, inputs[entry], body, context) for out, entry in pairs) for pairs in back)
    executables.shardings.update({v: s or replicated_sharding(v) for v, s in shardings.items()})
    for i, _ in walk(body):
        if isinstance(i, Move) and not i.is_copy and (changes := changes_of(i)):
            executables.patching[i] = compile_patching(i, changes, executables)
        elif isinstance(i, Move):
            coalesce(i, executables)
    return replace(schedule, body=tuple(body), outputs=outputs)


@dataclass(frozen=True)
class _Context:
    """The state of lowering a schedule; `executables` and `shardings` grow with every instruction."""

    executables: Executables
    shardings: Shardings
    axes: Mapping[Value, PartitionSpec]  # the declared logical axes
    numbers: Iterator[int]  # of further values


def _lower_block(
    instructions: Sequence[Instruction],
    required: Mapping[Value, NamedSharding],
    same_as: Mapping[Value, Value],
    context: _Context,
) -> list[Instruction]:
    """Lowers a sequence of instructions; see `compile_program` for `required` and `same_as`."""
    lowered: list[Instruction] = []
    to_shards = sent_to_shards(instructions)
    for i in instructions:
        if isinstance(i, RunProgram):
            _lower_program(i, required, same_as, to_shards, context)
        elif isinstance(i, Move):
            _lower_move(i, required, same_as, context)
        elif isinstance(i, HostCall):
            context.shardings.update({v: replicated_sharding(v) for v in (*i.inputs, *i.outputs)})
        elif isinstance(i, Alloc):
            context.shardings.update(dict.fromkeys(i.results))
        elif isinstance(i, Loop):
            i, recompiled = _lower_loop(i, lowered, required, context)
            for run in lowered:
                if isinstance(run, RunProgram) and any(v in recompiled for v in run.outputs):
                    _lower_program(run, {**required, **recompiled}, {}, to_shards, context)
        lowered.append(i)
    compile_copies(lowered, context.shardings, context.executables)
    return lowered


def _lower_program(
    i: RunProgram,
    required: Mapping[Value, NamedSharding],
    same_as: Mapping[Value, Value],
    to_shards: Set[Value],
    context: _Context,
) -> None:
    compiled, value_shardings = compile_program(i, context.shardings, required, same_as, to_shards, context.executables)
    context.executables.compiled[i] = compiled
    context.shardings.update(value_shardings)


def _lower_move(i: Move, required: Mapping[Value, NamedSharding], same_as: Mapping[Value, Value], context: _Context) -> None:
    shardings = context.shardings
    for source, result in zip(i.sources, i.results, strict=True):
        replaced = same_as.get(result)
        sharding = required.get(result) or (shardings[replaced] if replaced else None)
        if sharding is None:
            sharding = shardings[source] if i.is_copy else moved_sharding(source, result, shardings, context.axes)
        shardings[result] = sharding
        if replaced:
            shardings[replaced] = shardings[replaced] or sharding


def _lower_loop(
    i: Loop, before: list[Instruction], required: Mapping[Value, NamedSharding], context: _Context
) -> tuple[Loop, dict[Value, NamedSharding]]:
    """Lowers a loop.

    Args:
      i: the loop.
      before: the lowered instructions before it, to which copies of values that enter the loop are appended.
      required: prescribed shardings of the loop's results.
      context: receives the shardings and programs.

    Returns:
      The lowered loop, and the shardings that it needs for results of glue before it, which is compiled again for them.
    """
    shardings = context.shardings
    glue = {v for run in before if isinstance(run, RunProgram) and not run.fragments for v in run.outputs} - required.keys()
    for c in i.carry:
        # Glue such as `jnp.zeros` takes the sharding that the loop needs.
        is_open = c.init in glue and c.init.placement.mesh.size > 1
        shardings[c.body_in] = required.get(c.result) or (None if is_open else shardings[c.init])
    shardings.update({v: replicated_sharding(v) for v in i.indices})
    body = _lower_block(i.body, {}, {c.body_out: c.body_in for c in i.carry}, context)
    carry: list[LoopCarry] = []
    glue_shardings: dict[Value, NamedSharding] = {}
    for c in i.carry:
        sharding = shardings[c.body_in] or shardings[c.body_out] or replicated_sharding(c.body_in)
        shardings[c.body_in] = shardings[c.result] = sharding
        body_out, init = _with_sharding(c.body_out, sharding, body, context), c.init
        if init in glue and not is_same(sharding, shardings[init] or sharding, init):
            glue_shardings[init] = sharding
        else:
            init = _with_sharding(init, sharding, before, context)
        carry.append(replace(c, init=init, body_out=body_out))
    return replace(i, carry=tuple(carry), body=tuple(body)), glue_shardings


def _with_sharding(value: Value, sharding: NamedSharding, into: list[Instruction], context: _Context) -> Value:
    """Returns the value with a sharding: itself, or a copy that replaces it, appended to `into`."""
    shardings = context.shardings
    if is_same(sharding, shardings[value] or sharding, value):
        shardings[value] = shardings[value] or sharding
        return value
    copy = Value(next(context.numbers), value.aval, value.placement, value.label)
    shardings[copy] = sharding
    into.append(Move((value,), (copy,)))
    compile_copies(into[-1:], shardings, context.executables)
    return copy
