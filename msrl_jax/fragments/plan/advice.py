"""Warnings about expensive or fragile plans: exchanged batches, tiny programs, waiting, copies, idle codecs, callbacks."""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding

from msrl_jax._compat import Jaxpr, jaxprs_in
from msrl_jax.codecs import get
from msrl_jax.fragments.passes.checks import Fit
from msrl_jax.fragments.passes.instructions import HostCall, Instruction, Loop, Move, Run, Value, walk
from msrl_jax.fragments.placement import Edge, Layout
from msrl_jax.fragments.plan.cost import flops
from msrl_jax.fragments.plan.plan import ProgramPlan, size

# With fewer operations per dispatch than this, a host-driven loop spends most of its time on dispatching.
_TINY_BODY = 1_000_000
# Exchanges of fewer bytes than this are negligible.
_SMALL = 1024


def advise(
    layout: Layout,
    instructions: Sequence[Instruction],
    programs: Sequence[ProgramPlan],
    shardings: Mapping[Value, NamedSharding],
    unused: Sequence[Edge],
) -> list[str]:
    """Warns about expensive or fragile parts of a plan, with remedies; `programs` are those of the Runs, in order."""
    steps = list(walk(instructions))
    return [
        *_collective_warnings(steps, programs),
        *_loop_warnings(steps),
        *_unused_warnings(layout, steps),
        *_waiting_warnings(layout, instructions),
        *_replication_warnings(steps, shardings),
        *_codec_warnings(unused),
        *_callback_warnings(steps),
    ]


def _collective_warnings(
    steps: Sequence[tuple[Instruction, int]], programs: Sequence[ProgramPlan]
) -> Iterable[str]:
    runs = [i for i, _ in steps if isinstance(i, Run)]
    for run, program in zip(runs, programs, strict=True):
        largest_state = sum(v.nbytes for v in run.inputs)
        for c in program.collectives:
            moved = c.kind != "all-reduce" and c.kind != "reduce-scatter"
            if moved and c.nbytes >= _SMALL:
                yield (
                    f"program {program.name!r} @ {program.placement} has an {c.kind} of {size(c.nbytes)} ({c.source}), "
                    f"{c.times} times per run: XLA exchanges whole batches between devices. Operations such as a shuffle or "
                    "a reshape that mix the split dimension with others cause this; keep that dimension outermost and whole"
                )
            elif c.nbytes > max(largest_state, _SMALL):
                yield (
                    f"program {program.name!r} @ {program.placement} all-reduces {size(c.nbytes)} ({c.source}), more than "
                    "all of its inputs: something other than gradients is summed over devices"
                )


def _loop_warnings(steps: Sequence[tuple[Instruction, int]]) -> Iterable[str]:
    for loop, _ in steps:
        if not isinstance(loop, Loop):
            continue
        inner = [(i, t) for i, t in walk(loop.body) if isinstance(i, Run)]
        if any(isinstance(i, HostCall) for i in loop.body):
            continue  # no policy drives it otherwise
        dispatches = sum(t for _, t in inner)
        work = sum(flops(i.jaxpr.jaxpr) * t for i, t in inner)
        if dispatches and work / dispatches < _TINY_BODY:
            names = "+".join(dict.fromkeys(f for i, _ in inner for f in i.fragments))
            yield (
                f"the host drives the loop over {names} ({loop.length} times, {dispatches} programs each, about "
                f"{work // dispatches:,} operations per program): dispatch will dominate. Give it more environments or "
                "larger batches, or a policy that places these roles together"
            )


def _unused_warnings(layout: Layout, steps: Sequence[tuple[Instruction, int]]) -> Iterable[str]:
    used = {d for i, _ in steps if isinstance(i, Run) for d in i.placement.devices}
    for placement in layout.placements:
        if used.isdisjoint(placement.devices):
            roles = " or ".join(repr(role) for role, where in layout.roles.items() if where == placement)
            yield f"nothing runs on {placement}: no fragment has the role {roles}. Leave these devices to another placement"


def _waiting_warnings(layout: Layout, instructions: Sequence[Instruction]) -> Iterable[str]:
    actors, learners = layout.placement("actor", "actor"), layout.placement("learner", "learner")
    if not set(actors.devices).isdisjoint(learners.devices):
        return
    down = {
        r for i, _ in walk(instructions) if isinstance(i, Move) and not i.is_copy
        for s, r in zip(i.sources, i.results, strict=True) if s.placement == learners and r.placement == actors
    }  # fmt: skip
    waiting = [i for i in instructions if isinstance(i, Run) and i.placement == actors and down & set(i.inputs)]
    if layout.staleness and waiting:
        yield (
            f"{waiting[0].name!r} on the actors' devices ({actors.name}) reads the learner's newest values and waits for them: "
            "staleness delays what fragments of the roles 'actor' and 'buffer' read. Give the fragment that reads them one of "
            "these roles, or have an actor pass them on"
        )
    elif any("actor" in i.roles for i in waiting):
        yield (
            f"actors ({actors.name}) wait for the learner ({learners.name}) in every iteration, and the learner waits for the "
            "actors: each idles while the other works. staleness=1 overlaps them; parameters are then one iteration old"
        )


