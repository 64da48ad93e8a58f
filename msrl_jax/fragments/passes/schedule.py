"""Scheduling: turns a partition into the instruction list, with one Move per value and destination.

An iteration that scans `act` and `step`, which are on different placements, and passes the stacked results to `learn` becomes

    Alloc       memory for the stacked results
    Loop        of the body:
      RunProgram  act
      Move        its action
      RunProgram  step, which writes its results to the current row of that memory
      Move        its observation
    Move        the stacked results
    RunProgram  learn
"""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
from jax.sharding import Mesh

from msrl_jax._compat import Atom, Literal, ShapedArray, Var, aval, make_jaxpr_of
from msrl_jax.fragments.codecs import get
from msrl_jax.fragments.graph.nodes import Graph, Node, Packed
from msrl_jax.fragments.passes.grouping import ProgramNodes
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
)
from msrl_jax.fragments.passes.placing import Partition
from msrl_jax.fragments.passes.stacked_rows import ResultBuffer, StackedRow, read_row, write_row
from msrl_jax.fragments.placement import Placement, one_per_mesh


def schedule(partition: Partition, graph: Graph, default: Placement) -> Schedule:
    """Turns the partition of a training iteration into instructions, without donations, copies and frees.

    Literals that no program reads are at the placement `default`.
    """
    region, factory = graph.region, _ValueFactory(graph.labels, graph.packed)
    scheduler = _RegionScheduler(partition, factory, default)
    scalars = [v for _, check_scalars in graph.checks for v in check_scalars]
    scheduler.read_later([*region.results, *scalars])
    inputs: list[tuple[Value, ...]] = []
    for var, carry_placements in zip(region.carry, partition.carry_placements, strict=True):
        inputs.append(tuple(scheduler.define(var, p) for p in carry_placements))
    for var in region.consts:
        for p in partition.needed_at[var]:
            if (var, p.mesh) not in scheduler.table:
                factory.constants[scheduler.define(var, p)] = graph.constants[var]
    scheduler.emit_all()
    pairs = zip(region.next_carry, partition.carry_placements, strict=True)
    outputs = tuple(tuple(scheduler.value_at(a, p) for p in carry_placements) for a, carry_placements in pairs)
    metrics = tuple(scheduler.value_anywhere(a) for a in region.results)
    value_of = scheduler.value_anywhere
    checks = tuple((check, (value_of(ok), value_of(low), value_of(high))) for check, (ok, low, high) in graph.checks)
    scheduler.emit_moves()
    return Schedule(tuple(inputs), tuple(scheduler.instructions), outputs, metrics, checks, factory.constants)


class _ValueFactory:
    """Makes values with distinct numbers, and collects the constants of the whole program."""

    def __init__(self, labels: Mapping[Var, str], packed: Mapping[Var, Packed]):
        self.labels, self.packed = labels, packed
        self.constants: dict[Value, object] = {}
        self._literals: dict[tuple[bytes, str, Mesh], Value] = {}
        self._count = itertools.count()

    def new(self, kind: ShapedArray, placement: Placement, label: str, packed: Packed | None = None) -> Value:
        return Value(next(self._count), kind, placement, label, packed)

    def literal(self, literal: Literal, placement: Placement) -> Value:
        key = (np.asarray(literal.val).tobytes(), str(literal.aval), placement.mesh)
        if key not in self._literals:
            value = self.new(aval(literal), placement, f"literal {literal.val}")
            self.constants[value] = np.asarray(literal.val, aval(literal).dtype)
            self._literals[key] = value
        return self._literals[key]


def _delta_codec(value: Value) -> str:
    """Returns the name of a value's codec, if it sends changes and therefore needs its own Move."""
    codec = get(value.packed.edge.codec) if value.packed else None
    return codec.name if codec and codec.changes else ""


