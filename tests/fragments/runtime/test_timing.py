"""Predicted times: the longest chain of instructions that wait for each other, by hand; and what is measured for it."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.fragments import measure
from msrl_jax.fragments.passes.instructions import Free, Loop, Move, RunProgram, walk
from msrl_jax.fragments.runtime.timing import Cost, measure_costs, predict_time
from msrl_jax.policies import SingleLearnerCoarse, SingleLearnerFine
from tests.support import toy


def compiled(policy):
    program = toy.program(policy)
    program.warm_up()
    return program


def costs_of(schedule, run, move, dispatch=0.0, other=0.0):
    """Costs by kind: `run` maps the name of a placement to seconds."""
    found = {}
    for i, _ in walk(schedule.body):
        if isinstance(i, RunProgram):
            found[i] = Cost(dispatch, run[i.placement.name] if i.fragments else other)
        elif isinstance(i, Move) and not i.is_copy:
            found[i] = Cost(dispatch, move)
        elif not isinstance(i, Loop | Free):
            found[i] = Cost(dispatch, other)
    return found


def test_synchronous_parts_wait_for_each_other_and_stale_ones_overlap():
    runs = {"actors": 3.0, "learners": 5.0}
    times = {}
    for staleness in (0, 1):
        program = compiled(SingleLearnerCoarse(staleness=staleness))
        acting = [i for i, _ in walk(program.schedule.body) if isinstance(i, RunProgram) and i.fragments]
        assert [i.placement.name for i in acting].count("learners") == 1
        acting = len(acting) - 1
        costs = costs_of(program.schedule, runs, 0.25)
        times[staleness] = predict_time(program.schedule, costs, ahead=2 + staleness)
        assert times[staleness].programs == {"actors": 3.0 * acting, "learners": 5.0}
    # Parameters go down, trajectories go up; with staleness the longer of acting and learning is all that counts.
    np.testing.assert_allclose(times[0].seconds, 3.0 * acting + 0.25 + 5.0 + 0.25)
    np.testing.assert_allclose(times[1].seconds, max(3.0 * acting, 5.0), atol=0.5)
    assert times[0].exchanges == 2


def test_a_delay_counts_once_for_each_exchange_in_a_chain():
    program = compiled("SingleLearnerFine")
    costs = costs_of(program.schedule, {"envs": 1.0, "learners": 1.0}, 0.0)
    plain, slow = (predict_time(program.schedule, costs, ahead=2, delay=delay) for delay in (0.0, 0.5))
    # Observations go up and actions down in every step of the unroll; then the learner has all that it needs but the last step.
    assert slow.exchanges == plain.exchanges >= 2 * toy.UNROLL
    assert 2 * toy.UNROLL * 0.5 <= slow.seconds - plain.seconds <= slow.exchanges * 0.5
    np.testing.assert_allclose(slow.transfers, slow.exchanges * 0.5)


def test_the_host_is_the_limit_where_its_calls_are():
    program = compiled("Central")
    instructions = sum(times for i, times in walk(program.schedule.body) if not isinstance(i, Loop | Free))
    costs = costs_of(program.schedule, {"workers": 1e-3, "server": 1e-3}, 1e-3, dispatch=1.0, other=1e-3)
    found = predict_time(program.schedule, costs, ahead=2)
    np.testing.assert_allclose([found.dispatch, found.seconds], instructions, rtol=1e-3)


@pytest.mark.parametrize("policy", [SingleLearnerFine(), SingleLearnerCoarse(staleness=1)])
def test_a_prediction_measures_a_state_that_stays_as_it_is(policy):
    program, state = compiled(policy), toy.initial_state()
    placed = program.place(state)
    before, _ = program.run(placed, 2)
    found = measure.predict(program, placed)
    assert 0 < found.seconds < 10 and set(found.programs) <= {p.name for p in program.layout.placements}
    after, _ = program.run(placed, 2)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), program.unwrap(before).params, program.unwrap(after).params)
    if not program.is_fused:
        costs = measure_costs(program.schedule, program.executables, program.state.place(state, copy=True))
        timed = {i for i, _ in walk(program.schedule.body) if not isinstance(i, Loop | Free)}
        assert set(costs) == timed and all(0 <= c.dispatch <= c.total for c in costs.values())
        assert found.exchanges == sum(n for i, n in walk(program.schedule.body) if isinstance(i, Move) and not i.is_copy)
    assert jnp.isfinite(program.unwrap(after).x).all()


def test_delays_within_each_other_add_up():
    program, state = compiled("SingleLearnerCoarse"), toy.initial_state()
    program.run(state, 1)
    with measure.delayed(program, 0.1), measure.named_in_traces(program), measure.delayed(program, 0.2):
        start = time.perf_counter()
        program.run(state, 1)
        assert time.perf_counter() - start > 2 * 0.3
    start = time.perf_counter()
    program.run(state, 1)
    assert time.perf_counter() - start < 2 * 0.3


@pytest.mark.parametrize("seconds", [-1, float("nan"), "x", None, True])
def test_a_delay_is_a_number_of_seconds(seconds):
    program = toy.program("GPUOnly")
    with pytest.raises(ValueError, match="must be a number of seconds of at least 0"):
        measure.delayed(program, seconds)
    with pytest.raises(ValueError, match="must be a number of seconds of at least 0"):
        measure.predict(program, toy.initial_state(), delay=seconds)
