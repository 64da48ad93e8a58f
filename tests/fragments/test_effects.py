"""Effects run as often, and in the same order, as under `jax.jit`, wherever the code with effects is."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import msrl_jax as msrl
from tests.support.compare import POLICIES, assert_close, run_plain
from tests.support.slow import slow_unless
from tests.support.small_loop import AXES, ENVS, act, env_step, initial_state, learn, rollout

ITERATIONS = 3
LOG: list = []


def note(name, *values):
    LOG.append((name, *(np.asarray(v).tolist() for v in values)))


def count_up():
    """A host counter: it returns how often it was called."""
    LOG.append(("batch",))
    return np.full(ENVS, LOG.count(("batch",)), np.float32)


def one_batch_for_two_readers(state):
    batch = io_callback(count_up, jax.ShapeDtypeStruct((ENVS,), jnp.float32), ordered=True)
    x = env_step(state["x"], act(state["w"], batch))
    return learn(state, x, batch), {"batch": batch.mean()}


def unordered_batch_for_actors_alone(state):
    batch = io_callback(count_up, jax.ShapeDtypeStruct((ENVS,), jnp.float32))
    x = env_step(state["x"], act(state["w"], batch))
    return learn(state, x, x), {}


def results_that_nobody_reads(state):
    io_callback(lambda n: note("start", n), None, state["n"], ordered=True)
    x, _ = rollout(state)
    io_callback(lambda w: note("params", w), None, state["w"], ordered=True)
    after = learn(state, x, x)
    io_callback(lambda w, x: note("end", w, x), None, after["w"], x.sum(), ordered=True)
    jax.debug.callback(lambda n: note("debug", n), after["n"])
    return after, {}


def in_a_loop_that_spans_placements(state):
    def in_step(x, action, t):
        io_callback(lambda t, a: note("step", t, a), None, t, action[0], ordered=True)

    x, actions = rollout(state, in_step)
    io_callback(lambda a: note("after", a), None, actions.sum(), ordered=True)
    return learn(state, x, x), {"actions": actions.sum()}


def from_time_to_time(state):
    x, _ = rollout(state)
    jax.lax.cond(
        state["n"] % 2 == 0, lambda w: io_callback(lambda w: note("even", w), None, w, ordered=True), lambda w: None, state["w"]
    )
    return learn(state, x, x), {}


def inside_of_fragments(state):
    @msrl.fragment(role="actor")
    def talk(x):
        io_callback(lambda x: note("actor", x), None, x.sum(), ordered=True)
        return x * 1.5

    @msrl.fragment(role="learner")
    def only_talk(w):
        io_callback(lambda w: note("learner", w), None, w, ordered=True)

    x, _ = rollout(state)
    x = talk(x)
    only_talk(state["w"])
    return learn(state, x, x), {}


def a_carry_that_a_callback_makes(state):
    def count(n):
        note("count", n)
        return np.int32(n + 2)

    n = io_callback(count, jax.ShapeDtypeStruct((), jnp.int32), state["n"], ordered=True)
    x, _ = rollout(state)
    return {**learn(state, x, x), "n": n}, {"n": n}


def placements_take_turns(state):
    """Every effect could join a program of its placement that runs before the effect in front of it."""
    x, actions = rollout(state)
    io_callback(lambda a: note("actor", a), None, actions.sum(), ordered=True)
    after = learn(state, x, x)
    io_callback(lambda w: note("learner", w), None, after["w"], ordered=True)
    io_callback(lambda a: note("actor again", a), None, actions.mean(), ordered=True)
    io_callback(lambda w: note("learner again", w), None, 2 * after["w"], ordered=True)
    return after, {}


def an_early_effect_that_a_late_program_reads(state):
    def count(n):
        note("count", n)
        return np.float32(n)

    n = io_callback(count, jax.ShapeDtypeStruct((), jnp.float32), state["n"], ordered=True)
    x, actions = rollout(state)
    io_callback(lambda a: note("actor", a), None, actions.sum(), ordered=True)
    return learn(state, x, x + n), {}


CASES = [
    placements_take_turns,
    an_early_effect_that_a_late_program_reads,
    one_batch_for_two_readers,
    unordered_batch_for_actors_alone,
    results_that_nobody_reads,
    in_a_loop_that_spans_placements,
    from_time_to_time,
    inside_of_fragments,
    a_carry_that_a_callback_makes,
]


@functools.cache
def expected(case):
    """The results and the log of plain `jax.jit`."""
    LOG.clear()
    result = run_plain(case, initial_state(), ITERATIONS)
    jax.effects_barrier()
    return result, list(LOG)


def assert_same_log(log, reference):
    """The same entries in the same order; JAX orders debugging callbacks among themselves, and all others likewise."""
    for kind in (lambda entry: entry[0] == "debug", lambda entry: entry[0] != "debug"):
        ours, theirs = [e for e in log if kind(e)], [e for e in reference if kind(e)]
        assert [e[0] for e in ours] == [e[0] for e in theirs]
        for (_, *values), (_, *expected) in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-5)


def is_fast(case, name, num_devices):
    """Policies that divide loops in different ways take turns; more of them where most depends on the way."""
    others = ("SingleLearnerCoarse", "Environments") if case in (placements_take_turns, in_a_loop_that_spans_placements) else ()
    return num_devices == 4 and name in (POLICIES[CASES.index(case) % len(POLICIES)], *others)


RUNS = [slow_unless(is_fast(*run), *run) for run in itertools.product(CASES, POLICIES, (1, 4))]


@pytest.mark.parametrize(("case", "name", "num_devices"), RUNS)
def test_effects_are_those_of_jit(case, name, num_devices, devices):
    reference, log = expected(case)
    program = msrl.compile(case, initial_state(), policy=msrl.policies.get(name), axes=AXES, devices=devices[:num_devices])
    LOG.clear()
    result = program.run(initial_state(), ITERATIONS, chunk=2)
    jax.effects_barrier()
    assert_same_log(LOG, log)
    assert_close(result, reference)


def ordered_prints(state):
    jax.debug.callback(lambda n: note("debug", n), state["n"], ordered=True)
    x, _ = rollout(state)
    return learn(state, x, x), {}


def test_ordered_debugging_callbacks_need_one_device(devices):
    """JAX orders them on one device only: a placement of several refuses before anything runs."""
    for policy in (msrl.policies.SingleLearnerCoarse(), msrl.policies.GPUOnly()):
        program = msrl.compile(ordered_prints, initial_state(), policy=policy, axes=AXES, devices=devices[:1])
        LOG.clear()
        program.run(initial_state(), ITERATIONS)
        jax.effects_barrier()
        assert [("debug", i) for i in range(ITERATIONS)] == LOG
    program = msrl.compile(ordered_prints, initial_state(), policy=msrl.policies.MultiLearner(), axes=AXES, devices=devices[:4])
    LOG.clear()
    with pytest.raises(ValueError, match=r"ordered effects.*4 devices.*io_callback"):
        program.run(initial_state(), 1)
    assert not LOG


def test_an_effect_between_learner_and_delayed_actor_is_refused():
    def iteration(state):
        w = io_callback(lambda w: w, jax.ShapeDtypeStruct((), jnp.float32), state["w"])
        x = env_step(state["x"], act(w, state["x"]))
        return learn(state, x, x), {}

    with pytest.raises(ValueError, match=r"`io_callback` has effects and is between a learner and act"):
        msrl.compile(iteration, initial_state(), policy=msrl.policies.SingleLearnerCoarse(staleness=1), axes=AXES)


def test_mutable_references_outside_of_fragments_are_refused():
    def iteration(state):
        total = jax.new_ref(state["w"])
        total[...] += 1.0
        x, _ = rollout(state)
        return learn(state, x, x), {"total": total[...]}

    for name in POLICIES:
        with pytest.raises(ValueError, match=r"outside of fragments makes a mutable reference.*carry its value"):
            msrl.compile(iteration, initial_state(), policy=msrl.policies.get(name), axes=AXES)
