"""Lowering: compiles every program of a schedule once, and lets shardings flow from each program to the next.

Inputs of the iteration have declared logical axes. A program's results have the shardings that XLA propagated. A Move
carries a sharding over by its logical axes. Where nothing is known (a value made on a single device) the program that
reads the value chooses: XLA propagates shardings to parameters too.
"""

import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import jax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._compat import ClosedJaxpr, Jaxpr, Literal, Var, is_dropped, jaxpr_as_fun
from msrl_jax.fragments.instructions import Alloc, Carry, Instruction, Loop, Move, Run, Schedule, Value


@dataclass(eq=False)
class Programs:
    """Compiled programs and the shardings between them.

    Attributes:
      compiled: the executable of every Run, of every copy and of every Alloc.
      shardings: where each value lies.
      seconds: time spent tracing, lowering and compiling.
      count: number of XLA compilations.
    """

    compiled: dict[Instruction, jax.stages.Compiled] = field(default_factory=dict)
    shardings: dict[Value, NamedSharding] = field(default_factory=dict)
    seconds: float = 0.0
    count: int = 0
    _cache: dict[Hashable, jax.stages.Compiled] = field(default_factory=dict)

    def compile(
        self, key: Hashable, fn: Callable, args: Sequence[jax.ShapeDtypeStruct], donate: Sequence[int], out: object
    ) -> jax.stages.Compiled:
        """Compiles `fn` ahead of time, unless an equal program with equal shardings has been compiled before."""
        key = (key, tuple((a.shape, a.dtype, a.sharding) for a in args), tuple(donate), out)
        if key not in self._cache:
            start = time.perf_counter()
            jitted = jax.jit(fn, donate_argnums=tuple(donate), out_shardings=out)
            try:
                self._cache[key] = jitted.lower(*args).compile()
            except ValueError as error:
                raise explained(error, fn.__name__, len({d for a in args for d in a.sharding.device_set})) from error
            self.seconds += time.perf_counter() - start
            self.count += 1
        return self._cache[key]


def lower(schedule: Schedule, axes: Sequence[PartitionSpec], programs: Programs) -> Schedule:
    """Compiles a schedule.

    Args:
      schedule: the instructions.
      axes: logical axes of each state leaf (and register).
      programs: receives the compiled programs and the shardings of all values.

    Returns:
      The schedule, with a copy wherever a carried value would otherwise come back with another sharding.
    """
    logical = {v: spec for copies, spec in zip(schedule.inputs, axes, strict=True) for v in copies}
    inputs = {v: v.placement.sharding(spec, v.aval.shape) for v, spec in logical.items()}
    known: dict[Value, NamedSharding | None] = dict(inputs)
    for value in schedule.constants:
        known[value] = _whole(value)
    back = list(zip(schedule.inputs, schedule.outputs, strict=True))
    fixed = {leave: inputs[enter] for enters, leaves in back for enter, leave in zip(enters, leaves, strict=True)}
    lowering = _Lowering(programs, known, logical)
    body = lowering.line(schedule.body, fixed, {})
    outputs = []
    for enters, leaves in back:
        pairs = [(leave, inputs[enter]) for enter, leave in zip(enters, leaves, strict=True)]
        outputs.append(tuple(lowering.resharded(leave, at, body) for leave, at in pairs))
    programs.shardings.update({v: s or _whole(v) for v, s in known.items()})
    return replace(schedule, body=tuple(body), outputs=tuple(outputs))


def explained(error: ValueError, name: str, num_devices: int) -> ValueError:
    """What to do about a program that JAX refuses to compile; the same error if that is unknown."""
    if "ordered effects are not supported" in str(error):
        return ValueError(
            f"{name} has ordered effects that JAX keeps in order on one device only, but runs on {num_devices} devices: "
            f"{error}. Use jax.experimental.io_callback(..., ordered=True), or ordered=False, or a placement of one device"
        )
    return error


def _whole(value: Value) -> NamedSharding:
    return NamedSharding(value.placement.mesh, PartitionSpec())


