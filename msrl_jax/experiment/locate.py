"""Finds the first iteration of a run that is not finite, and where its nan or infinity comes from.

A run is deterministic, so it can go again from an earlier state: iterations are halved until one is left, which is then
evaluated outside of the compiled programs, equation by equation.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from msrl_jax.experiment.history import first_non_finite
from msrl_jax.experiment.watch import Watch, non_finite
from msrl_jax.fragments.graph.build import build
from msrl_jax.fragments.passes.staleness import delay
from msrl_jax.fragments.plan.origin import Origin, find_origin
from msrl_jax.fragments.program import Delayed, Program

Again = Callable[[Any, int], tuple[Any, Any]]
"""`(state, iterations) -> (state, metrics)`; the given state stays valid."""


def locate(program: Program, again: Again, state: Any, iterations: int, watch: Watch) -> tuple[int, Origin | int | None] | None:
    """Finds the first iteration of a run that is not finite, and where its nan or infinity comes from.

    Args:
      program: the program of the run.
      again: runs iterations.
      state: a state of the run in which everything that is watched is finite.
      iterations: number of iterations after which something is not finite.
      watch: what must be finite.

    Returns:
      The number of finite iterations before that one; and the origin, or the position of a leaf of the state, or of a register
      behind them, that is not finite itself, or None if the iteration is finite outside of the compiled programs. None in
      place of both if the iterations are finite this time.
    """
    also: list[int] = []
    while True:
        found = _last_good(program, again, state, iterations, watch, also)
        if found is None:
            return None
        origin = _origin(program, found[0], watch, also)
        # A part of the state that is not watched, such as the environment's own, is to blame: look for its first nan.
        leaves = jax.tree.leaves(program.unwrap(state))
        if not isinstance(origin, int) or origin >= len(leaves) or non_finite(leaves, [origin]):
            return found[1], origin
        also.append(origin)


def _last_good(
    program: Program, again: Again, state: Any, iterations: int, watch: Watch, also: Sequence[int]
) -> tuple[Any, int] | None:
    """A finite state after which one iteration gives something that is not finite, and the number of iterations up to it."""
    low, high, certain = 0, iterations, False
    while high - low > 1 or not certain:
        middle = (low + high) // 2 if certain else high
        after, metrics = again(state, middle - low)
        if first_non_finite(metrics) or not watch.is_whole(program.unwrap(after), also):
            high, certain = middle, True
        elif middle == iterations:
            return None
        else:
            state, low = after, middle
    return state, low


def _origin(program: Program, state: Any, watch: Watch, also: Sequence[int]) -> Origin | int | None:
    """The origin in the iteration after a state: of the equations as the policy connects them, delays included."""
    count = len(program.traced.jaxpr.in_avals)
    labels = [program.graph.labels[v] for v in program.graph.region.carry[:count]]
    graph = build(program.traced.jaxpr, program.layout, labels, program.graph.axes[:count])
    if program.layout.staleness:
        delay(graph, program.layout.staleness, program.layout)
    region, device = graph.region, program.devices[0]
    registers = state.registers if isinstance(state, Delayed) else ()
    values = jax.device_put([*jax.tree.leaves(program.unwrap(state)), *registers], device)
    # One after another: JAX sorts the keys of a dict, and variables have no order.
    env = dict(zip(region.carry, values, strict=True)) | {v: jax.device_put(x, device) for v, x in graph.constants.items()}
    wanted = [*(region.next_carry[i] for i in (*watch.everything, *also)), *region.results]
    return find_origin([node.eqn for node in region.nodes], env, wanted)
