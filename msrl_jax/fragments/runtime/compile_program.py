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
from msrl_jax.fragments.runtime.executables import Executables, Request, argument, replicated_sharding, to_placement_sharding
from msrl_jax.fragments.runtime.shardings import Shardings, is_same, scattered_sharding


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
    arguments, results = _arguments(run), run.makes()
    same_as = {**same_as, **{updated: buffer for buffer, updated in run.writes}}
    same_as = {v: same_as[v] for v in results if v in same_as}
    local_shardings = {v: shardings[v] for v in (*arguments, *same_as.values())}
    is_single = run.placement.mesh.size == 1
    if is_single or not any(local_shardings[v] for v in arguments):
        local_shardings |= {v: local_shardings[v] or replicated_sharding(v) for v in arguments}
    prescribed: dict[Value, NamedSharding] = {}
    for v in results:
        replaced = local_shardings[same_as[v]] if v in same_as else None
        if sharding := required.get(v) or replaced or (replicated_sharding(v) if is_single or not arguments else None):
            prescribed[v] = sharding
    for _ in range(len(results) + 2):
        compiled, donates_all = _compile_once(run, local_shardings, [prescribed.get(v) for v in results], executables)
        pairs = zip(arguments, compiled.input_shardings[0], strict=True)
        input_choices = {v: to_placement_sharding(s, v) for v, s in pairs if local_shardings[v] is None}
        local_shardings |= {v: sharding or replicated_sharding(v) for v, sharding in input_choices.items()}
        result_shardings = {
            v: to_placement_sharding(s, v) for v, s in zip(results, compiled.output_shardings, strict=True)
        } | prescribed
        corrections = _corrections(
            {v: sharding for v, sharding in result_shardings.items() if v not in prescribed},
            local_shardings,
            same_as,
            to_shards,
        )
        if donates_all and None not in input_choices.values() and not corrections:
            local_shardings |= {same_as[v]: result_shardings[v] for v in same_as if local_shardings[same_as[v]] is None}
            return compiled, {**local_shardings, **result_shardings}
        prescribed |= corrections
    raise RuntimeError(f"XLA's shardings for {run.name!r} @ {run.placement} change with every compilation")


def _arguments(run: RunProgram) -> list[Value]:
    return [*([run.index] if run.index else []), *run.reads()]


def _compile_once(
    run: RunProgram, shardings: Shardings, out: Sequence[NamedSharding | None], executables: Executables
) -> tuple[jax.stages.Compiled, bool]:
    """Compiles a program; returns whether it donates every input that it could."""
    arguments, first = _arguments(run), 1 if run.index else 0
    donate = [first + k for k in _reusable_inputs(run, shardings, out)]
    donate += [first + len(run.inputs) + k for k in range(len(run.writes))]
    key = (program_key(run.jaxpr), len(run.outputs), run.rows, bool(run.index))
    request = Request(key, body(run), [argument(v, shardings[v]) for v in arguments], donate, out)
    try:
        return executables.compile(request), True
    except (RuntimeError, ValueError):
        # JAX pairs a donated argument whose sharding is open with a result of its shape, and XLA rejects a pair with two
        # different shardings. Once the sharding is known, the argument is donated.
        closed = [k for k in sorted(donate) if shardings[arguments[k]] is not None]
        if len(closed) == len(donate):
            raise
        return executables.compile(replace(request, donate=closed)), False


def _reusable_inputs(run: RunProgram, shardings: Shardings, out: Sequence[NamedSharding | None]) -> Iterator[int]:
    """Yields the donated inputs for which there is a result of the same size on each device."""
    available = [(v.aval.shape, v.aval.dtype, s) for v, s in zip(run.outputs, out, strict=False)]
    open_choice = None in out
    for k in run.donated:
        value, sharding = run.inputs[k], shardings[run.inputs[k]]
        for slot in available:
            if slot[:2] == (value.aval.shape, value.aval.dtype) and (open_choice or slot[2] == sharding):
                available.remove(slot)
                yield k
                break


def _corrections(
    result_shardings: Shardings, shardings: Shardings, same_as: Mapping[Value, Value], to_shards: Set[Value]
) -> dict[Value, NamedSharding]:
    """Returns the shardings to prescribe for results that XLA sharded differently than needed; `result_shardings` is None if
    inexpressible.
    """
    corrections: dict[Value, NamedSharding] = {}
    for v, sharding in result_shardings.items():
        replaced = shardings[same_as[v]] if v in same_as else None
        if replaced is not None:
            if sharding is None or not is_same(replaced, sharding, v):
                corrections[v] = replaced
        elif sharding is None:
            corrections[v] = replicated_sharding(v)
        elif v in to_shards and v not in same_as and not any(sharding.spec) and any((split := scattered_sharding(v)).spec):
            # Only shards of another placement read this value, so no device needs it whole: reduce-scatter the sum.
            corrections[v] = split
    return corrections


def body(run: RunProgram) -> Callable[..., Any]:
    """Returns the function that a RunProgram compiles: reads its rows, evaluates its jaxpr, writes its rows."""

    def fn(*args: Any) -> tuple[Any, ...]:
        evaluate = jaxpr_as_fun(prepare_for_placement(run.jaxpr, run.placement))
        index, *arrays = args if run.index is not None else (None, *args)
        inputs, buffers = arrays[: len(run.inputs)], arrays[len(run.inputs) :]
        for k in run.rows:
            inputs[k] = jax.lax.dynamic_index_in_dim(inputs[k], index, 0, keepdims=False)
        results = evaluate(*inputs)
        outputs, rows = results[: len(run.outputs)], results[len(run.outputs) :]
        updated_buffers = [jax.lax.dynamic_update_index_in_dim(b, row, index, 0) for b, row in zip(buffers, rows, strict=True)]
        return (*outputs, *updated_buffers)

    fn.__name__ = "".join(c if c.isalnum() else "_" for c in run.name)[:80]  # the program's name in profiles
    return fn