class _RegionScheduler:
    """Schedules one region; `table` has the value of each variable on each mesh."""

    def __init__(
        self, partition: Partition, factory: _ValueFactory, default: Placement, stacked: Iterable[tuple[Atom, Placement]] = ()
    ):
        self.partition, self.factory, self.default = partition, factory, default
        self.table: dict[tuple[Var, Mesh], Value | StackedRow] = {}
        self.instructions: list[Instruction] = []
        self.indices: dict[Mesh, Value] = {}
        self.writes: dict[tuple[Var, Mesh], list[tuple[Value, Value]]] = {}
        self._inherited = {*partition.region.consts, *partition.region.carry, *partition.region.xs}
        self._has_host_calls = any(node.is_host_call for node in partition.region.nodes)
        self._moves: dict[tuple[Mesh, Mesh], list[tuple[Value, Value]]] = {}
        self._read_from = self._find_readers(stacked)

    def define(self, var: Var, placement: Placement) -> Value:
        """Makes the value of a variable on the mesh of a placement."""
        value = self.factory.new(aval(var), placement, self.factory.labels.get(var, ""), self.factory.packed.get(var))
        self.table[var, placement.mesh] = value
        return value

    def supplier(self, var: Var, placement: Placement) -> Placement:
        """Returns the placement that supplies a variable to `placement`: one on the same mesh if possible, else the first."""
        suppliers = self.partition.available_at.get(var) or self.partition.needed_at.get(var) or [placement]
        return next((p for p in suppliers if p.mesh == placement.mesh), suppliers[0])

    def value_at(self, atom: Atom, placement: Placement) -> Value:
        """Returns the value at a placement, moved there if need be."""
        entry = self.lookup(atom, placement)
        return self.emit_row_read(entry, placement) if isinstance(entry, StackedRow) else entry

    def lookup(self, atom: Atom, placement: Placement) -> Value | StackedRow:
        """Returns the value, or the row that is the value, at a placement; requests a move there if need be."""
        if isinstance(atom, Literal):
            return self.factory.literal(atom, placement)
        entry = self.table.get((atom, placement.mesh))
        if entry is None:
            home = self.supplier(atom, placement)
            source = self.table[atom, home.mesh]
            source = self.emit_row_read(source, home) if isinstance(source, StackedRow) else source
            entry = self.define(atom, placement)
            self._moves.setdefault((home.mesh, placement.mesh), []).append((source, entry))
        return entry

    def value_anywhere(self, atom: Atom) -> Value:
        """Returns the value at the default placement if it is made there, else at another placement that makes it."""
        if isinstance(atom, Literal):
            return self.factory.literal(atom, self.default)
        return self.value_at(atom, self.supplier(atom, self.default))

    def emit_moves(self) -> None:
        """Emits the requested moves, one Move for each pair of meshes."""
        for pairs in self._moves.values():
            groups: dict[str, list[tuple[Value, Value]]] = {}
            for pair in pairs:
                groups.setdefault(_delta_codec(pair[1]), []).append(pair)
            for group in groups.values():
                sources, results = zip(*group, strict=True)
                self.instructions.append(Move(sources, results))
        self._moves.clear()

    def row_number(self, placement: Placement) -> Value:
        """Returns the number of the current row, on the mesh of a placement."""
        if placement.mesh not in self.indices:
            self.indices[placement.mesh] = self.factory.new(ShapedArray((), np.dtype(np.int32)), placement, "row number")
        return self.indices[placement.mesh]

    def emit_row_read(self, row: StackedRow, placement: Placement) -> Value:
        """Emits a separate program that reads the current row, for readers that cannot read it themselves."""
        value = self.factory.new(row.aval, placement, row.stacked.label)
        self.emit_moves()
        self.instructions.append(read_row(row, value, self.row_number(placement)))
        return value

    def emit_all(self) -> None:
        """Emits the instructions of all groups, in order."""
        for group in self.partition.groups:
            if group.placement is None:
                self.emit_loop(group)
            elif group.is_host_call:
                self.emit_host_call(group.nodes[0], group.placement)
            else:
                self.emit_program(group, group.placement)

    def emit_program(self, group: ProgramNodes, placement: Placement) -> None:
        """Emits the program of a group, which reads its rows and writes the rows of stacked results that it makes."""
        eqns = [n.eqn for n in group.nodes]
        results = dict.fromkeys(v for e in eqns for v in e.outvars)
        reads = dict.fromkeys(a for e in eqns for a in e.invars if isinstance(a, Var) and a not in results)
        if not self._has_host_calls:  # or this would wait for other host calls
            reads.update(dict.fromkeys(v for v, mesh in self.writes if mesh == placement.mesh and v in self._inherited))
        entries = {a: self.lookup(a, placement) for a in reads}
        self.emit_moves()
        rows = tuple(i for i, e in enumerate(entries.values()) if isinstance(e, StackedRow))
        inputs = tuple(e.stacked if isinstance(e, StackedRow) else e for e in entries.values())
        exported = [v for v in results if self._read_from.get((v, placement), set()) - {group}]
        outputs = tuple(self.define(v, placement) for v in exported)
        written = [(v, pair) for v in [*results, *reads] for pair in self.writes.pop((v, placement.mesh), ())]
        fragments = tuple(dict.fromkeys(f for n in group.nodes for f in n.fragments))
        name = "+".join(dict.fromkeys(n.title for n in group.nodes if n.title)) or "glue"
        self.instructions.append(
            RunProgram(
                name,
                placement,
                make_jaxpr_of(eqns, list(entries), [*exported, *(v for v, _ in written)], name),
                inputs,
                outputs,
                rows,
                tuple(pair for _, pair in written),
                self.row_number(placement) if rows or written else None,
                (),
                fragments,
                frozenset().union(*(n.roles for n in group.nodes)),
            )
        )

    def emit_host_call(self, node: Node, placement: Placement) -> None:
        """Emits a call of the host."""
        inputs = tuple(self.value_at(a, placement) for a in node.eqn.invars)
        self.emit_moves()
        outputs = tuple(self.define(v, placement) for v in node.eqn.outvars)
        self.instructions.append(HostCall(node.title, placement, node.eqn.params["host"], inputs, outputs))

    def emit_loop(self, group: ProgramNodes) -> None:
        """Emits a Loop, whose body is scheduled as a separate region, after allocating its stacked results."""
        (node,) = group.nodes
        inner = self.partition.loops[node]
        region = inner.region
        num_consts, num_carry = len(region.consts), len(region.carry)
        consts, init, xs = (
            node.eqn.invars[:num_consts],
            node.eqn.invars[num_consts : num_consts + num_carry],
            node.eqn.invars[num_consts + num_carry :],
        )
        stacked = self.stacked_results(node, inner)
        body = _RegionScheduler(inner, self.factory, self.default, [(atom, p) for _, atom, p in stacked])
        outer: dict[Value, None] = {}
        for var, atom in zip([*region.consts, *region.xs], [*consts, *xs], strict=True):
            for p in inner.needed_at[var]:
                value = self.value_at(atom, p)
                outer[value] = None
                body.table[var, p.mesh] = StackedRow(value) if var in region.xs else value
        before: list[tuple[Value, Value, Value]] = []  # init, body_in and result of each `LoopCarry`
        for var, atom, result, placements in zip(
            region.carry, init, node.eqn.outvars[:num_carry], inner.carry_placements, strict=True
        ):
            before += [(self.value_at(atom, p), body.define(var, p), self.define(result, p)) for p in placements]
        buffers = [self.make_buffer(var, atom, p, body) for var, atom, p in stacked]
        self.emit_moves()
        starts = [b.carry.init for b in buffers]
        for mesh in dict.fromkeys(v.placement.mesh for v in starts):
            self.instructions.append(Alloc(tuple(v for v in starts if v.placement.mesh == mesh)))
        body.emit_all()
        for b in buffers:
            body.emit_missing_write(b)
        pairs = zip(region.next_carry, inner.carry_placements, strict=True)
        after = [body.value_at(a, p) for a, placements in pairs for p in placements]
        body.emit_moves()
        carry = [LoopCarry(init, body_in, out, result) for (init, body_in, result), out in zip(before, after, strict=True)]
        carry += [b.carry for b in buffers]
        indices = tuple(body.indices.values())
        self.instructions.append(
            Loop(region.length, region.reverse, tuple(carry), tuple(outer), indices, tuple(body.instructions))
        )

    def stacked_results(self, node: Node, inner: Partition) -> list[tuple[Var, Atom, Placement]]:
        """Returns the stacked results of a loop that are read: (result, row in the body, placement)."""
        pairs = zip(node.eqn.outvars[len(inner.region.carry) :], inner.region.results, strict=True)
        return [(var, atom, p) for var, atom in pairs for p in one_per_mesh(p for v, p in self._read_from if v is var)]

    def make_buffer(self, var: Var, atom: Atom, placement: Placement, body: "_RegionScheduler") -> ResultBuffer:
        """Returns the buffer of the stacked result `var`, whose rows are `atom` in the body."""
        label = self.factory.labels.get(var, "")
        init, body_in, body_out = (self.factory.new(aval(var), placement, label) for _ in range(3))
        if isinstance(atom, Var):
            body.writes.setdefault((atom, placement.mesh), []).append((body_in, body_out))
        return ResultBuffer(LoopCarry(init, body_in, body_out, self.define(var, placement)), atom, placement)

    def emit_missing_write(self, buffer: ResultBuffer) -> None:
        """Emits a separate program that stores a row, if no program of this region has stored it."""
        if isinstance(buffer.row, Var) and buffer.pair not in self.writes.get((buffer.row, buffer.placement.mesh), ()):
            return
        entry = self.lookup(buffer.row, buffer.placement)
        self.emit_moves()
        self.instructions.append(write_row(buffer, entry, self.row_number(buffer.placement)))

    def read_later(self, atoms: Iterable[Atom]) -> None:
        """Records that these atoms are read after the region."""
        for atom in atoms:
            if isinstance(atom, Var):
                self._read_from.setdefault((atom, self.supplier(atom, self.default)), set()).add(None)

    def _find_readers(self, stacked: Iterable[tuple[Atom, Placement]]) -> dict[tuple[Var, Placement], set[ProgramNodes | None]]:
        """For each variable and the placement that supplies it, the groups that read it (None: code after the region)."""
        readers: dict[tuple[Var, Placement], set[ProgramNodes | None]] = {}

        def add_reader(atom: Atom, placement: Placement, reader: ProgramNodes | None) -> None:
            if isinstance(atom, Var):
                readers.setdefault((atom, self.supplier(atom, placement)), set()).add(reader)

        for group in self.partition.groups:
            for node in group.nodes:
                if group.placement is not None:
                    for atom in node.eqn.invars:
                        add_reader(atom, group.placement, group)
                    continue
                for atom, placements in zip(node.eqn.invars, self.partition.loops[node].inputs_at, strict=True):
                    for p in placements:
                        add_reader(atom, p, group)
        for atom, carry_placements in zip(self.partition.region.next_carry, self.partition.carry_placements, strict=True):
            for p in carry_placements:
                add_reader(atom, p, None)
        looped = {v for node in self.partition.loops for v in node.eqn.outvars}
        for atom, p in stacked:  # a program writes its own rows, but rows that a loop makes must be results of that loop
            if isinstance(atom, Var) and atom in looped:
                add_reader(atom, p, None)
        return readers
