"""Lowering: compiles every program of a schedule once, and lets shardings flow from each program to the next.

Inputs of the iteration have declared logical axes. A program's results have the shardings that XLA propagated. A Move
carries a sharding over by its logical axes. Where nothing is known (a value made on a single device) the program that
reads the value chooses: XLA propagates shardings to parameters too.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import jax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._compat import ClosedJaxpr, Jaxpr, Literal, Var, is_dropped, jaxpr_as_fun
from msrl_jax.fragments.instructions import Alloc, Instruction, Loop, Move, Run, Schedule, Value


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
            self._cache[key] = jitted.lower(*args).compile()
            self.seconds += time.perf_counter() - start
            self.count += 1
        return self._cache[key]


def lower(schedule: Schedule, axes: Sequence[PartitionSpec], programs: Programs) -> None:
    """Compiles a schedule.

    Args:
      schedule: the instructions.
      axes: logical axes of each state leaf (and register).
      programs: receives the compiled programs and the shardings of all values.

    Raises:
      ValueError: if a carried value would change its sharding from one time to the next.
    """
    logical = {v: spec for copies, spec in zip(schedule.inputs, axes, strict=True) for v in copies}
    inputs = {v: v.placement.sharding(spec, v.aval.shape) for v, spec in logical.items()}
    known: dict[Value, NamedSharding | None] = dict(inputs)
    for value in schedule.constants:
        known[value] = _whole(value)
    fixed = {
        leave: inputs[enter]
        for enters, leaves in zip(schedule.inputs, schedule.outputs, strict=True)
        for enter, leave in zip(enters, leaves, strict=True)
    }
    _Lowering(programs, known, logical).line(schedule.body, fixed, {})
    for enters, leaves in zip(schedule.inputs, schedule.outputs, strict=True):
        for enter, leave in zip(enters, leaves, strict=True):
            if known[enter] != known[leave]:
                raise ValueError(
                    f"state leaf {enter.label} is sharded as {known[enter]} before an iteration but takes the value of "
                    f"{leave.label}, sharded as {known[leave]}; give both the same logical axes in `axes`"
                )
    programs.shardings.update({v: s or _whole(v) for v, s in known.items()})


def _whole(value: Value) -> NamedSharding:
    return NamedSharding(value.placement.mesh, PartitionSpec())


class _Lowering:
    """`known` holds the sharding of each value, None while its reader may choose; `logical` the axes that were declared."""

    def __init__(
        self, programs: Programs, known: dict[Value, NamedSharding | None], logical: dict[Value, PartitionSpec]
    ):
        self.programs, self.known, self.logical = programs, known, logical

    def line(
        self,
        instructions: Iterable[Instruction],
        fixed: dict[Value, NamedSharding],
        returns_to: dict[Value, Value],
    ) -> None:
        """Lowers a straight line: `fixed` prescribes shardings, `returns_to` pairs what leaves with what enters."""
        instructions = list(instructions)
        for i in instructions:
            if isinstance(i, Run):
                self.run(i, fixed, returns_to)
            elif isinstance(i, Move):
                for source, result in zip(i.sources, i.results, strict=True):
                    enter = returns_to.get(result)
                    self.known[result] = fixed.get(result) or (self.known[enter] if enter else None)
                    self.known[result] = self.known[result] or self.moved(source, result)
                    if enter and self.known[enter] is None:
                        self.known[enter] = self.known[result]
            elif isinstance(i, Alloc):
                self.known.update(dict.fromkeys(i.results))
            elif isinstance(i, Loop):
                self.loop(i, instructions, fixed)
        for i in instructions:
            if isinstance(i, Move) and i.shares_devices:
                self.copy(i)
            elif isinstance(i, Alloc):
                self.alloc(i)

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

    def loop(self, i: Loop, line: Sequence[Instruction], fixed: dict[Value, NamedSharding]) -> None:
        soft = {
            v for r in line if isinstance(r, Run) and not r.fragments for v in r.outputs if v not in fixed
        }  # glue such as jnp.zeros has no opinion on its sharding; the loop has
        for c in i.carry:
            size = c.init.placement.mesh.size
            self.known[c.enter] = None if c.init in soft and size > 1 else self.known[c.init]
            if c.init in self.logical:
                self.logical[c.enter] = self.logical[c.init]
        for v in i.indices:
            self.known[v] = _whole(v)
        self.line(i.body, {}, {c.leave: c.enter for c in i.carry})
        wanted: dict[Value, NamedSharding] = {}
        for c in i.carry:
            at = self.known[c.enter] or self.known[c.leave] or _whole(c.enter)
            self.known[c.enter] = self.known[c.result] = at
            leave = self.known[c.leave] or at
            if leave != at:
                raise ValueError(
                    f"a loop carries {c.enter.label} ({c.enter.aval.str_short()}) sharded as {at.spec} in and "
                    f"{leave.spec} out at placement {c.enter.placement.name!r}; initialise it from an array sharded like "
                    "what replaces it, or declare its logical axes"
                )
            if self.known[c.init] != at:
                wanted[c.init] = at
            self.known[c.init] = at
        for r in line:
            if isinstance(r, Run) and any(v in wanted for v in r.outputs):
                self.run(r, {**fixed, **wanted}, {})

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
            return _whole(v) if single or not values else None

        first = 1 if i.index else 0
        donate = [first + k for k in i.donated] + [first + len(i.inputs) + k for k in range(len(i.writes))]
        key = (signature(i.jaxpr), len(i.outputs), i.rows, bool(i.index))
        while True:
            out = tuple(prescribed(v) for v in results)
            compiled = self.programs.compile(key, body(i), [spec(v) for v in values], donate, out)
            chosen = list(compiled.input_shardings[0])
            made = list(compiled.output_shardings)
            for v, s in zip(values, chosen, strict=True):
                self.known[v] = self.known[v] or _named(s, v)
            wrong = [
                v for v, s in zip(results, made, strict=True)
                if v in pairs and self.known[pairs[v]] is not None and not _same(self.known[pairs[v]], s, v)
            ]  # fmt: skip
            if not wrong:
                break
        for v, s in zip(results, made, strict=True):
            self.known[v] = prescribed(v) or _named(s, v)
            if v in pairs and self.known[pairs[v]] is None:
                self.known[pairs[v]] = self.known[v]
        self.programs.compiled[i] = compiled

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
