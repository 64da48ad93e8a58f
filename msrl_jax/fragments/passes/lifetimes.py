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
    measured = [v for _, scalars in schedule.checks for v in scalars]
    body, leaves, later = _manage_memory(schedule.body, carried, leaves, [*schedule.metrics, *measured], copy_of)
    leaf, rest = iter(leaves), iter(later)
    outputs = tuple(tuple(next(leaf) for _ in copies) for copies in schedule.outputs)
    metrics = tuple(next(rest) for _ in schedule.metrics)
    checks = tuple((check, (next(rest), next(rest), next(rest))) for check, _ in schedule.checks)
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

    def copied(value: Value, into: list[Instruction]) -> Value:
        result = copy_of(value)
        into.append(Move((value,), (result,)))
        return result

    taken: set[Value] = set()
    left: list[Value] = []
    for v in leaves:
        if v in taken or v not in owned:
            v = copied(v, tail)
        taken.add(v)
        left.append(v)
    later = [copied(v, tail) if v in taken else v for v in read_later]

    live = {*left, *later}
    done: list[Instruction] = []
    for i in reversed([*instructions, *tail]):
        consumed: set[Value] = set()
        before: list[Instruction] = []
        if isinstance(i, Loop):
            i, before, consumed = _give(i, live, owned, copied)
        elif isinstance(i, RunProgram):
            i = replace(i, donated=_donated(i, live, owned))
            consumed = {i.inputs[k] for k in i.donated} | {b for b, _ in i.writes}
        dead = {v for v in [*i.reads(), *i.makes()] if v in owned and v not in live and v not in consumed}
        if dead:
            done.append(Free(tuple(sorted(dead, key=lambda v: v.index))))
        done.append(i)
        live -= set(i.makes())
        live |= set(i.reads())
        for c in reversed(before):
            done.append(c)
            live -= set(c.makes())
            live |= set(c.reads())
    return tuple(reversed(done)), left, later


def _manage_loop(loop: Loop, copy_of: Callable[[Value], Value]) -> Loop:
    leaves = [c.body_out for c in loop.carry]
    body, leaves, _ = _manage_memory(loop.body, {c.body_in for c in loop.carry}, leaves, [], copy_of)
    carry = tuple(replace(c, body_out=body_out) for c, body_out in zip(loop.carry, leaves, strict=True))
    return replace(loop, body=body, carry=carry)


def _give(
    loop: Loop, live: set[Value], owned: set[Value], copied: Callable[[Value, list[Instruction]], Value]
) -> tuple[Loop, list[Instruction], set[Value]]:
    """Copies the initial values that a loop may not consume."""
    before: list[Instruction] = []
    given: set[Value] = set()
    carry: list[LoopCarry] = []
    for c in loop.carry:
        init = c.init
        if init in live or init not in owned or init in loop.consts or init in given:
            init = copied(init, before)
        given.add(init)
        carry.append(replace(c, init=init))
    return replace(loop, carry=tuple(carry)), before, given


def _donated(run: RunProgram, live: set[Value], owned: set[Value]) -> tuple[int, ...]:
    """Positions of inputs that are not read later and whose memory a result can reuse."""
    room = Counter((v.aval.shape, v.aval.dtype) for v in run.outputs)
    uses = Counter(run.reads())
    found = []
    for k, v in enumerate(run.inputs):
        kind = (v.aval.shape, v.aval.dtype)
        if v in owned and v not in live and uses[v] == 1 and k not in run.rows and room[kind] > 0:
            room[kind] -= 1
            found.append(k)
    return tuple(found)
