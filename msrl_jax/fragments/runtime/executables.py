"""Executables: compiles the programs of a schedule, shares equal ones, and records the shardings of their values."""

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._compat import lower_as, lowering_rule, threefry2x32_p
from msrl_jax.fragments.passes.compact import Together, kernels_matter
from msrl_jax.fragments.passes.instructions import Instruction, Value
from msrl_jax.fragments.passes.known_faults import CPU_OPTIONS
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.memory import check_program_fits, is_planned
from msrl_jax.fragments.support.compiling import in_background

# JAX's executables reject arrays with elements smaller than a byte, because JAX writes their layouts in two ways; `jax.jit`
# accepts them.
SMALLER_THAN_A_BYTE = frozenset(("int2", "uint2", "int4", "uint4", "float4_e2m1fn"))


# JAX's own code of its Threefry generator for CPUs is a loop over groups of rounds, with about 80 small operations. In a
# training loop that draws a few numbers per step, they take longer than everything else. Only programs lowered by `lower` use
# this straight-line code, which computes the same bits.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.2).

    Takes the two words of keys and of counters, all `[...]` uint32; returns the two words of random bits for each counter.
    """
    # `lax.add` instead of `+` etc.: tracing takes a third of the time, and a run traces this for every shape that it draws.
    keys = (key0, key1, lax.bitwise_xor(lax.bitwise_xor(key0, key1), _PARITY))
    x0, x1 = lax.add(x0, keys[0]), lax.add(x1, keys[1])
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = lax.add(x0, x1)
            left, right = lax.shift_left(x1, np.uint32(distance)), lax.shift_right_logical(x1, np.uint32(32 - distance))
            x1 = lax.bitwise_xor(x0, lax.bitwise_or(left, right))
        x0 = lax.add(x0, keys[(group + 1) % 3])
        x1 = lax.add(x1, lax.add(keys[(group + 2) % 3], np.uint32(group + 1)))
    return x0, x1


_ON_CPU = ((threefry2x32_p, lowering_rule(threefry2x32)),)


def lower(jitted: jax.stages.Wrapped, *args: Any) -> Callable[[], jax.stages.Compiled]:
    """Lowers a jitted function; for CPUs, with straight-line random bits and safe compiler options.

    Returns:
      A function that compiles it.
    """
    traced = jitted.trace(*args)
    placed = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
    platforms = {device.platform for at in placed if at for device in at.device_set} or {jax.default_backend()}
    if platforms != {"cpu"}:
        return traced.lower().compile
    return functools.partial(lower_as(traced, _ON_CPU).compile, compiler_options=CPU_OPTIONS)


@dataclass(frozen=True, eq=False)
class Coalesced:
    """How the values of a Move are sent."""

    alone: tuple[int, ...]  # values that are sent separately: their positions in the Move
    joined: tuple[int, ...]  # values that are sent in vectors: their positions, in the order of the arguments of `join`
    join: jax.stages.Compiled  # the program that makes the vectors at the source
    split: jax.stages.Compiled  # the program that splits them at the destination
    shardings: tuple[NamedSharding, ...]  # the shardings at the destination: separate values first, then the vectors


@dataclass(frozen=True, eq=False)
class Request:
    """A function to compile. If a sharding of an argument or a result, or `out`, is None, XLA chooses it."""

    key: Hashable  # keys must be equal only for equal functions of arguments with equal structure
    fn: Callable[..., Any]
    args: Sequence[Any]  # trees of shapes and dtypes with shardings, or of arrays
    donate: Sequence[int] = ()
    out: Sequence[NamedSharding | None] | None = None

    @property
    def leaves(self) -> list[Any]:
        """The arrays among the arguments."""
        return jax.tree.leaves(self.args)

    @functools.cached_property
    def all(self) -> Hashable:
        """A key that is equal for requests that one program can serve."""
        shapes = tuple((a.shape, a.dtype, bool(getattr(a, "weak_type", False)), a.sharding) for a in self.leaves)
        return self.key, shapes, tuple(self.donate), None if self.out is None else tuple(self.out)

    @functools.cached_property
    def jitted(self) -> jax.stages.Wrapped:
        """The function under `jax.jit`."""
        if isinstance(self.fn, jax.stages.Wrapped):
            return self.fn
        out = None if self.out is None else tuple(self.out)
        return jax.jit(self.fn, donate_argnums=tuple(self.donate), out_shardings=out)

    def lower(self) -> Callable[[], jax.stages.Compiled]:
        """Traces and lowers the function; returns a function that compiles it."""
        return lower(self.jitted, *self.args)


@dataclass(eq=False)
class Executables:
    """Compiled programs and the shardings between them."""

    compiled: dict[Instruction, jax.stages.Compiled] = field(default_factory=dict)  # for every Run, copy and Alloc
    coalesced: dict[Instruction, Coalesced] = field(default_factory=dict)  # for every Move that joins values
    patching: dict[Instruction, Any] = field(default_factory=dict)  # the `Patching` of every Move that sends changes
    shardings: dict[Value, NamedSharding] = field(default_factory=dict)
    seconds: float = 0.0  # time spent tracing and lowering, and waiting for XLA
    count: int = 0  # number of XLA compilations
    _cache: dict[Hashable, jax.stages.Compiled] = field(default_factory=dict)
    _begun: dict[Hashable, Callable[[], jax.stages.Compiled]] = field(default_factory=dict)
    _by_jit: dict[jax.stages.Compiled, Callable[..., Any]] = field(default_factory=dict)

    def call(self, compiled: jax.stages.Compiled) -> Callable[..., Any]:
        """The function to call for running an executable."""
        return self._by_jit.get(compiled, compiled)

    def compile(self, request: Request) -> jax.stages.Compiled:
        """Compiles a function ahead of time, unless an equal request has been made before."""
        if request.all not in self._cache:
            with self._compiling(request):
                begun = self._begun.pop(request.all, None)
                compiled = self._cache[request.all] = (begun or request.lower())()
            if any(a.dtype.name in SMALLER_THAN_A_BYTE for a in request.leaves):
                self._by_jit[compiled] = request.jitted
            self.count += 1
        return self._cache[request.all]

    def evaluate(self, jitted: jax.stages.Wrapped, *args: Any) -> Any:
        """Evaluates a jitted function once, and counts the time of tracing and compiling it."""
        with self.timed():
            compiled = lower(jitted, *args)()
        return compiled(*args)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time of the context as compile time, if it ends without an error."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def begin(self, request: Request) -> None:
        """Traces a function, and compiles it in another thread; `compile` of an equal request waits for that."""
        if request.all not in self._cache and request.all not in self._begun:
            with self._compiling(request):
                self._begun[request.all] = in_background(request.lower())

    @contextlib.contextmanager
    def _compiling(self, request: Request) -> Iterator[None]:
        try:
            with self.timed():
                yield
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            devices = {d for a in request.leaves if a.sharding is not None for d in a.sharding.device_set}
            raise _explained(error, request.fn.__name__, devices) from error


def _explained(error: ValueError | RuntimeError, name: str, devices: Set[Device]) -> ValueError | RuntimeError:
    """The compiler's error with a remedy, if one is known; otherwise the error itself."""
    if "ordered effects are not supported" in str(error):
        return ValueError(
            f"{name} has ordered effects, which JAX keeps in order only on one device, but runs on {len(devices)} devices: "
            f"{error}. Use jax.experimental.io_callback(..., ordered=True), or ordered=False, or a placement with one device"
        )
    if "limited ICI routing" in str(error):
        return ValueError(
            f"{name} runs on {len(devices)} chips, but on a TPU slice of this kind and size, XLA compiles programs only for "
            "one chip or for all chips. Use a policy that puts everything on all devices (GPUOnly, MultiLearner), a smaller "
            "slice, or chips with full routing, such as v6e or v5p"
        )
    if isinstance(error, RuntimeError) and any(map(is_planned, devices)):
        return ValueError(
            f"XLA does not compile {name} ahead of time for {len(devices)} devices of this slice: "
            f"{str(error).splitlines()[0]}. Plan for a slice of another size, or use a policy that uses all its devices"
        )
    return error


