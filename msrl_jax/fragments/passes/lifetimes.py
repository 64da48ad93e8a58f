"""Lifetimes: reuses or frees the memory of each value after its last reader, and adds the necessary copies."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from msrl_jax.fragments.passes.instructions import Free, Instruction, Loop, LoopCarry, Move, RunProgram, Schedule, Value


def add_lifetimes(schedule: Schedule) -> Schedule:
    """Adds donations, copies and frees to a schedule; its outputs and metrics then refer to the copies.

    A buffer belongs to one carried value at a time, so that a program may overwrite it. A copy is added where two carried
    values would share a buffer, or where a loop would consume an outer buffer.
    """
    numbers = itertools.count(schedule.free_index)

    def copy_of(v: Value) -> Value:
        return Value(next(numbers), v.aval, v.placement, v.label)

    carried = {v for copies in schedule.inputs for v in copies}
    leaves = [v for copies in schedule.outputs for v in copies]
    check_values = [v for _, scalars in schedule.checks for v in scalars]
    body, leaves, later = _manage_memory(schedule.body, carried, leaves, [*schedule.metrics, *check_values], copy_of)
    leaf, later_values = iter(leaves), iter(later)
    outputs = tuple(tuple(next(leaf) for _ in copies) for copies in schedule.outputs)
    metrics = tuple(next(later_values) for _ in schedule.metrics)
    checks = tuple((check, (next(later_values), next(later_values), next(later_values))) for check, _ in schedule.checks)
    return replace(schedule, body=body, outputs=outputs, metrics=metrics, checks=checks)


def _manage_memory(
    instructions: Sequence[Instruction],
    carried: set[Value],
    leaves: Sequence[Value],
    read_later: Sequence[Value],
    copy_of: Callable[[Value], Value],
) -> tuple[tuple[Instruction, ...], list[Value], list[Value]]:
    """Adds donations, copies and frees to a sequence of instructions, and to the bodies of its loops.

    `carried` are the values of the previous repetition, which the instructions may consume. `leaves` are the values for the
    next repetition, `read_later` the values that are read afterwards; both are returned with copied values replaced.
    """
    instructions = [_manage_loop(i, copy_of) if isinstance(i, Loop) else i for i in instructions]
    owned = carried.union(*(i.makes() for i in instructions))
    tail: list[Instruction] = []

    def append_copy(value: Value, into: list[Instruction]) -> Value:
        result = copy_of(value)
        into.append(Move((value,), (result,)))
        return result

    leaf_buffers: set[Value] = set()
    next_leaves: list[Value] = []
    for v in leaves:
        if v in leaf_buffers or v not in owned:
            v = append_copy(v, tail)
        leaf_buffers.add(v)
        next_leaves.append(v)
    later = [append_copy(v, tail) if v in leaf_buffers else v for v in read_later]

    live = {*next_leaves, *later}
    reversed_body: list[Instruction] = []
    for i in reversed([*instructions, *tail]):
        consumed: set[Value] = set()
        before: list[Instruction] = []
        if isinstance(i, Loop):
            i, before, consumed = _copy_shared_inits(i, live, owned, append_copy)
        elif isinstance(i, RunProgram):
            i = replace(i, donated=_donatable_inputs(i, live, owned))
            consumed = {i.inputs[k] for k in i.donated} | {b for b, _ in i.writes}
        dead = {v for v in [*i.reads(), *i.makes()] if v in owned and v not in live and v not in consumed}
        if dead:
            reversed_body.append(Free(tuple(sorted(dead, key=lambda v: v.index))))
        reversed_body.append(i)
        live -= set(i.makes())
        live |= set(i.reads())
        for c in reversed(before):
            reversed_body.append(c)
            live -= set(c.makes())
            live |= set(c.reads())
    return tuple(reversed(reversed_body)), next_leaves, later


def _manage_loop(loop: Loop, copy_of: Callable[[Value], Value]) -> Loop:
    leaves = [c.body_out for c in loop.carry]
    body, leaves, _ = _manage_memory(loop.body, {c.body_in for c in loop.carry}, leaves, [], copy_of)
    carry = tuple(replace(c, body_out=body_out) for c, body_out in zip(loop.carry, leaves, strict=True))
    return replace(loop, body=body, carry=carry)


def _copy_shared_inits(
    loop: Loop, live: set[Value], owned: set[Value], append_copy: Callable[[Value, list[Instruction]], Value]
) -> tuple[Loop, list[Instruction], set[Value]]:
    """Copies the initial values that a loop may not consume."""
    before: list[Instruction] = []
    initial_values: set[Value] = set()
    carry: list[LoopCarry] = []
    for c in loop.carry:
        init = c.init
        if init in live or init not in owned or init in loop.consts or init in initial_values:
            init = append_copy(init, before)
        initial_values.add(init)
        carry.append(replace(c, init=init))
    return replace(loop, carry=tuple(carry)), before, initial_values


def _donatable_inputs(run: RunProgram, live: set[Value], owned: set[Value]) -> tuple[int, ...]:
    """Positions of inputs that are not read later and whose memory a result can reuse."""
    room = Counter((v.aval.shape, v.aval.dtype) for v in run.outputs)
    uses = Counter(run.reads())
    positions = []
    for k, v in enumerate(run.inputs):
        kind = (v.aval.shape, v.aval.dtype)
        if v in owned and v not in live and uses[v] == 1 and k not in run.rows and room[kind] > 0:
            room[kind] -= 1
            positions.append(k)
    return tuple(positions)
