"""Places or computes a state where a program keeps it, and refuses states and programs that memory cannot hold."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._background import in_background
from msrl_jax._compat import ClosedJaxpr, Jaxpr, ShapedArray, Var, jaxpr_as_fun, sub_jaxprs
from msrl_jax._device_memory import array_bytes, device_memory
from msrl_jax._threefry import lower
from msrl_jax.fragments.graph.marker import is_fragment
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.processes import is_global, transfer

Leaves = list[tuple[jax.Array, ...]]
"""The leaves of a state, each with its copies on the placements that keep one."""

LARGE = 2**24
"""Leaves of at least this many bytes are computed where they are kept; smaller ones are not worth a compilation."""


def put(flat: Sequence[Any], shardings: Sequence[tuple[NamedSharding, ...]], copy: bool) -> Leaves:
    """Copies leaves (NumPy arrays, or on any devices) to where they are kept; no two copies share memory.

    All memory is new if `copy`; if not, a leaf that is already in its place is not copied.
    """
    targets = [(i, s) for i, copies in enumerate(shardings) for s in copies]
    fresh: list[bool] = []
    seen: set[int] = set()
    for i, s in targets:
        x = flat[i]
        # A transfer may share memory with its source if they share a device, and one array may be several leaves.
        on_host = not is_global(x)
        shared = on_host or bool(x.sharding.device_set & s.device_set)
        fresh.append(shared and (copy or on_host or id(x) in seen or x.sharding != s))
        seen.add(id(x))
    arrays = [flat[i] for i, _ in targets]
    elsewhere = [k for k, (_, s) in enumerate(targets) if not is_global(arrays[k]) or arrays[k].sharding != s]
    if elsewhere:
        moved = transfer([arrays[k] for k in elsewhere], [targets[k][1] for k in elsewhere])
        for k, x in zip(elsewhere, moved, strict=True):
            arrays[k] = x
    by_mesh: dict[Any, list[int]] = {}
    for k, (_, s) in enumerate(targets):
        if fresh[k]:
            by_mesh.setdefault(s.mesh, []).append(k)
    for ks in by_mesh.values():
        out = [targets[k][1] for k in ks]
        for k, x in zip(ks, _copier(tuple(out))([arrays[k] for k in ks]), strict=True):
            arrays[k] = x
    it = iter(arrays)
    return [tuple(next(it) for _ in copies) for copies in shardings]


@functools.lru_cache(maxsize=128)  # making a new jitted function costs more than copying a small state
def _copier(out: tuple[NamedSharding, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda xs: [x.copy() for x in xs], out_shardings=list(out))


def constant_leaves(init: ClosedJaxpr) -> dict[int, Any]:
    """The leaves of a state that its initializer does not compute, such as NumPy arrays that it returns unchanged."""
    held = dict(zip(init.jaxpr.constvars, init.consts, strict=True))
    return {i: held[v] for i, v in enumerate(init.jaxpr.outvars) if isinstance(v, Var) and v in held}


def evaluate_leaves(init: ClosedJaxpr, args: Sequence[Any], numbers: Iterable[int]) -> list[Any]:
    """Evaluates some leaves of a state; XLA drops computations that only the others need."""
    flat = jaxpr_as_fun(init)(*args)
    return [flat[i] for i in numbers]


def compute_leaves(
    init: ClosedJaxpr, args: Sequence[Any], shardings: Mapping[int, tuple[NamedSharding, ...]]
) -> dict[int, tuple[jax.Array, ...]]:
    """Computes leaves of a state where they are kept, so that no device holds more than its part."""
    by_mesh: dict[Any, list[tuple[int, NamedSharding]]] = {}
    for i, copies in shardings.items():
        for sharding in copies:
            by_mesh.setdefault(sharding.mesh, []).append((i, sharding))
    found: dict[int, tuple[jax.Array, ...]] = dict.fromkeys(shardings, ())
    for mesh, targets in by_mesh.items():
        arguments = transfer(args, [NamedSharding(mesh, PartitionSpec())] * len(args))
        numbers = [i for i, _ in targets]
        out = [sharding for _, sharding in targets]
        arrays = jax.jit(lambda *xs, numbers=numbers: evaluate_leaves(init, xs, numbers), out_shardings=out)(*arguments)
        for i, array in zip(numbers, arrays, strict=True):
            found[i] += (array,)
    return found


def state_bytes(avals: Sequence[Any], shardings: Sequence[tuple[NamedSharding, ...]]) -> dict[Device, int]:
    """The bytes that a state takes on every device of this process."""
    held: dict[Device, int] = {}
    for aval, copies in zip(avals, shardings, strict=True):
        for sharding in copies:
            part = jax.ShapeDtypeStruct(sharding.shard_shape(aval.shape), aval.dtype)
            for device in sharding.addressable_devices:
                held[device] = held.get(device, 0) + array_bytes(part)
    return held


def check_state_fits(held: Mapping[Device, int], largest: str) -> None:
    """Refuses a state that takes more memory than the devices report; names its largest leaf."""
    for devices in sharing_memory(held):
        taken, limit = sum(held[d] for d in devices), device_memory(devices)
        if limit is not None and taken > limit:
            raise ValueError(
                f"the state takes {taken:,} bytes of {', '.join(map(str, devices))}, which has {limit:,}; its largest leaf is "
                f"{largest}. Use a smaller capacity, fewer environments or seeds, shorter chunks of a recorded run, or a "
                "policy that splits that leaf over more devices"
            )


def sharing_memory(devices: Iterable[Device]) -> list[list[Device]]:
    """Devices by the memory that they have: the CPU devices of this process share that of the host."""
    devices = list(devices)
    host = [d for d in devices if d.platform == "cpu" and getattr(d, "process_index", 0) == jax.process_index()]
    return [*([host] if host else []), *([d] for d in devices if d.platform != "cpu")]


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """The bytes that a program takes on each of its devices: arguments, results and temporary arrays."""
    memory = compiled.memory_analysis()
    kept = sum(getattr(memory, f"{kind}_size_in_bytes", 0) for kind in ("argument", "output", "temp"))
    return kept - getattr(memory, "alias_size_in_bytes", 0)


def temporary_bytes(jaxpr: Jaxpr) -> int:
    """Estimates the bytes that a jaxpr needs besides its arguments: the most that are in use at once if nothing is fused."""
    return _temporary_bytes(jaxpr, {})


def _temporary_bytes(jaxpr: Jaxpr, known: dict[int, int]) -> int:
    """As `temporary_bytes`; `known` holds what was found of jaxprs that are called again."""
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    last = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.invars if isinstance(v, Var)}
    last |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if isinstance(v, Var)}
    held: dict[Var, int] = {}
    total = most = 0
    for i, eqn in enumerate(jaxpr.eqns):
        made = {v: array_bytes(v.aval) for v in eqn.outvars if isinstance(v.aval, ShapedArray)}
        held |= made
        total += sum(made.values())
        most = max(most, total + max((_temporary_bytes(sub, known) for sub in sub_jaxprs(eqn)), default=0))
        unused = {v for v in (*eqn.invars, *eqn.outvars) if isinstance(v, Var) and last.get(v, i) <= i}
        total -= sum(held.pop(v, 0) for v in unused)
    known[id(jaxpr)] = most
    return most


def largest_array(jaxpr: Jaxpr) -> str:
    """Names the largest array that a jaxpr computes: its bytes, dtype and shape, its operation and its fragment."""

    seen: set[int] = set()

    def visit(jaxpr: Jaxpr, fragment: str) -> Iterator[tuple[int, str]]:
        eqns = () if id(jaxpr) in seen else jaxpr.eqns
        seen.add(id(jaxpr))
        for eqn in eqns:
            for sub in sub_jaxprs(eqn):
                yield from visit(sub, f" in {eqn.params['name']!r}" if is_fragment(eqn) else fragment)
            for made in (v.aval for v in eqn.outvars):
                if isinstance(made, ShapedArray):
                    yield array_bytes(made), f"{made.dtype}{list(made.shape)} of {eqn.primitive.name}{fragment}"

    nbytes, name = max(visit(jaxpr, ""), key=lambda found: found[0], default=(0, "none"))
    return f"{name} ({nbytes:,} bytes)"


class Fitting:
    """A jitted function that raises ValueError, instead of running, if its program takes more memory than its devices have."""

    def __init__(self, fn: jax.stages.Wrapped, what: str, remedy: str):
        """`what` and `remedy` are for the message: the program in words, and how to make it smaller."""
        self._fn, self._what, self._remedy = fn, what, remedy
        self._begun: dict[Any, Callable[[], jax.stages.Compiled]] = {}
        self._programs: dict[Any, jax.stages.Compiled] = {}

    def begin(self, *args: Any) -> None:
        """Has another thread compile the program for such arguments."""
        key = _signature(args)
        if key not in self._programs and key not in self._begun:
            self._begun[key] = in_background(lower(self._fn, *args).compile)

    def __call__(self, *args: Any) -> Any:
        """Computes the function."""
        key = _signature(args)
        if key not in self._programs:
            begun = self._begun.pop(key, None)
            compiled = begun() if begun else lower(self._fn, *args).compile()
            check_program_fits(compiled, self._what, self._remedy)
            self._programs[key] = compiled
        return self._programs[key](*args)


def _signature(args: tuple[Any, ...]) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, tuple((jax.typeof(x), x.sharding) for x in leaves)


def check_program_fits(compiled: jax.stages.Compiled, what: str, remedy: str) -> None:
    """Refuses a program that takes more memory than its devices have in all, whatever else they hold."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    taken = program_bytes(compiled)
    for devices in sharing_memory({d: None for s in shardings for d in s.device_set}):
        limit = device_memory(devices)
        if limit is not None and taken * len(devices) > limit:
            names = ", ".join(map(str, devices))
            raise ValueError(
                f"{what} takes {taken * len(devices):,} bytes of {names}, which {'have' if len(devices) > 1 else 'has'} "
                f"{limit:,} in all. {remedy}"
            )
