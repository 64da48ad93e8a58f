"""Lowering: compiles every program of a schedule once, and passes shardings from each program to the next.

Inputs of the iteration have declared logical axes. A program's results have the shardings that XLA propagated. A Move
translates a sharding by its logical axes. A value made on a single device has no sharding to translate: XLA chooses one for
it, as a parameter of the program that reads it.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._compat import ClosedJaxpr, jaxpr_as_fun
from msrl_jax.fragments.graph.program_key import program_key
from msrl_jax.fragments.passes.compact import compacted, is_single_accelerator
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
from msrl_jax.fragments.passes.known_faults import warn_of_known_faults
from msrl_jax.fragments.passes.repairs import apply_xla_workarounds
from msrl_jax.fragments.placement import Placement
from msrl_jax.fragments.runtime.coalesce import coalesce
from msrl_jax.fragments.runtime.executables import Executables, Request, replicated, to_placement_sharding
from msrl_jax.fragments.runtime.send_changed import changes_of, compile_patching


def lower(schedule: Schedule, axes: Sequence[PartitionSpec], executables: Executables) -> Schedule:
    """Compiles a schedule; `executables` receives the programs and the shardings of all values.

    Carried values whose sharding would otherwise change are copied.
    """
    logical = {v: spec for copies, spec in zip(schedule.inputs, axes, strict=True) for v in copies}
    inputs = {v: v.placement.sharding(spec, v.aval.shape) for v, spec in logical.items()}
    shardings: dict[Value, NamedSharding | None] = dict(inputs)
    for value in schedule.constants:
        shardings[value] = replicated(value)
    back = list(zip(schedule.inputs, schedule.outputs, strict=True))
    required = {out: inputs[entry] for entries, outs in back for entry, out in zip(entries, outs, strict=True)}
    lowering = _Lowering(executables, shardings, logical, schedule.free_index)
    body = lowering.lower_block(schedule.body, required, {})
    outputs = []
    for entries, outs in back:
        pairs = [(out, inputs[entry]) for entry, out in zip(entries, outs, strict=True)]
        outputs.append(tuple(lowering.resharded(out, at, body) for out, at in pairs))
    executables.shardings.update({v: s or replicated(v) for v, s in shardings.items()})
    for i, _ in walk(body):
        if isinstance(i, Move) and not i.is_copy and (changes := changes_of(i)):
            executables.patching[i] = compile_patching(i, changes, executables)
        elif isinstance(i, Move):
            coalesce(i, executables)
    return replace(schedule, body=tuple(body), outputs=tuple(outputs))


class _Lowering:
    """`shardings` has the sharding of each value, or None while its reader may choose; `logical` has the declared axes."""

    def __init__(
        self,
        executables: Executables,
        shardings: dict[Value, NamedSharding | None],
        logical: dict[Value, PartitionSpec],
        free_index: int,
    ):
        self.executables, self.shardings, self.logical = executables, shardings, logical
        self.numbers = itertools.count(free_index)
        self.to_shards: set[Value] = set()

    def lower_block(
        self,
        instructions: Iterable[Instruction],
        required: dict[Value, NamedSharding],
        carry_out_to_in: dict[Value, Value],
    ) -> list[Instruction]:
        """Lowers a sequence.

        `required` prescribes shardings; `carry_out_to_in` maps the values of a loop's carry after its body to those before it.
        """
        done: list[Instruction] = []
        instructions = list(instructions)
        self.to_shards |= _sent_to_shards(instructions)
        for i in instructions:
            if isinstance(i, RunProgram):
                self.run(i, required, carry_out_to_in)
            elif isinstance(i, Move):
                self.move(i, required, carry_out_to_in)
            elif isinstance(i, HostCall):
                self.shardings.update({v: replicated(v) for v in (*i.inputs, *i.outputs)})
            elif isinstance(i, Alloc):
                self.shardings.update(dict.fromkeys(i.results))
            elif isinstance(i, Loop):
                i = self.loop(i, done, required)
            done.append(i)
        for i in done:
            if isinstance(i, Move) and (i.is_copy or (i.shares_devices and len(i.processes) == 1)):
                self.copy(i)
            elif isinstance(i, Alloc):
                self.alloc(i)
            elif isinstance(i, HostCall):
                self.place(i)
        return done

    def move(self, i: Move, required: dict[Value, NamedSharding], carry_out_to_in: dict[Value, Value]) -> None:
        for source, result in zip(i.sources, i.results, strict=True):
            body_in = carry_out_to_in.get(result)
            prescribed = required.get(result) or (self.shardings[body_in] if body_in else None)
            self.shardings[result] = prescribed or (self.shardings[source] if i.is_copy else self.moved(source, result))
            if body_in and self.shardings[body_in] is None:
                self.shardings[body_in] = self.shardings[result]

    def resharded(self, value: Value, at: NamedSharding, into: list[Instruction]) -> Value:
        """The value with the sharding `at`: itself, or a copy that replaces it, appended to `into`."""
        if _same(at, self.shardings[value] or at, value):
            self.shardings[value] = self.shardings[value] or at
            return value
        copy = Value(next(self.numbers), value.aval, value.placement, value.label)
        self.shardings[copy] = at
        move = Move((value,), (copy,))
        self.copy(move)
        into.append(move)
        return copy

    def moved(self, source: Value, result: Value) -> NamedSharding | None:
        """The sharding of a Move's result, or None if its reader chooses."""
        if source in self.logical:
            self.logical[result] = self.logical[source]
            return result.placement.sharding(self.logical[source], result.aval.shape)
        if result.placement.mesh.size == 1:
            return replicated(result)
        at = self.shardings[source]
        if at is None or source.placement.mesh.size == 1:
            return None
        return result.placement.sharding(source.placement.logical(at), result.aval.shape)

    def loop(self, i: Loop, before: list[Instruction], required: dict[Value, NamedSharding]) -> Loop:
        unconstrained = {
            v for r in before if isinstance(r, RunProgram) and not r.fragments for v in r.outputs if v not in required
        }  # glue such as jnp.zeros takes the sharding that the loop needs
        for c in i.carry:
            is_free = c.init in unconstrained and c.init.placement.mesh.size > 1
            self.shardings[c.body_in] = required.get(c.result) or (None if is_free else self.shardings[c.init])
            if c.init in self.logical:
                self.logical[c.body_in] = self.logical[c.init]
        for v in i.indices:
            self.shardings[v] = replicated(v)
        body = self.lower_block(i.body, {}, {c.body_out: c.body_in for c in i.carry})
        carry = []
        wanted: dict[Value, NamedSharding] = {}
        for c in i.carry:
            at = self.shardings[c.body_in] or self.shardings[c.body_out] or replicated(c.body_in)
            self.shardings[c.body_in] = self.shardings[c.result] = at
            body_out = self.resharded(c.body_out, at, body)
            init = c.init
            if init in unconstrained and not _same(at, self.shardings[init] or at, init):
                wanted[init] = at
            else:
                init = self.resharded(init, at, before)
            carry.append(LoopCarry(init, c.body_in, body_out, c.result))
        for r in before:
            if isinstance(r, RunProgram) and any(v in wanted for v in r.outputs):
                self.run(r, {**required, **wanted}, {})
        return replace(i, carry=tuple(carry), body=tuple(body))

    def run(self, i: RunProgram, required: dict[Value, NamedSharding], carry_out_to_in: dict[Value, Value]) -> None:
        values = [*([i.index] if i.index else []), *i.reads()]
        results = i.makes()
        single = i.placement.mesh.size == 1
        if single or not any(self.shardings[v] for v in values):
            for v in values:
                self.shardings[v] = self.shardings[v] or replicated(v)
        pairs = {**carry_out_to_in, **{body_out: body_in for body_in, body_out in i.writes}}
        prescribed: dict[Value, NamedSharding] = {}
        for v in results:
            carried = self.shardings[pairs[v]] if v in pairs else None
            if at := required.get(v) or carried or (replicated(v) if single or not values else None):
                prescribed[v] = at
        compiled = self.compile_until_settled(i, values, prescribed, pairs)
        for v, s in zip(results, compiled.output_shardings, strict=True):
            self.shardings[v] = prescribed.get(v) or to_placement_sharding(s, v)
            if v in pairs and self.shardings[pairs[v]] is None:
                self.shardings[pairs[v]] = self.shardings[v]
        self.executables.compiled[i] = compiled

    def compile_until_settled(
        self, i: RunProgram, values: Sequence[Value], prescribed: dict[Value, NamedSharding], pairs: dict[Value, Value]
    ) -> jax.stages.Compiled:
        """Compiles a program; each further round prescribes shardings that XLA chose wrongly, and adds them to `prescribed`.

        A round prescribes those of at least one more result, or of all inputs, so that the rounds end.
        """
        results, first = i.makes(), 1 if i.index else 0
        key = (program_key(i.jaxpr), len(i.outputs), i.rows, bool(i.index))
        for _ in range(len(results) + 2):
            out = tuple(prescribed.get(v) for v in results)
            donate = [first + k for k in self.reusable(i, out)]
            donate += [first + len(i.inputs) + k for k in range(len(i.writes))]
            given, open_ones = list(map(self.spec, values)), [k for k in donate if self.shardings[values[k]] is None]
            try:
                compiled = self.executables.compile(Request(key, body(i), given, donate, out))
            except (RuntimeError, ValueError):
                # JAX pairs a donated argument whose sharding is open with a result of its shape, and XLA rejects a pair with
                # two different shardings. Once the sharding is known, the argument is donated.
                if not open_ones:
                    raise
                compiled = self.executables.compile(Request(key, body(i), given, sorted({*donate} - {*open_ones}), out))
            else:
                open_ones = []
            settled = self.record_input_shardings(values, compiled) and not open_ones
            more = self.sharding_mismatches(results, compiled, prescribed, pairs)
            if settled and not more:
                return compiled
            prescribed |= more
        raise RuntimeError(f"XLA's shardings for {i.name!r} @ {i.placement} change with every compilation")

    def spec(self, v: Value) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=self.shardings[v], weak_type=v.aval.weak_type)

    def record_input_shardings(self, values: Sequence[Value], compiled: jax.stages.Compiled) -> bool:
        """Records the shardings that XLA chose for arguments; returns whether all of them could be expressed."""
        settled = True
        for v, s in zip(values, compiled.input_shardings[0], strict=True):
            if self.shardings[v] is None:
                chosen = to_placement_sharding(s, v)
                settled &= chosen is not None
                self.shardings[v] = chosen or replicated(v)
        return settled

    def sharding_mismatches(
        self,
        results: Sequence[Value],
        compiled: jax.stages.Compiled,
        prescribed: dict[Value, NamedSharding],
        pairs: dict[Value, Value],
    ) -> dict[Value, NamedSharding]:
        """The shardings to prescribe for results that XLA sharded differently than needed."""
        more: dict[Value, NamedSharding] = {}
        for v, s in zip(results, compiled.output_shardings, strict=True):
            if v in prescribed:
                continue
            made, carried = to_placement_sharding(s, v), self.shardings[pairs[v]] if v in pairs else None
            if carried is not None:
                if made is None or not _same(carried, made, v):
                    more[v] = carried
            elif made is None:
                more[v] = replicated(v)
            elif v in self.to_shards and v not in pairs and not any(made.spec) and any((split := _scattered(v)).spec):
                # Only shards of another placement read this value, so no device needs it whole: reduce-scatter the sum.
                more[v] = split
        return more

    def reusable(self, i: RunProgram, out: Sequence[NamedSharding | None]) -> Iterator[int]:
        """The donated inputs for which there is a result of the same size on each device."""
        room = [(v.aval.shape, v.aval.dtype, s) for v, s in zip(i.outputs, out, strict=False)]
        open_choice = None in out
        for k in i.donated:
            value, at = i.inputs[k], self.shardings[i.inputs[k]]
            for place in room:
                if place[:2] == (value.aval.shape, value.aval.dtype) and (open_choice or place[2] == at):
                    room.remove(place)
                    yield k
                    break

    def place(self, i: HostCall) -> None:
        """Compiles the program that moves the results of a call to its device; `jax.device_put` of several arrays is slower."""
        args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=replicated(v)) for v in i.outputs]
        out = [replicated(v) for v in i.outputs]
        self.executables.compiled[i] = self.executables.compile(Request("place", _copy, args, (), out))

    def copy(self, i: Move) -> None:
        """Compiles a Move's copy: within its placement, or after a transfer that may have shared memory."""
        taken = i.sources if i.is_copy else i.results
        for v in taken:
            self.shardings[v] = self.shardings[v] or replicated(v)
        out = tuple(self.shardings[v] or replicated(v) for v in i.results)
        self.executables.compiled[i] = self.executables.compile(Request("copy", _copy, list(map(self.spec, taken)), (), out))

    def alloc(self, i: Alloc) -> None:
        out = tuple(self.shardings[v] or replicated(v) for v in i.results)
        kinds = tuple((v.aval.shape, v.aval.dtype) for v in i.results)

        def empty() -> tuple[jax.Array, ...]:
            return tuple(jax.lax.empty(shape, dtype) for shape, dtype in kinds)

        self.executables.compiled[i] = self.executables.compile(Request(("alloc", kinds), empty, (), (), out))


