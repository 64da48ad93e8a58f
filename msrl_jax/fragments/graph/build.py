"""Builds the graph of a traced training iteration: where each equation runs, and which loops the host runs."""

from collections.abc import Mapping, Sequence

import jax
from jax.sharding import PartitionSpec

from msrl_jax._compat import (
    Atom,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval,
    call_body,
    cond_p,
    drop_unused,
    is_reference,
    new_var,
    scan_p,
    scan_parts,
    sub_jaxprs,
    while_p,
)
from msrl_jax.fragments.graph.marker import is_fragment, is_host_call
from msrl_jax.fragments.graph.nodes import Graph, Node, Region
from msrl_jax.fragments.placement import HOST, Layout, Placement


def build_graph(closed: ClosedJaxpr, layout: Layout, labels: Sequence[str], axes: Sequence[PartitionSpec]) -> Graph:
    """Builds the graph of a traced training iteration, the jaxpr of `state -> (state, metrics)`.

    Calls that span placements (a fragment that contains fragments of another placement, a `jit`) are inlined; scans that span
    placements are opened; a `cond`, `while` or other primitive that spans placements raises ValueError. `labels` and `axes`
    are the names and the logical axes of the state's leaves.
    """
    builder = _Builder(layout)
    jaxpr = drop_unused(closed.jaxpr)
    consts = [builder.add_constant(c) for c in closed.consts]
    state = [new_var(v) for v in jaxpr.invars]
    builder.labels.update(zip(state, labels, strict=True))
    nodes: list[Node] = []
    outputs = builder.inline(jaxpr, [*consts, *state], None, nodes)
    region = Region(list(builder.constants), state, [], nodes, outputs[: len(state)], outputs[len(state) :])
    return Graph(region, builder.constants, builder.labels, list(axes))


def append_inlined(closed: ClosedJaxpr, args: Sequence[Atom], placement: Placement, out: list[Node]) -> list[Var]:
    """Appends code without fragments and captured arrays as nodes at a placement; returns its results."""
    assert not closed.consts, "the code captures arrays"
    builder = _Builder(Layout({}))
    results = builder.inline(closed.jaxpr, args, placement, out)
    assert all(isinstance(a, Var) and a not in args for a in results)
    return [a for a in results if isinstance(a, Var)]


