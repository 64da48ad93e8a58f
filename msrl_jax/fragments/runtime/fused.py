"""Fused loops: if one placement holds every fragment, whole iterations are one program."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from msrl_jax.fragments.passes.instructions import Value
from msrl_jax.fragments.runtime.executables import Executables, understood, whole

_Loop: TypeAlias = tuple[jax.Array, list[jax.Array], list[jax.Array]]
"""Iterations done, the leaves of the state, and the rows of the metrics."""


@dataclass(frozen=True)
class Fused:
    """One or more iterations as one program, before XLA compiles it.

    Attributes:
      key: equal for equal functions of one training program only.
      fn: the function, of the arguments `before` and of the leaves.
      before: its first arguments.
      leaves: the state's leaves.
      shardings: shardings of the leaves.
      metrics: the metrics' leaves.
      donate: whether the program may reuse the memory of the leaves.
    """

    key: Hashable
    fn: Callable[..., tuple[jax.Array, ...]]
    before: Sequence[jax.ShapeDtypeStruct]
    leaves: Sequence[Value]
    shardings: Sequence[NamedSharding]
    metrics: Sequence[Value]
    donate: bool

    def begin(self, executables: Executables) -> None:
        """Has another thread compile the program; `compile` then waits for that."""
        executables.begin(*self._request([None] * len(self.metrics)))

    def compile(self, executables: Executables) -> jax.stages.Compiled:
        """Compiles the program.

        Args:
          executables: the compiled programs so far; receives this one.

        Returns:
          The program.
        """
        for prescribed in ([None] * len(self.metrics), [whole(v) for v in self.metrics]):
            compiled = executables.compile(*self._request(prescribed))
            made = compiled.output_shardings[len(self.leaves) :]
            if all(understood(s, v) for s, v in zip(made, self.metrics, strict=True)):
                return compiled
        raise RuntimeError("XLA does not keep the shardings that were prescribed for metrics")

    def _request(self, prescribed: Sequence[NamedSharding | None]) -> tuple[Hashable, Callable[..., Any], Any, Any, Any]:
        args = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s, weak_type=v.aval.weak_type)
            for v, s in zip(self.leaves, self.shardings, strict=True)
        ]
        donated = range(len(self.before), len(self.before) + len(args)) if self.donate else ()
        return self.key, self.fn, [*self.before, *args], donated, [*self.shardings, *prescribed]


def fused_loop(
    iteration: Callable[..., Sequence[jax.Array]],
    most: int,
    leaves: Sequence[Value],
    shardings: Sequence[NamedSharding],
    metrics: Sequence[Value],
) -> Fused:
    """A run of iterations as one program; their number is an argument.

    So a run computes the same bits in chunks of any length, and a chunk of another length needs no other program.

    Args:
      iteration: maps the leaves of the state to those of the next state and of the metrics.
      most: the largest number of iterations.
      leaves: the state's leaves. Their memory is reused.
      shardings: shardings of the leaves.
      metrics: the metrics' leaves.

    Returns:
      The program: it maps the number of iterations (int32) and leaves to leaves, then metrics with a leading axis of length
      `most`, of which only the rows of iterations that ran have a meaning.
    """

    put = functools.partial(jax.lax.dynamic_update_index_in_dim, allow_negative_indices=False)

    def iterations(count: jax.Array, *leaves: jax.Array) -> tuple[jax.Array, ...]:
        def step(carry: _Loop) -> _Loop:
            done, leaves, rows = carry
            results = list(iteration(*leaves))
            row = results[len(leaves) :]
            rows = [put(held, x, done, 0) for held, x in zip(rows, row, strict=True)]
            return done + 1, results[: len(leaves)], rows

        empty = [jax.lax.empty((most, *v.aval.shape), v.aval.dtype) for v in metrics]
        start = (jnp.zeros_like(count), list(leaves), empty)
        _, after, rows = jax.lax.while_loop(lambda carry: carry[0] < count, step, start)
        return (*after, *rows)

    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole(leaves[0]) if leaves else None)
    return Fused(("iterations", most), iterations, [count], leaves, shardings, metrics, donate=True)


def fused_once(
    iteration: Callable[..., Sequence[jax.Array]],
    leaves: Sequence[Value],
    shardings: Sequence[NamedSharding],
    metrics: Sequence[Value],
    *,
    donate: bool = False,
) -> Fused:
    """One iteration as one program.

    Args:
      iteration: maps the leaves of the state to those of the next state and of the metrics.
      leaves: the state's leaves.
      shardings: shardings of the leaves.
      metrics: the metrics' leaves.
      donate: whether the program may reuse the memory of the leaves.

    Returns:
      The program: it maps leaves to leaves, then metrics.
    """

    def once(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(iteration(*leaves))

    return Fused("one iteration", once, [], leaves, shardings, metrics, donate)