def on_own_mesh(sharding: object, value: Value) -> NamedSharding | None:
    """Expresses a sharding that XLA chose (None for an unread argument) on the placement's own mesh; None if impossible.

    For example, the result of a host callback is on one device only; its program must be compiled again with a prescribed
    sharding.
    """
    mesh, rank = value.placement.mesh, len(value.aval.shape)
    if sharding is None or mesh.size == 1:
        return replicated(value)
    if not isinstance(sharding, NamedSharding):
        return None
    if sharding.mesh == mesh:
        return NamedSharding(mesh, sharding.spec)
    specs = [PartitionSpec(*[None] * d, axis) for d in range(rank) for axis in mesh.axis_names]
    candidates = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), *specs))
    return next((c for c in candidates if c.is_equivalent_to(sharding, rank)), None)


def replicated(value: Value) -> NamedSharding:
    """The sharding that replicates a value over its placement."""
    return NamedSharding(value.placement.mesh, PartitionSpec())


_Packed: TypeAlias = tuple[Any, list[jax.Array]]
_Loop: TypeAlias = tuple[jax.Array, _Packed, _Packed]
"""The number of completed iterations, the leaves of the state, and the rows of the metrics."""


@dataclass(frozen=True)
class FusedLoop:
    """Iterations as one program, if one placement holds every fragment."""

    iteration: Callable[..., Sequence[jax.Array]]  # maps the state's leaves to those of the next state and of the metrics
    leaves: Sequence[Value]
    shardings: Sequence[NamedSharding]
    metrics: Sequence[Value]
    rewritten: bool  # for its placement, so that inner loops may use the packed carry

    @property
    def packs(self) -> bool:
        """Whether small arrays are combined: the metrics, and the state if inner loops use it in that form."""
        return bool(self.leaves) and kernels_matter(self.leaves[0].placement)

    def begin(self, executables: Executables, most: int) -> None:
        """Compiles the program in another thread; `compile` then waits for that."""
        executables.begin(self._request(most, True, [None] * len(self.metrics)))

    def compile(self, executables: Executables, most: int | None, *, donate: bool = True) -> jax.stages.Compiled:
        """The program of up to `most` iterations, whose number is its first argument; of one iteration if None.

        A run therefore computes the same bits in chunks of any length, and a chunk of another length needs no other program.
        The program maps leaves, whose memory it reuses if `donate`, to leaves, then metrics. With a number, the metrics have a
        leading axis of length `most`; only the rows of iterations that ran are meaningful.
        """
        for prescribed in ([None] * len(self.metrics), [replicated(v) for v in self.metrics]):
            compiled = executables.compile(self._request(most, donate, prescribed))
            made = compiled.output_shardings[len(self.leaves) :]
            if all(on_own_mesh(s, v) for s, v in zip(made, self.metrics, strict=True)):
                return compiled
        raise RuntimeError("XLA does not keep the shardings that were prescribed for metrics")

    def _request(self, most: int | None, donate: bool, prescribed: Sequence[NamedSharding | None]) -> Request:
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(self.leaves[0]) if self.leaves else None)
        before = [] if most is None else [count]
        args = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s, weak_type=v.aval.weak_type)
            for v, s in zip(self.leaves, self.shardings, strict=True)
        ]
        donated = range(len(before), len(before) + len(args)) if donate else ()
        fn = self._once if most is None else self._iterations(most)
        return Request(("iterations", most), fn, [*before, *args], donated, [*self.shardings, *prescribed])

    def _once(self, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self.iteration(*leaves))

    def _iterations(self, most: int) -> Callable[..., tuple[jax.Array, ...]]:
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, allow_negative_indices=False)
        state = Together([v.aval for v in self.leaves], self.packs and self.rewritten)
        metrics = Together([v.aval for v in self.metrics], self.packs)

        def step(carry: _Loop) -> _Loop:
            done, before, rows = carry
            results = list(self.iteration(*state.unpack(*before)))
            row = metrics.pack(results[len(self.leaves) :])
            return done + 1, state.pack(results[: len(self.leaves)]), jax.tree.map(lambda x, r: put(x, r, done, 0), rows, row)

        def iterations(count: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
            row = jax.eval_shape(metrics.pack, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.metrics])
            empty = jax.tree.map(lambda x: jax.lax.empty((most, *x.shape), x.dtype), row)
            start = (jnp.zeros_like(count), state.pack(leaves), empty)
            _, after, rows = jax.lax.while_loop(lambda carry: carry[0] < count, step, start)
            return (*state.unpack(*after), *metrics.unpack(*rows))

        return iterations


class Fitting:
    """A jitted function that raises ValueError instead of running if its program exceeds the memory of its devices."""

    def __init__(self, fn: jax.stages.Wrapped, what: str, remedy: str):
        """`what` and `remedy` are for the message: a description of the program, and how to make it smaller."""
        self._fn, self._what, self._remedy = fn, what, remedy
        self._executables = Executables()
        self._fitting: set[jax.stages.Compiled] = set()

    def begin(self, *args: Any) -> None:
        """Compiles the program for such arguments in another thread."""
        self._executables.begin(self._request(args))

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        compiled = self._executables.compile(self._request(args))
        if compiled not in self._fitting:
            check_program_fits(compiled, self._what, self._remedy)
            self._fitting.add(compiled)
        return compiled(*args)

    def _request(self, args: Sequence[Any]) -> Request:
        return Request(jax.tree.structure(args), self._fn, args)