def _replication_warnings(
    steps: Sequence[tuple[Instruction, int]], shardings: Mapping[Value, NamedSharding]
) -> Iterable[str]:
    for i, _ in steps:
        if not isinstance(i, Move) or i.is_copy:
            continue
        for s, r in zip(i.sources, i.results, strict=True):
            was_split = s.placement.logical(shardings[s])
            rules = bool(r.placement.rules) and r.placement.mesh.size > 1
            if any(was_split) and rules and not any(shardings[r].spec) and r.nbytes >= _SMALL:
                axis, size = next((entry[0], size) for entry, size in zip(was_split, r.aval.shape, strict=False) if entry)
                divides = r.placement.split(axis) > 1
                yield (
                    f"{r.label} {r.aval.str_short()} is split at {s.placement.name!r} but copied whole to each of the "
                    f"{r.placement.mesh.size} devices of {r.placement.name!r}, which "
                    + (f"do not divide its {size} entries of axis {axis!r}" if divides else f"split no axis {axis!r}")
                )


def _codec_warnings(unused: Sequence[Edge]) -> Iterable[str]:
    for edge in unused:
        only = f" whose name has {edge.only!r} in it" if edge.only else ""
        yield (
            f"codec {get(edge.codec).name!r} packs nothing: no value{only} that crosses from {edge.source!r} to "
            f"{edge.destination!r} has a dtype and a shape that it takes"
        )


def _callback_warnings(steps: Sequence[tuple[Instruction, int]]) -> Iterable[str]:
    for i, _ in steps:
        if isinstance(i, Run) and i.placement.mesh.size > 1 and _calls_host(i.jaxpr.jaxpr):
            yield (
                f"program {i.name!r} @ {i.placement.name} makes a host callback on {i.placement.mesh.size} devices: if it "
                "raises an exception, the other devices wait for this one until XLA ends the process. Catch exceptions inside "
                "the callback, or place this fragment on one device"
            )


def _calls_host(jaxpr: Jaxpr) -> bool:
    return any("callback" in e.primitive.name for inner in jaxprs_in(jaxpr) for e in inner.eqns)


def warn_of_idle(fit: Fit) -> str | None:
    """Says which devices stay idle, and how to use them; None if none is.

    It finds suggestions by trying other numbers on the policy, because only the policy knows how it divides devices.
    """
    if not fit.idle:
        return None
    idle, total = len(fit.idle), len(fit.devices)
    envs = f" with num_envs={_num_envs(fit)}" if _num_envs(fit) else ""
    names = ", ".join(f"{d.platform}:{d.id}" for d in fit.idle)
    stay = "stay" if idle > 1 else "stays"
    fact = f"{idle} of {total} devices {stay} idle ({names}): {fit.layout.policy} uses {total - idle}{envs}"
    try:
        ways = [*_sizes(fit), *_parameters(fit)]
    except Exception as error:
        return f"{fact}. Other numbers were not tried: {fit.layout.policy} raises {error!r}; raise ValueError to refuse one"
    return f"{fact}. {' or '.join(ways)} would use all {total}" if ways else fact


def _num_envs(fit: Fit) -> int:
    """The size of the axis "env" if there is one and all leaves agree on it; else 0."""
    return fit.sizes["env"] if len({size for _, size in fit.leaves.get("env", ())}) == 1 else 0


def _sizes(fit: Fit) -> Iterator[str]:
    """The nearest numbers of environments, below and above, that leave no device idle."""
    now = _num_envs(fit)
    reach = len(fit.devices) if now else 0  # a multiple of the number of devices is at most this far away
    for numbers in (range(now - 1, max(now - reach, 1) - 1, -1), range(now + 1, now + reach + 1)):
        yield from _first(numbers, lambda n: dataclasses.replace(fit, leaves={**fit.leaves, "env": [("", n)]}), "num_envs={}")


def _parameters(fit: Fit) -> list[str]:
    """The policy with one number of devices changed; if no change helps, also with its other optional numbers set to None."""
    policy: Any = fit.policy
    if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
        return []
    hints = typing.get_type_hints(type(policy))
    numbers = [f.name for f in dataclasses.fields(policy) if f.init and hints[f.name] in (int, int | None)]
    free = {name: None for name in numbers if hints[name] == int | None}

    def found(others: dict[str, None]) -> Iterator[str]:
        for name in numbers:

            def other(n: int, name: str = name) -> Fit:
                return dataclasses.replace(fit, policy=dataclasses.replace(policy, **(others | {name: n})))

            yield from _first(range(1, len(fit.devices) + 1), other, "{policy}")

    return list(found({})) or list(found(free))


def _first(numbers: Iterable[int], make: Callable[[int], Fit], text: str) -> Iterator[str]:
    """The first number that leaves no device idle, as text."""
    for n in numbers:
        try:
            fit = make(n)
            idle = fit.idle
        except ValueError:  # the policy refuses this number
            continue
        if not idle:
            yield text.format(n, policy=fit.layout.policy)
            return