class _Lowering:
    """`known` holds the sharding of each value, None while its reader may choose; `logical` the axes that were declared."""

    def __init__(
        self, programs: Programs, known: dict[Value, NamedSharding | None], logical: dict[Value, PartitionSpec]
    ):
        self.programs, self.known, self.logical = programs, known, logical
        self.numbers = itertools.count(1_000_000)
        self.to_shards: set[Value] = set()

    def line(
        self,
        instructions: Iterable[Instruction],
        fixed: dict[Value, NamedSharding],
        returns_to: dict[Value, Value],
    ) -> list[Instruction]:
        """Lowers a straight line: `fixed` prescribes shardings, `returns_to` pairs what leaves with what enters."""
        done: list[Instruction] = []
        instructions = list(instructions)
        self.to_shards |= _sent_to_shards(instructions)
        for i in instructions:
            if isinstance(i, Run):
                self.run(i, fixed, returns_to)
            elif isinstance(i, Move):
                self.move(i, fixed, returns_to)
            elif isinstance(i, Alloc):
                self.known.update(dict.fromkeys(i.results))
            elif isinstance(i, Loop):
                i = self.loop(i, done, fixed)
            done.append(i)
        for i in done:
            if isinstance(i, Move) and i.shares_devices:
                self.copy(i)
            elif isinstance(i, Alloc):
                self.alloc(i)
        return done

    def move(self, i: Move, fixed: dict[Value, NamedSharding], returns_to: dict[Value, Value]) -> None:
        for source, result in zip(i.sources, i.results, strict=True):
            enter = returns_to.get(result)
            prescribed = fixed.get(result) or (self.known[enter] if enter else None)
            self.known[result] = prescribed or (self.known[source] if i.is_copy else self.moved(source, result))
            if enter and self.known[enter] is None:
                self.known[enter] = self.known[result]

    def resharded(self, value: Value, at: NamedSharding, into: list[Instruction]) -> Value:
        """The value with the sharding `at`: itself, or a copy that replaces it, appended to `into`."""
        if _same(at, self.known[value] or at, value):
            self.known[value] = self.known[value] or at
            return value
        copy = Value(next(self.numbers), value.aval, value.placement, value.label)
        self.known[copy] = at
        move = Move((value,), (copy,))
        self.copy(move)
        into.append(move)
        return copy

    def moved(self, source: Value, result: Value) -> NamedSharding | None:
        """The sharding that a Move gives, or None if its reader shall choose."""
        if source in self.logical:
            self.logical[result] = self.logical[source]
            return result.placement.sharding(self.logical[source], result.aval.shape)
        if result.placement.mesh.size == 1:
            return _whole(result)
        at = self.known[source]
        if at is None or source.placement.mesh.size == 1:
            return None
        return result.placement.sharding(source.placement.logical(at), result.aval.shape)

    def loop(self, i: Loop, before: list[Instruction], fixed: dict[Value, NamedSharding]) -> Loop:
        soft = {
            v for r in before if isinstance(r, Run) and not r.fragments for v in r.outputs if v not in fixed
        }  # glue such as jnp.zeros has no opinion on its sharding; the loop has
        for c in i.carry:
            split = c.init.placement.mesh.size > 1
            self.known[c.enter] = fixed.get(c.result) or (None if c.init in soft and split else self.known[c.init])
            if c.init in self.logical:
                self.logical[c.enter] = self.logical[c.init]
        for v in i.indices:
            self.known[v] = _whole(v)
        body = self.line(i.body, {}, {c.leave: c.enter for c in i.carry})
        carry = []
        wanted: dict[Value, NamedSharding] = {}
        for c in i.carry:
            at = self.known[c.enter] or self.known[c.leave] or _whole(c.enter)
            self.known[c.enter] = self.known[c.result] = at
            leave = self.resharded(c.leave, at, body)
            init = c.init
            if init in soft and not _same(at, self.known[init] or at, init):
                wanted[init] = at
            else:
                init = self.resharded(init, at, before)
            carry.append(Carry(init, c.enter, leave, c.result))
        for r in before:
            if isinstance(r, Run) and any(v in wanted for v in r.outputs):
                self.run(r, {**fixed, **wanted}, {})
        return replace(i, carry=tuple(carry), body=tuple(body))

    def run(self, i: Run, fixed: dict[Value, NamedSharding], returns_to: dict[Value, Value]) -> None:
        values = [*([i.index] if i.index else []), *i.reads()]
        results = i.makes()
        single = i.placement.mesh.size == 1
        if single or not any(self.known[v] for v in values):
            for v in values:
                self.known[v] = self.known[v] or _whole(v)
        pairs = {**returns_to, **{leave: enter for enter, leave in i.writes}}

        def spec(v: Value) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=self.known[v])

        def prescribed(v: Value) -> NamedSharding | None:
            if v in fixed:
                return fixed[v]
            if v in pairs and self.known[pairs[v]] is not None:
                return self.known[pairs[v]]
            return _whole(v) if single or not values else scattered.get(v)

        scattered: dict[Value, NamedSharding] = {}
        key = (signature(i.jaxpr), len(i.outputs), i.rows, bool(i.index))
        while True:
            out = tuple(prescribed(v) for v in results)
            first = 1 if i.index else 0
            donate = [first + k for k in self.reusable(i, out)]
            donate += [first + len(i.inputs) + k for k in range(len(i.writes))]
            compiled = self.programs.compile(key, body(i), [spec(v) for v in values], donate, out)
            chosen = list(compiled.input_shardings[0])
            made = list(compiled.output_shardings)
            for v, s in zip(values, chosen, strict=True):
                self.known[v] = self.known[v] or _named(s, v)
            wrong = [
                v for v, s in zip(results, made, strict=True)
                if v in pairs and self.known[pairs[v]] is not None and not _same(self.known[pairs[v]], s, v)
            ]  # fmt: skip
            # What only shards of another placement read need not be whole anywhere: a sum is then scattered as it is made.
            whole = [v for v, s in zip(results, made, strict=True) if v not in pairs and not any(_named(s, v).spec)]
            split = {v: _scattered(v) for v in whole if v in self.to_shards and v not in fixed and v not in scattered}
            split = {v: s for v, s in split.items() if any(s.spec)}
            scattered |= split
            if not wrong and not split:
                break
        for v, s in zip(results, made, strict=True):
            self.known[v] = prescribed(v) or _named(s, v)
            if v in pairs and self.known[pairs[v]] is None:
                self.known[pairs[v]] = self.known[v]
        self.programs.compiled[i] = compiled

    def reusable(self, i: Run, out: Sequence[NamedSharding | None]) -> Iterator[int]:
        """The donated inputs for which there is a result of the same size on each device."""
        room = [(v.aval.shape, v.aval.dtype, s) for v, s in zip(i.outputs, out, strict=False)]
        open_choice = None in out
        for k in i.donated:
            value, at = i.inputs[k], self.known[i.inputs[k]]
            for place in room:
                if place[:2] == (value.aval.shape, value.aval.dtype) and (open_choice or place[2] == at):
                    room.remove(place)
                    yield k
                    break

    def copy(self, i: Move) -> None:
        """Compiles the copy that a Move makes on the spot, or after a transfer that may have shared memory."""
        taken = i.sources if i.is_copy else i.results
        args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=self.known[v] or _whole(v)) for v in taken]
        out = tuple(self.known[v] or _whole(v) for v in i.results)
        self.programs.compiled[i] = self.programs.compile("copy", _copy, args, (), out)

    def alloc(self, i: Alloc) -> None:
        out = tuple(self.known[v] or _whole(v) for v in i.results)
        kinds = tuple((v.aval.shape, v.aval.dtype) for v in i.results)

        def empty():
            return tuple(jax.lax.empty(shape, dtype) for shape, dtype in kinds)

        self.programs.compiled[i] = self.programs.compile(("alloc", kinds), empty, (), (), out)


