"""Executables: compiles the programs of a schedule, shares equal ones, and records the shardings of their values."""

import contextlib
import functools
import time
from collections.abc import Callable, Hashable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax.fragments.codecs import Changes
from msrl_jax.fragments.passes.instructions import Instruction, Value
from msrl_jax.fragments.placement import Device
from msrl_jax.fragments.runtime.cpu_lowering import lower_jitted
from msrl_jax.fragments.runtime.memory import MemoryCheck, is_planned
from msrl_jax.fragments.support.compiling import in_background

# JAX's executables reject arrays with elements smaller than a byte, because JAX writes their layouts in two ways; `jax.jit`
# accepts them.
SMALLER_THAN_A_BYTE = frozenset(("int2", "uint2", "int4", "uint4", "float4_e2m1fn"))


@dataclass(frozen=True, eq=False)
class Coalesced:
    """How the values of a Move are sent."""

    separate: tuple[int, ...]  # values that are sent separately: their positions in the Move
    joined: tuple[int, ...]  # values that are sent in vectors: their positions, in the order of the arguments of `join`
    join: jax.stages.Compiled  # the program that makes the vectors at the source
    split: jax.stages.Compiled  # the program that splits them at the destination
    shardings: tuple[NamedSharding, ...]  # the shardings at the destination: separate values first, then the vectors


@dataclass(frozen=True, eq=False)
class DeltaTransfer:
    """The programs of a Move that sends changes."""

    changes: Changes
    words: int
    join: jax.stages.Compiled  # values -> words [N], at the source
    compare: jax.stages.Compiled  # the last words [N], values -> words [N], positions [K], changes [K], number of changes []
    split: jax.stages.Compiled  # words [N] -> values, at the destination
    patch: jax.stages.Compiled  # words [N], positions [K], changes [K] -> words [N], values
    target_sharding: NamedSharding


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
    def full_key(self) -> Hashable:
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
        return lower_jitted(self.jitted, *self.args)


@dataclass(eq=False)
class Executables:
    """Compiled programs and the shardings between them."""

    compiled: dict[Instruction, jax.stages.Compiled] = field(default_factory=dict)  # for every RunProgram, copy and Alloc
    coalesced: dict[Instruction, Coalesced] = field(default_factory=dict)  # for every Move that joins values
    patching: dict[Instruction, DeltaTransfer] = field(default_factory=dict)  # for every Move that sends changes
    shardings: dict[Value, NamedSharding] = field(default_factory=dict)
    seconds: float = 0.0  # time spent tracing and lowering, and waiting for XLA
    count: int = 0  # number of XLA compilations
    _cache: dict[Hashable, jax.stages.Compiled] = field(default_factory=dict)
    _begun: dict[Hashable, Callable[[], jax.stages.Compiled]] = field(default_factory=dict)
    _by_jit: dict[jax.stages.Compiled, Callable[..., Any]] = field(default_factory=dict)

    def call(self, compiled: jax.stages.Compiled) -> Callable[..., Any]:
        """Returns the function to call for running an executable."""
        return self._by_jit.get(compiled, compiled)

    def compile(self, request: Request) -> jax.stages.Compiled:
        """Compiles a function ahead of time, unless an equal request has been made before."""
        if request.full_key not in self._cache:
            with self._compiling(request):
                begun = self._begun.pop(request.full_key, None)
                compiled = self._cache[request.full_key] = (begun or request.lower())()
            if any(a.dtype.name in SMALLER_THAN_A_BYTE for a in request.leaves):
                self._by_jit[compiled] = request.jitted
            self.count += 1
        return self._cache[request.full_key]

    def evaluate(self, jitted: jax.stages.Wrapped, *args: Any) -> Any:
        """Evaluates a jitted function once, and counts the time of tracing and compiling it."""
        with self.timed():
            compiled = lower_jitted(jitted, *args)()
        return compiled(*args)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the time of the context as compile time, if it ends without an error."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def begin(self, request: Request) -> None:
        """Traces a function, and compiles it in another thread; `compile` of an equal request waits for that."""
        if request.full_key not in self._cache and request.full_key not in self._begun:
            with self._compiling(request):
                self._begun[request.full_key] = in_background(request.lower())

    @contextlib.contextmanager
    def _compiling(self, request: Request) -> Iterator[None]:
        try:
            with self.timed():
                yield
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            devices = {d for a in request.leaves if a.sharding is not None for d in a.sharding.device_set}
            raise _with_remedy(error, request.fn.__name__, devices) from error


def _with_remedy(error: ValueError | RuntimeError, name: str, devices: Set[Device]) -> ValueError | RuntimeError:
    """Returns the compiler's error with a remedy, if one is known; otherwise the error itself."""
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


def to_placement_sharding(sharding: object, value: Value) -> NamedSharding | None:
    """Expresses a sharding that XLA chose (None for an unread argument) on the placement's own mesh; None if impossible.

    For example, the result of a host callback is on one device only; its program must be compiled again with a prescribed
    sharding.
    """
    mesh, rank = value.placement.mesh, len(value.aval.shape)
    if sharding is None or mesh.size == 1:
        return replicated_sharding(value)
    if not isinstance(sharding, NamedSharding):
        return None
    if sharding.mesh == mesh:
        return NamedSharding(mesh, sharding.spec)
    specs = [PartitionSpec(*[None] * d, axis) for d in range(rank) for axis in mesh.axis_names]
    candidates = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), *specs))
    return next((c for c in candidates if c.is_equivalent_to(sharding, rank)), None)


def replicated_sharding(value: Value) -> NamedSharding:
    """Returns the sharding that replicates a value over its placement."""
    return NamedSharding(value.placement.mesh, PartitionSpec())


def argument(value: Value, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """Returns a value as an argument of a request."""
    return jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype, sharding=sharding, weak_type=value.aval.weak_type)


class MemoryCheckedJit:
    """A jitted function that raises ValueError instead of running if its program exceeds the memory of its devices."""

    def __init__(self, fn: jax.stages.Wrapped, what: str, remedy: str):
        """`what` and `remedy` are for the message: a description of the program, and how to make it smaller."""
        self._fn, self._what, self._check_fits = fn, what, MemoryCheck(lambda: remedy)
        self._executables = Executables()

    def begin(self, *args: Any) -> None:
        """Compiles the program for such arguments in another thread."""
        self._executables.begin(self._request(args))

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        compiled = self._executables.compile(self._request(args))
        self._check_fits(compiled, self._what)
        return compiled(*args)

    def _request(self, args: Sequence[Any]) -> Request:
        return Request(jax.tree.structure(args), self._fn, args)
