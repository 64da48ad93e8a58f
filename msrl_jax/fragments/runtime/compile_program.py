"""Compiles the program of one instruction; XLA chooses the shardings that nothing prescribes."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding

from msrl_jax._compat import jaxpr_as_fun
from msrl_jax.fragments.graph.program_key import program_key
from msrl_jax.fragments.passes.instructions import RunProgram, Value
from msrl_jax.fragments.passes.prepare import prepare_for_placement
from msrl_jax.fragments.runtime.executables import Executables, Request, argument, replicated, to_placement_sharding
from msrl_jax.fragments.runtime.shardings import Shardings, is_same, scattered


def compile_program(
    run: RunProgram,
    shardings: Shardings,
    required: Mapping[Value, NamedSharding],
    same_as: Mapping[Value, Value],
    to_shards: Set[Value],
    executables: Executables,
) -> tuple[jax.stages.Compiled, Shardings]:
    """Compiles a program until XLA agrees with all shardings that are prescribed.

    A further round prescribes shardings that XLA chose wrongly: those of at least one more result, or of all inputs. So the
    rounds end.

    Args:
      run: the instruction.
      shardings: the shardings of the values known so far.
      required: prescribed shardings of results.
      same_as: for results that replace a value in the next repetition of a loop, that value, whose sharding they have.
      to_shards: the values that only shards of another placement read.
      executables: compiles.

    Returns:
      The program, and the shardings of all values that it reads or makes, and of those that its results replace.

    Raises:
      RuntimeError: if XLA's choice changes with every compilation.
    """
    takes, makes = _arguments(run), run.makes()
    same_as = {**same_as, **{updated: buffer for buffer, updated in run.writes}}
    same_as = {v: same_as[v] for v in makes if v in same_as}
    known = {v: shardings[v] for v in (*takes, *same_as.values())}
    is_single = run.placement.mesh.size == 1
    if is_single or not any(known[v] for v in takes):
        known |= {v: known[v] or replicated(v) for v in takes}
    prescribed: dict[Value, NamedSharding] = {}
    for v in makes:
        replaced = known[same_as[v]] if v in same_as else None
        if at := required.get(v) or replaced or (replicated(v) if is_single or not takes else None):
            prescribed[v] = at
    for _ in range(len(makes) + 2):
        compiled, donates_all = _compile_once(run, known, [prescribed.get(v) for v in makes], executables)
        pairs = zip(takes, compiled.input_shardings[0], strict=True)
        chosen = {v: to_placement_sharding(s, v) for v, s in pairs if known[v] is None}
        known |= {v: at or replicated(v) for v, at in chosen.items()}
        made = {v: to_placement_sharding(s, v) for v, s in zip(makes, compiled.output_shardings, strict=True)} | prescribed
        wrong = _wrong_results({v: at for v, at in made.items() if v not in prescribed}, known, same_as, to_shards)
        if donates_all and None not in chosen.values() and not wrong:
            known |= {same_as[v]: made[v] for v in same_as if known[same_as[v]] is None}
            return compiled, {**known, **made}
        prescribed |= wrong
    raise RuntimeError(f"XLA's shardings for {run.name!r} @ {run.placement} change with every compilation")


def _arguments(run: RunProgram) -> list[Value]:
    return [*([run.index] if run.index else []), *run.reads()]


def _compile_once(
    run: RunProgram, known: Shardings, out: Sequence[NamedSharding | None], executables: Executables
) -> tuple[jax.stages.Compiled, bool]:
    """Compiles a program; returns whether it donates every input that it could."""
    takes, first = _arguments(run), 1 if run.index else 0
    donate = [first + k for k in _reusable(run, known, out)]
    donate += [first + len(run.inputs) + k for k in range(len(run.writes))]
    key = (program_key(run.jaxpr), len(run.outputs), run.rows, bool(run.index))
    request = Request(key, body(run), [argument(v, known[v]) for v in takes], donate, out)
    try:
        return executables.compile(request), True
    except (RuntimeError, ValueError):
        # JAX pairs a donated argument whose sharding is open with a result of its shape, and XLA rejects a pair with two
        # different shardings. Once the sharding is known, the argument is donated.
        closed = [k for k in sorted(donate) if known[takes[k]] is not None]
        if len(closed) == len(donate):
            raise
        return executables.compile(replace(request, donate=closed)), False


def _reusable(run: RunProgram, known: Shardings, out: Sequence[NamedSharding | None]) -> Iterator[int]:
    """Yields the donated inputs for which there is a result of the same size on each device."""
    room = [(v.aval.shape, v.aval.dtype, s) for v, s in zip(run.outputs, out, strict=False)]
    open_choice = None in out
    for k in run.donated:
        value, at = run.inputs[k], known[run.inputs[k]]
        for place in room:
            if place[:2] == (value.aval.shape, value.aval.dtype) and (open_choice or place[2] == at):
                room.remove(place)
                yield k
                break


def _wrong_results(
    chosen: Shardings, known: Shardings, same_as: Mapping[Value, Value], to_shards: Set[Value]
) -> dict[Value, NamedSharding]:
    """Returns the shardings to prescribe for results that XLA sharded differently than needed; `chosen` is None if
    inexpressible.
    """
    wrong: dict[Value, NamedSharding] = {}
    for v, at in chosen.items():
        replaced = known[same_as[v]] if v in same_as else None
        if replaced is not None:
            if at is None or not is_same(replaced, at, v):
                wrong[v] = replaced
        elif at is None:
            wrong[v] = replicated(v)
        elif v in to_shards and v not in same_as and not any(at.spec) and any((split := scattered(v)).spec):
            # Only shards of another placement read this value, so no device needs it whole: reduce-scatter the sum.
            wrong[v] = split
    return wrong


def body(run: RunProgram) -> Callable[..., Any]:
    """Returns the function that a RunProgram compiles: reads its rows, evaluates its jaxpr, writes its rows."""

    def fn(*args: Any) -> tuple[Any, ...]:
        evaluate = jaxpr_as_fun(prepare_for_placement(run.jaxpr, run.placement))
        index, *rest = args if run.index is not None else (None, *args)
        inputs, buffers = rest[: len(run.inputs)], rest[len(run.inputs) :]
        for k in run.rows:
            inputs[k] = jax.lax.dynamic_index_in_dim(inputs[k], index, 0, keepdims=False)
        results = evaluate(*inputs)
        outputs, rows = results[: len(run.outputs)], results[len(run.outputs) :]
        stored = [jax.lax.dynamic_update_index_in_dim(b, row, index, 0) for b, row in zip(buffers, rows, strict=True)]
        return (*outputs, *stored)

    fn.__name__ = "".join(c if c.isalnum() else "_" for c in run.name)[:80]  # the program's name in profiles
    return fn
