"""Fused loops: if one placement holds every fragment, whole iterations are one program."""

from collections.abc import Callable, Hashable, Sequence

import jax
from jax.sharding import NamedSharding

from msrl_jax.fragments.executables import Executables, understood, whole
from msrl_jax.fragments.instructions import Value


def lower_fused(
    iteration: Callable[..., Sequence[jax.Array]],
    length: int,
    leaves: Sequence[Value],
    shardings: Sequence[NamedSharding],
    metrics: Sequence[Value],
    executables: Executables,
) -> jax.stages.Compiled:
    """Compiles a run of iterations as one program.

    Args:
      iteration: maps the leaves of the state to those of the next state and of the metrics.
      length: number of iterations.
      leaves: the state's leaves. Their memory is reused.
      shardings: shardings of the leaves.
      metrics: the metrics' leaves.
      executables: the compiled programs so far; receives this one.

    Returns:
      The program: it maps leaves to leaves, then metrics with a leading axis of length `length`.
    """

    def iterations(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        def step(leaves: list[jax.Array], _: None) -> tuple[list[jax.Array], list[jax.Array]]:
            results = list(iteration(*leaves))
            return results[: len(leaves)], results[len(leaves) :]

        after, rows = jax.lax.scan(step, list(leaves), None, length=length)
        return (*after, *rows)

    return _fused(("iterations", length), iterations, leaves, shardings, metrics, executables, donate=True)


def lower_once(
    iteration: Callable[..., Sequence[jax.Array]],
    leaves: Sequence[Value],
    shardings: Sequence[NamedSharding],
    metrics: Sequence[Value],
    executables: Executables,
) -> jax.stages.Compiled:
    """Compiles one iteration as one program that leaves the state as it is.

    Args:
      iteration: maps the leaves of the state to those of the next state and of the metrics.
      leaves: the state's leaves.
      shardings: shardings of the leaves.
      metrics: the metrics' leaves.
      executables: the compiled programs so far; receives this one.

    Returns:
      The program: it maps leaves to leaves, then metrics.
    """

    def once(*leaves: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(iteration(*leaves))

    return _fused("one iteration", once, leaves, shardings, metrics, executables, donate=False)


def _fused(
    key: Hashable,
    fn: Callable[..., tuple[jax.Array, ...]],
    leaves: Sequence[Value],
    shardings: Sequence[NamedSharding],
    metrics: Sequence[Value],
    executables: Executables,
    *,
    donate: bool,
) -> jax.stages.Compiled:
    args = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=s, weak_type=v.aval.weak_type)
        for v, s in zip(leaves, shardings, strict=True)
    ]
    for prescribed in ([None] * len(metrics), [whole(v) for v in metrics]):
        compiled = executables.compile(key, fn, args, range(len(args)) if donate else (), [*shardings, *prescribed])
        made = compiled.output_shardings[len(leaves) :]
        if all(understood(s, v) for s, v in zip(made, metrics, strict=True)):
            return compiled
    raise RuntimeError("XLA does not keep the shardings that were prescribed for metrics")
