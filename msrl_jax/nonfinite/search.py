"""The search for the first non-finite step of a run, after the guard of the run has detected one."""

import dataclasses
import tempfile
from pathlib import Path

import jax

from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.graph.build import build_graph
from msrl_jax.fragments.passes.staleness import delay
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.runtime.state_layout import Delayed
from msrl_jax.nonfinite.failure import FILE, Failure, save_failure
from msrl_jax.nonfinite.origin import Origin, find_origin
from msrl_jax.run.evaluation.history import first_non_finite
from msrl_jax.run.loop.guard import Finding, Guard
from msrl_jax.run.loop.loop import Run
from msrl_jax.run.loop.watch import Watch, non_finite

LOCATE_SECONDS = 300.0  # approximate maximum time to repeat iterations to find the first non-finite value


def explain_finding(run: Run, finding: Finding, guard: Guard) -> Finding:
    """Finds the origin of the first non-finite value of a run, and writes the file for `replay_step`."""
    failure = _find_failure(run, guard)
    if isinstance(failure, str):
        return dataclasses.replace(finding, note=failure)
    finding = dataclasses.replace(finding, iteration=failure.iteration, failure=failure, member=failure.member)
    if failure.origin.fragment is None:
        return finding
    try:
        folder = Path(tempfile.mkdtemp(prefix="msrl-jax-")) if run.path is None else run.path
        path = save_failure(folder / FILE, failure, run.description, run.experiment.recorded_steps)
    except OSError as error:
        return dataclasses.replace(finding, note=f"The step could not be written: {error}")
    return dataclasses.replace(finding, replay=path)


def _find_failure(run: Run, guard: Guard) -> Failure | str:
    """Returns the cause, or the reason why it is unknown."""
    if not guard.can_read:
        return "The state is distributed over several processes, so the cause was not searched for."
    if reason := run.program.nondeterminism_reason:
        return f"{reason}, so the iteration was not repeated to find the cause."
    state, begin, _ = guard.earlier(run)
    iterations = run.finding.iteration - begin
    if begin < run.changed_at:
        return (
            f"A callback changed environment parameters after iteration {run.changed_at}, which is later than the last saved "
            "state."
        )
    if iterations < 1:
        return "No finite state from before that iteration was kept."
    if (seconds := iterations * run.seconds["train_seconds"] / run.iteration) > LOCATE_SECONDS:
        return (
            f"The last saved state is {iterations} iterations earlier, which would take about {seconds:.0f} s to repeat, so "
            "the cause was not searched for."
        )
    try:
        first_failure = search(guard.watch, run, state, iterations)
    except (RuntimeError, MemoryError) as error:  # device errors, such as out of memory
        return f"The search for the cause failed: {' '.join(str(error).split())[:300]}."
    if first_failure is None:
        return "The iterations were finite when they were repeated."
    iterations_before, origin = first_failure
    if origin is None:
        return "Outside the compiled programs, that iteration is finite."
    if isinstance(origin, int):
        place = f"state{guard.watch.paths[origin]}" if origin < len(guard.watch.paths) else "a delayed parameter"
        return f"Before that iteration, {place} was not finite."
    return Failure.from_origin(
        origin, begin + iterations_before + 1, run.experiment.has_members, run.experiment.behavior.agent.env
    )


def search(watch: Watch, run: Run, state: PyTree, iterations: int) -> tuple[int, Origin | int | None] | None:
    """Finds the first non-finite iteration of a run, and the origin of its non-finite value.

    A run is deterministic, so it is repeated from a finite state, `iterations` before a non-finite one, and bisected until one
    iteration is left, which is then evaluated outside the compiled programs, equation by equation. Returns the number of
    finite iterations before that one; and the origin, or the position of a non-finite leaf of the state (or of a register,
    counted after the leaves), or None if the iteration is finite there. Returns None if all iterations are finite this time.
    """
    leaves = jax.tree.leaves(run.program.unwrap(state))
    while (good := _last_good_state(watch, run, state, iterations)) is not None:
        origin = _find_origin(watch, run.program, good[0])
        if not isinstance(origin, int) or origin >= len(leaves) or non_finite(leaves, [origin]):
            return good[1], origin
        # A part of the state that is not watched, such as the environment's own, is the cause: find its first nan.
        watch.everything.append(origin)
    return None


def _last_good_state(watch: Watch, run: Run, state: PyTree, iterations: int) -> tuple[PyTree, int] | None:
    """Returns a finite state whose next iteration gives non-finite values, and the number of iterations up to it."""
    low, high, certain = 0, iterations, False
    while high - low > 1 or not certain:
        middle = (low + high) // 2 if certain else high
        next_state, metrics = run.program.run(state, middle - low, chunk=run.max_at_once)
        if first_non_finite(metrics) or not watch.is_whole(run.program.unwrap(next_state)):
            high, certain = middle, True
        elif middle == iterations:
            return None
        else:
            state, low = next_state, middle
    return state, low


def _find_origin(watch: Watch, program: Program, state: PyTree) -> Origin | int | None:
    """Returns the origin in the iteration after a state, in the equations as the policy connects them, including delays."""
    count = len(program.traced.jaxpr.in_avals)
    labels = [program.graph.labels[v] for v in program.graph.region.carry[:count]]
    graph = build_graph(program.traced.jaxpr, program.layout, labels, program.graph.axes[:count])
    if program.layout.staleness:
        delay(graph, program.layout.staleness, program.layout)
    region, device = graph.region, program.devices[0]
    registers = state.registers if isinstance(state, Delayed) else ()
    values = jax.device_put([*jax.tree.leaves(program.unwrap(state)), *registers], device)
    # Not a pytree operation: JAX sorts the keys of a dict, and variables have no order.
    env = dict(zip(region.carry, values, strict=True))
    constants = {v: jax.device_put(x, device) for v, x in graph.constants.items()}
    results = [*(region.next_carry[i] for i in watch.everything), *region.results]
    return find_origin([node.eqn for node in region.nodes], env, results, constants)
