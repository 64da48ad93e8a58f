"""The programs of copies, of allocations, and of results of host calls."""

from collections.abc import Callable, Iterable

import jax
import numpy as np

from msrl_jax.fragments.passes.instructions import Alloc, HostCall, Instruction, Move, Value
from msrl_jax.fragments.runtime.executables import Executables, Request, argument, replicated_sharding
from msrl_jax.fragments.runtime.shardings import Shardings


def compile_copies(instructions: Iterable[Instruction], shardings: Shardings, executables: Executables) -> None:
    """Compiles the programs of Moves that copy, of Allocs and of HostCalls; their values without a sharding are replicated."""
    for i in instructions:
        inputs: tuple[Value, ...]
        if isinstance(i, Move) and i.is_copy:
            inputs, results, key, fn = i.sources, i.results, "copy", _copy
        elif isinstance(i, Move) and i.shares_devices and len(i.processes) == 1:
            inputs, results, key, fn = i.results, i.results, "copy", _copy  # after a transfer that may have shared memory
        elif isinstance(i, HostCall):
            inputs, results, key, fn = i.outputs, i.outputs, "place", _copy  # `jax.device_put` of several arrays is slower
        elif isinstance(i, Alloc):
            kinds = tuple((v.aval.shape, v.aval.dtype) for v in i.results)
            inputs, results, key, fn = (), i.results, ("alloc", kinds), _allocation(kinds)
        else:
            continue
        shardings.update({v: shardings[v] or replicated_sharding(v) for v in (*inputs, *results)})
        arguments = [argument(v, shardings[v]) for v in inputs]
        executables.compiled[i] = executables.compile(Request(key, fn, arguments, (), [shardings[v] for v in results]))


def _copy(*xs: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(x.copy() for x in xs)


def _allocation(kinds: Iterable[tuple[tuple[int, ...], np.dtype]]) -> Callable[[], tuple[jax.Array, ...]]:
    def empty() -> tuple[jax.Array, ...]:
        return tuple(jax.lax.empty(shape, dtype) for shape, dtype in kinds)

    return empty
