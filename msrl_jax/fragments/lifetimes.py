"""Ownership: which instruction reads a value last, so that its memory is reused or freed, and where a copy is needed first."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from msrl_jax.fragments.instructions import Carry, Free, Instruction, Loop, Move, Run, Value


def settle(
    instructions: Sequence[Instruction],
    carried: set[Value],
    leaves: Sequence[Value],
    read_later: Sequence[Value],
    new: Callable[..., Value],
) -> tuple[tuple[Instruction, ...], list[Value]]:
    """Adds donations, copies and frees to a straight line of instructions.

    A buffer belongs to one carried value at a time; that is what lets a program overwrite it. Where an instruction list
    would give one buffer to two carried values, or give away a buffer of its surroundings, a copy is made.

    Args:
      instructions: the instructions, in order.
      carried: values that this line may consume: what the previous time left to it.
      leaves: what it leaves to the next time.
      read_later: what somebody reads after it.
      new: makes a value from aval, placement and label.

    Returns:
      The instructions, and `leaves` followed by `read_later` with the copies in place of what had to be copied.
    """
    owned = carried.union(*(i.makes() for i in instructions)) if instructions else set(carried)
    tail: list[Instruction] = []

    def copied(values: Sequence[Value], into: list[Instruction]) -> list[Value]:
        results = [new(v.aval, v.placement, v.label) for v in values]
        for source, result in zip(values, results, strict=True):
            into.append(Move((source,), (result,)))
        return results

    taken: set[Value] = set()
    finals: list[Value] = []
    for v in leaves:
        if v in taken or v not in owned:
            (v,) = copied([v], tail)
        taken.add(v)
        finals.append(v)
    for v in read_later:
        if v in taken:
            (v,) = copied([v], tail)
        finals.append(v)

    live = set(finals)
    done: list[Instruction] = []
    for i in reversed([*instructions, *tail]):
        consumed: set[Value] = set()
        before: list[Instruction] = []
        if isinstance(i, Loop):
            i, before, consumed = _give(i, live, owned, copied)
        elif isinstance(i, Run):
            i = replace(i, donated=_donated(i, live, owned))
            consumed = {i.inputs[k] for k in i.donated} | {b for b, _ in i.writes}
        dead = {v for v in [*i.reads(), *i.makes()] if v in owned and v not in live and v not in consumed}
        dead -= {v for c in before for v in c.makes()}
        if dead:
            done.append(Free(tuple(sorted(dead, key=lambda v: v.index))))
        done.append(i)
        live -= set(i.makes())
        live |= set(i.reads())
        for c in reversed(before):
            done.append(c)
            live -= set(c.makes())
            live |= set(c.reads())
    return tuple(reversed(done)), finals


def _give(
    loop: Loop, live: set[Value], owned: set[Value], copied: Callable
) -> tuple[Loop, list[Instruction], set[Value]]:
    """Makes sure that a loop owns what it starts from."""
    before: list[Instruction] = []
    given: set[Value] = set()
    carry = []
    for c in loop.carry:
        init = c.init
        if init in live or init not in owned or init in loop.consts or init in given:
            (init,) = copied([init], before)
        given.add(init)
        carry.append(Carry(init, c.enter, c.leave, c.result))
    return replace(loop, carry=tuple(carry)), before, given


def _donated(run: Run, live: set[Value], owned: set[Value]) -> tuple[int, ...]:
    """Inputs that die here and whose memory some result can take."""
    room = Counter((v.aval.shape, v.aval.dtype) for v in run.outputs)
    uses = Counter(run.reads())
    found = []
    for k, v in enumerate(run.inputs):
        kind = (v.aval.shape, v.aval.dtype)
        if v in owned and v not in live and uses[v] == 1 and k not in run.rows and room[kind] > 0:
            room[kind] -= 1
            found.append(k)
    return tuple(found)