def _sent_to_shards(instructions: Iterable[Instruction]) -> set[Value]:
    """Values that nothing reads but moves to placements that keep shards."""
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


def _copy(*xs):
    return tuple(x.copy() for x in xs)


def _named(sharding: object, value: Value) -> NamedSharding:
    if isinstance(sharding, NamedSharding) and sharding.mesh == value.placement.mesh:
        return NamedSharding(value.placement.mesh, sharding.spec)
    return _whole(value)


def _same(wanted: NamedSharding | None, got: object, value: Value) -> bool:
    return wanted is not None and wanted.is_equivalent_to(_named(got, value), len(value.aval.shape))


def body(run: Run) -> Callable:
    """The function that a Run compiles: reads its rows, evaluates its jaxpr, writes its rows.

    Args:
      run: the instruction.

    Returns:
      A function of the row number (if the Run has one), its inputs and its buffers.
    """
    evaluate = jaxpr_as_fun(run.jaxpr)

    def fn(*args):
        index, *args = args if run.index is not None else (None, *args)
        inputs, buffers = list(args[: len(run.inputs)]), args[len(run.inputs) :]
        for k in run.rows:
            inputs[k] = jax.lax.dynamic_index_in_dim(inputs[k], index, 0, keepdims=False)
        results = evaluate(*inputs)
        outputs, rows = results[: len(run.outputs)], results[len(run.outputs) :]
        stored = [
            jax.lax.dynamic_update_index_in_dim(b, row, index, 0) for b, row in zip(buffers, rows, strict=True)
        ]
        return (*outputs, *stored)

    fn.__name__ = "".join(c if c.isalnum() else "_" for c in run.name)[:80]  # the program's name in profiles
    return fn


def signature(closed: ClosedJaxpr) -> Hashable:
    """A key that two jaxprs share exactly if they are the same program up to the names of variables.

    Args:
      closed: a closed jaxpr without constants.

    Returns:
      A hashable value.
    """
    return _signature(closed.jaxpr)


def _signature(jaxpr: Jaxpr) -> Hashable:
    numbers: dict[Var, int] = {}

    def atom(a) -> Hashable:
        if isinstance(a, Literal):
            return "literal", str(a.aval), repr(a.val)
        if is_dropped(a):
            return "dropped", str(a.aval)
        return numbers.setdefault(a, len(numbers)), str(a.aval)

    def param(p) -> Hashable:
        if isinstance(p, ClosedJaxpr):
            return _signature(p.jaxpr), tuple(id(c) for c in p.consts)
        if isinstance(p, Jaxpr):
            return _signature(p)
        if isinstance(p, tuple | list):
            return tuple(map(param, p))
        try:
            hash(p)
        except TypeError:
            return "object", id(p)
        return p

    names = ("name", "debug_info")
    return (
        tuple(map(atom, [*jaxpr.constvars, *jaxpr.invars])),
        tuple(
            (
                e.primitive,
                tuple(map(atom, e.invars)),
                tuple(map(atom, e.outvars)),
                tuple((k, param(v)) for k, v in sorted(e.params.items()) if k not in names),
            )
            for e in jaxpr.eqns
        ),
        tuple(map(atom, jaxpr.outvars)),
    )
