"""A training loop as one program, if one placement holds every fragment."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from msrl_jax.fragments.passes.compact import SmallArrayPacker, is_single_accelerator
from msrl_jax.fragments.passes.instructions import Value
from msrl_jax.fragments.runtime.executables import Executables, Request, argument, replicated_sharding, to_placement_sharding
from msrl_jax.fragments.runtime.execute import annotated_wait
from msrl_jax.fragments.runtime.memory import MemoryCheck
from msrl_jax.fragments.runtime.transfer import Leaves, read

_Packed: TypeAlias = tuple[Any, list[jax.Array]]
_Loop: TypeAlias = tuple[jax.Array, _Packed, _Packed]
"""Iterations done, the leaves of the state, and the rows of the metrics."""


@dataclass(frozen=True)
class FusedLoop:
    """Iterations as one program, if one placement holds every fragment."""

    iteration: Callable[..., Sequence[jax.Array]]  # maps the state's leaves to those of the next state and of the metrics
    leaves: Sequence[Value]
    shardings: Sequence[NamedSharding]
    metrics: Sequence[Value]
    rewritten: bool  # for its placement, so that inner loops may use the packed carry
    executables: Executables
    check_fits: MemoryCheck

    @property
    def packs(self) -> bool:
        """Whether small arrays are combined: the metrics, and the state if inner loops use it in that form."""
        return bool(self.leaves) and is_single_accelerator(self.leaves[0].placement)

    def run(self, leaves: Leaves, length: int, max_length: int) -> tuple[Leaves, list[Any]]:
        """Runs iterations on leaves, whose memory they consume; returns the stacked metrics, read to the host."""
        loop = self.compile(max_length)
        self.check_fits(loop, f"program of up to {max_length} iterations")
        count = jax.device_put(np.int32(length), replicated_sharding(self.leaves[0]) if self.leaves else None)
        flat = self.executables.call(loop)(count, *[copies[0] for copies in leaves])
        with annotated_wait():
            rows = read(list(flat[len(leaves) :]))
        return [(x,) for x in flat[: len(leaves)]], [x[:length] for x in rows]

    def run_once(self, leaves: Leaves) -> tuple[Leaves, list[jax.Array]]:
        """Runs one iteration on leaves, which stay valid; returns metrics that may still be being computed."""
        flat = self._call_once(*[copies[0] for copies in leaves])
        return [(x,) for x in flat[: len(leaves)]], list(flat[len(leaves) :])

    @functools.cached_property
    def _call_once(self) -> Callable[..., Sequence[jax.Array]]:
        once = self.compile(None, donate=False)
        self.check_fits(once, "program of one iteration")
        return self.executables.call(once)

    def begin(self, max_length: int) -> None:
        """Compiles the program in another thread; `compile` then waits for that."""
        self.executables.begin(self._request(max_length, True, [None] * len(self.metrics)))

    def compile(self, max_length: int | None, *, donate: bool = True) -> jax.stages.Compiled:
        """Returns the program of up to `max_length` iterations, whose number is its first argument; of one iteration if None.

        A run therefore computes the same bits in chunks of any length, and a chunk of another length needs no other program.
        The program maps leaves, whose memory it reuses if `donate`, to leaves, then metrics. With a number, the metrics have a
        leading axis of length `max_length`; only the rows of iterations that ran are meaningful.
        """
        for prescribed in ([None] * len(self.metrics), [replicated_sharding(v) for v in self.metrics]):
            compiled = self.executables.compile(self._request(max_length, donate, prescribed))
            metric_shardings = compiled.output_shardings[len(self.leaves) :]
            if all(to_placement_sharding(s, v) for s, v in zip(metric_shardings, self.metrics, strict=True)):
                return compiled
        raise RuntimeError("XLA does not keep the shardings that were prescribed for metrics")

    def _request(self, max_length: int | None, donate: bool, prescribed: Sequence[NamedSharding | None]) -> Request:
        count = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated_sharding(self.leaves[0]) if self.leaves else None)
        before = [] if max_length is None else [count]
        args = [argument(v, s) for v, s in zip(self.leaves, self.shardings, strict=True)]
        donated = range(len(before), len(before) + len(args)) if donate else ()
        fn = self._once if max_length is None else self._iterations(max_length)
        return Request(("iterations", max_length), fn, [*before, *args], donated, [*self.shardings, *prescribed])

    def _once(self, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(self.iteration(*leaves))

    def _iterations(self, max_length: int) -> Callable[..., tuple[jax.Array, ...]]:
        write_row = functools.partial(jax.lax.dynamic_update_index_in_dim, allow_negative_indices=False)
        state = SmallArrayPacker([v.aval for v in self.leaves], self.packs and self.rewritten)
        metrics = SmallArrayPacker([v.aval for v in self.metrics], self.packs)

        def step(carry: _Loop) -> _Loop:
            index, before, rows = carry
            results = list(self.iteration(*state.unpack(*before)))
            row = metrics.pack(results[len(self.leaves) :])
            return (
                index + 1,
                state.pack(results[: len(self.leaves)]),
                jax.tree.map(lambda x, r: write_row(x, r, index, 0), rows, row),
            )

        def iterations(count: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
            row = jax.eval_shape(metrics.pack, [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self.metrics])
            empty = jax.tree.map(lambda x: jax.lax.empty((max_length, *x.shape), x.dtype), row)
            start = (jnp.zeros_like(count), state.pack(leaves), empty)
            _, after, rows = jax.lax.while_loop(lambda carry: carry[0] < count, step, start)
            return (*state.unpack(*after), *metrics.unpack(*rows))

        return iterations