def _sent_to_shards(instructions: Iterable[Instruction]) -> set[Value]:
    """Values that are read only by moves to placements that keep shards."""
    found: set[Value] = set()
    others: set[Value] = set()
    for i in instructions:
        shards = isinstance(i, Move) and i.results[0].placement.scatter is not None and not i.is_copy
        (found if shards else others).update(i.reads())
    return found - others


def _scattered(value: Value) -> NamedSharding:
    """The sharding that splits an array over all devices of its placement, along its largest dimension."""
    axis = str(value.placement.mesh.axis_names[0])
    return replace(value.placement, rules=(), scatter=axis).sharding(PartitionSpec(), value.aval.shape)


def _copy(*xs: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x.copy() for x in xs)


def _same(a: NamedSharding, b: NamedSharding, value: Value) -> bool:
    return a.is_equivalent_to(b, len(value.aval.shape))


def prepare_for_placement(program: ClosedJaxpr, placement: Placement) -> ClosedJaxpr:
    """A program in its form for a placement: correct if split, and with fewer kernels where their number matters."""
    warn_of_known_faults(program, placement.mesh)
    program = apply_xla_workarounds(program, placement.mesh)
    return compacted(program) if is_single_accelerator(placement) else program


def body(run: RunProgram) -> Callable[..., Any]:
    """The function that a RunProgram compiles: reads its rows, evaluates its jaxpr, writes its rows."""
    evaluate = jaxpr_as_fun(prepare_for_placement(run.jaxpr, run.placement))

    def fn(*args: Any) -> tuple[Any, ...]:
        index, *rest = args if run.index is not None else (None, *args)
        inputs, buffers = rest[: len(run.inputs)], rest[len(run.inputs) :]
        for k in run.rows:
            inputs[k] = jax.lax.dynamic_index_in_dim(inputs[k], index, 0, keepdims=False)
        results = evaluate(*inputs)
        outputs, rows = results[: len(run.outputs)], results[len(run.outputs) :]
        stored = [jax.lax.dynamic_update_index_in_dim(b, row, index, 0) for b, row in zip(buffers, rows, strict=True)]
        return (*outputs, *stored)

    fn.__name__ = "".join(c if c.isalnum() else "_" for c in run.name)[:80]  # the program's name in profiles
    return fn