class _Builder:
    def __init__(self, layout: Layout):
        self.layout = layout
        self.constants: dict[Var, object] = {}
        self.labels: dict[Var, str] = {}
        self._marks: dict[int, tuple[Jaxpr, list[tuple[str, str]]]] = {}
        self._labelled: dict[tuple[int, tuple[str, ...]], tuple[Jaxpr, list[str]]] = {}

    def add_constant(self, value: object) -> Var:
        var = Var(jax.typeof(value))
        self.constants[var] = value
        self.labels[var] = "captured constant"
        return var

    def find_marks(self, eqn: JaxprEqn) -> list[tuple[str, str]]:
        """Returns the names and roles of the fragments in an equation, in order of appearance."""
        fragments = [(eqn.params["name"], eqn.params["role"])] if is_fragment(eqn) else []
        for sub in sub_jaxprs(eqn):
            if id(sub) not in self._marks:  # the entry keeps the jaxpr alive, so that its id stays unique
                self._marks[id(sub)] = sub, list(dict.fromkeys(mark for e in sub.eqns for mark in self.find_marks(e)))
            fragments += self._marks[id(sub)][1]
        return list(dict.fromkeys(fragments))

    def inline(
        self, jaxpr: Jaxpr, args: Sequence[Atom], home: Placement | None, out: list[Node], role: str | None = None
    ) -> list[Atom]:
        """Appends the nodes of `jaxpr` to `out`; returns its outputs. Unmarked code gets `home` and `role`."""
        env: dict[Var, Atom] = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
        for eqn in jaxpr.eqns:
            marks = self.find_marks(eqn)
            placements: dict[Placement, str] = {}  # the placements that its fragments need, each with one such fragment
            for name, fragment_role in marks:
                placements.setdefault(self.layout.placement(fragment_role, name), f"{name!r} (role {fragment_role!r})")
            ins = [a if isinstance(a, Literal) else env[a] for a in eqn.invars]
            if not placements and any(map(is_reference, eqn.outvars)):
                raise ValueError(
                    f"code outside of fragments makes a mutable reference (`{eqn.primitive.name}`), which programs on several "
                    "placements cannot share; carry its value through the loop instead"
                )
            if eqn.primitive is scan_p and scan_parts(eqn).length == 0:
                env.update(zip(eqn.outvars, self.scan_of_no_steps(eqn, ins, home, out), strict=True))
                continue
            opened = not is_host_call(eqn) and (len(placements) > 1 or any(p.name == HOST for p in placements))
            if opened:
                body = eqn.params["call_jaxpr"] if is_fragment(eqn) else call_body(eqn)
                if body is not None:
                    body_home, body_role = home, role
                    if is_fragment(eqn):
                        body_role = eqn.params["role"]
                        body_home = self.layout.placement(body_role, eqn.params["name"])
                    constants = [self.add_constant(c) for c in body.consts]
                    env.update(
                        zip(eqn.outvars, self.inline(body.jaxpr, [*constants, *ins], body_home, out, body_role), strict=True)
                    )
                    continue
            outs = [new_var(v) for v in eqn.outvars]
            env.update(zip(eqn.outvars, outs, strict=True))
            placed = eqn.replace(invars=ins, outvars=outs)
            names = tuple(dict.fromkeys(name for name, _ in marks))
            roles = frozenset(fragment_role for _, fragment_role in marks)
            if role is not None and len(placements) != 1:
                roles |= {role}
            if opened:
                node = Node(placed, None, names, roles, self.open_scan(placed, placements, home, role))
            else:
                node = Node(placed, next(iter(placements), home), names, roles)
            out.append(node)
            self.add_labels(node)
        return [a if isinstance(a, Literal) else env[a] for a in jaxpr.outvars]

    def open_scan(self, eqn: JaxprEqn, placements: dict[Placement, str], home: Placement | None, role: str | None) -> Region:
        """Returns the body of a scan that spans placements, as a region."""
        if eqn.primitive is not scan_p:
            raise ValueError(_span_error(eqn, placements))
        closed, num_consts, num_carry, length, reverse = scan_parts(eqn)
        jaxpr = drop_unused(closed.jaxpr)
        args = [new_var(v) for v in jaxpr.invars]
        constants = [self.add_constant(c) for c in closed.consts]
        outer = [self.labels.get(a, "") if isinstance(a, Var) else "" for a in eqn.invars]
        self.labels.update({v: label for v, label in zip(args, outer, strict=True) if label})
        nodes: list[Node] = []
        outputs = self.inline(jaxpr, [*constants, *args], home, nodes, role)
        carry, xs = args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]
        return Region(args[:num_consts], carry, xs, nodes, outputs[:num_carry], outputs[num_carry:], length, reverse)

    def scan_of_no_steps(self, eqn: JaxprEqn, ins: Sequence[Atom], home: Placement | None, out: list[Node]) -> list[Atom]:
        """Returns the results of a scan of length 0: the initial carry, and stacks without rows."""
        _, num_consts, num_carry, _, _ = scan_parts(eqn)
        kinds = [aval(v) for v in eqn.outvars[num_carry:]]
        closed = jax.make_jaxpr(lambda: [jax.lax.empty(kind.shape, kind.dtype) for kind in kinds])()
        return [*ins[num_consts : num_consts + num_carry], *self.inline(closed.jaxpr, [], home, out)]

    def add_labels(self, node: Node) -> None:
        if node.loop is not None:
            labels = [_label(a, self.labels) for a in [*node.loop.next_carry, *node.loop.results]]
        else:
            labels = self.output_labels(node.eqn, self.labels)
        self.labels.update(zip(node.eqn.outvars, labels, strict=True))

    def output_labels(self, eqn: JaxprEqn, labels: Mapping[Var, str]) -> list[str]:
        """Returns the name of each result of an equation: its path in the fragment that makes it, otherwise the first named
        input.
        """
        if is_fragment(eqn):
            paths = eqn.params["call_jaxpr"].jaxpr.debug_info.result_paths or [""] * len(eqn.outvars)
            return [f"{eqn.params['name']}(){path}" for path in paths]
        body = scan_parts(eqn).body if eqn.primitive is scan_p else call_body(eqn)
        outer = tuple(_label(a, labels) for a in eqn.invars)
        if body is None:
            return [next(filter(None, outer), eqn.primitive.name)] * len(eqn.outvars)
        key = (id(body.jaxpr), outer)
        if key not in self._labelled:  # the entry keeps the jaxpr alive, so that its id stays unique
            inner = dict(zip(body.jaxpr.invars, outer, strict=True))
            for e in body.jaxpr.eqns:
                inner.update(zip(e.outvars, self.output_labels(e, inner), strict=True))
            self._labelled[key] = body.jaxpr, [_label(a, inner) for a in body.jaxpr.outvars]
        return self._labelled[key][1]


def _label(atom: Atom, labels: Mapping[Var, str]) -> str:
    return labels.get(atom, "") if isinstance(atom, Var) else f"{atom.val}"


def _span_error(eqn: JaxprEqn, placements: dict[Placement, str]) -> str:
    places = "; ".join(f"fragment {f} runs at {p}" for p, f in placements.items())
    kind = {cond_p: "`cond`", while_p: "`while` loop"}.get(eqn.primitive, f"`{eqn.primitive.name}`")
    remedies = {
        cond_p: "compute both branches and select with jnp.where",
        while_p: "use jax.lax.scan or fori_loop with a fixed length",
    }
    remedy = remedies.get(eqn.primitive, "call the fragments outside it")
    if any(p.name == HOST for p in placements):
        return f"a {kind} holds calls of the host: {places}. A program cannot wait for them in it; {remedy}"
    return (
        f"a {kind} spans placements: {places}. The host would have to read the device at every step. "
        f"Either {remedy}, or choose a policy that places these roles together, such as GPUOnly()"
    )
