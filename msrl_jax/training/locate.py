"""Finds the first iteration of a run that is not finite, and where its nan or infinity comes from.

A run is deterministic, so it can go again from an earlier state: iterations are halved until one is left, which is then
evaluated outside of the compiled programs, equation by equation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from msrl_jax._compat import JaxprEqn, Var
from msrl_jax.fragments.graph.build import build
from msrl_jax.fragments.passes.staleness import delay
from msrl_jax.fragments.plan.origin import Origin, find_origin
from msrl_jax.fragments.program import Delayed, Program
from msrl_jax.training.history import first_non_finite
from msrl_jax.training.watch import Watch, non_finite

Run = Callable[[Any, int], tuple[Any, Any]]
"""`(state, iterations) -> (state, metrics)`; the given state stays valid."""


def last_good(
    run: Run, state: Any, iterations: int, watch: Watch, unwrap: Callable[[Any], Any], also: Sequence[int] = ()
) -> tuple[Any, int] | None:
    """Finds a finite state after which one iteration gives something that is not finite.

    Args:
      run: runs iterations.
      state: a finite state.
      iterations: number of iterations after which something is not finite.
      watch: what must be finite.
      unwrap: takes the registers from a state.
      also: positions of further leaves that must be finite.

    Returns:
      The state before that iteration and the number of iterations up to it; None if the iterations are finite this time.
    """
    low, high, certain = 0, iterations, False
    while high - low > 1 or not certain:
        middle = (low + high) // 2 if certain else high
        after, metrics = run(state, middle - low)
        if first_non_finite(metrics) or not watch.is_whole(unwrap(after), also):
            high, certain = middle, True
        elif middle == iterations:
            return None
        else:
            state, low = after, middle
    return state, low


def dataflow(program: Program) -> tuple[list[JaxprEqn], dict[Var, Any], list[Var], list[Any], list[Any]]:
    """The equations of an iteration as the program's policy connects them, delays included, codecs left out.

    Args:
      program: the program.

    Returns:
      The equations, the constants, the variables of the state and the registers, the next values of these, and the metrics.
    """
    count = len(program.traced.jaxpr.in_avals)
    labels = [program.graph.labels[v] for v in program.graph.region.carry[:count]]
    graph = build(program.traced.jaxpr, program.layout, labels, program.graph.axes[:count])
    if program.layout.staleness:
        delay(graph, program.layout.staleness, program.layout)
    region = graph.region
    return [n.eqn for n in region.nodes], graph.constants, region.carry, region.next_carry, region.results


def origin_of(program: Program, state: Any, watch: Watch, also: Sequence[int] = ()) -> Origin | int | None:
    """Finds where the first nan or infinity of an iteration comes from.

    Args:
      program: the program of the run.
      state: the state before the iteration, with its registers.
      watch: what must be finite.
      also: positions of further leaves that must be finite.

    Returns:
      The origin; or the position of a leaf of the state, or of a register behind them, if that is not finite itself; or None
      if the iteration is finite outside of the compiled programs.
    """
    leaves, device = jax.tree.leaves(program.unwrap(state)), program.devices[0]
    registers = state.registers if isinstance(state, Delayed) else ()
    eqns, constants, carry, after, metrics = dataflow(program)
    values = jax.device_put([*leaves, *registers], device)
    # One after another: JAX sorts the keys of a dict, and variables have no order.
    env = dict(zip(carry, values, strict=True)) | {var: jax.device_put(x, device) for var, x in constants.items()}
    return find_origin(eqns, env, [*(after[i] for i in (*watch.everything, *also)), *metrics])


def locate(program: Program, run: Run, state: Any, iterations: int, watch: Watch) -> tuple[int, Origin | int | None] | None:
    """Finds the first iteration of a run that is not finite, and where its nan or infinity comes from.

    Args:
      program: the program of the run.
      run: runs iterations.
      state: a state of the run in which everything that is watched is finite.
      iterations: number of iterations after which something is not finite.
      watch: what must be finite.

    Returns:
      The number of finite iterations before that one, and the result of `origin_of`; None if the iterations are finite this
      time.
    """
    also: list[int] = []
    while True:
        found = last_good(run, state, iterations, watch, program.unwrap, also)
        if found is None:
            return None
        origin = origin_of(program, found[0], watch, also)
        # A part of the state that is not watched, such as the environment's own, is to blame: look for its first nan.
        leaves = jax.tree.leaves(program.unwrap(state))
        if not isinstance(origin, int) or origin >= len(leaves) or non_finite(leaves, [origin]):
            return found[1], origin
        also.append(origin)
