"""One source gives the same training run under every policy and on every number of devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from tests.support import random_loops, toy
from tests.support.compare import POLICIES, assert_close, run_plain
from tests.support.slow import mostly_slow, slow_unless


@pytest.fixture(scope="module")
def toy_reference():
    return run_plain(toy.iteration, toy.initial_state(), 4)


OFTEN = {
    ("GPUOnly", 2),
    ("MultiLearner", 8),
    ("SingleLearnerCoarse", 4),
    ("SingleLearnerFine", 8),
    ("Environments", 1),
    ("Central", 2),
}
RUNS = [(name, n) for n in (1, 2, 4, 8) for name in POLICIES]


@pytest.mark.parametrize(("name", "num_devices"), [slow_unless(r in OFTEN, *r) for r in RUNS])
def test_actor_critic_is_the_same_run(name, num_devices, toy_reference):
    assert_close(toy.program(name, num_devices).run(toy.initial_state(), 4, chunk=2), toy_reference)


def hierarchy(state):
    """Unlike PPO: a manager of workers, nested loops, a fragment used twice, a carry that no fragment uses."""

    @msrl.fragment(role="learner")
    def score(goal, x):
        return jnp.tanh(x @ goal)

    @msrl.fragment(role="actor")
    def manager(goal, x, bonus):
        return goal + 0.1 * jnp.sin(goal) * score(goal, x).mean() + bonus  # holds a fragment of another role

    @msrl.fragment(role="env")
    def world(x, push):
        return 0.8 * x + 0.2 * jnp.cos(push)[:, None]

    @msrl.fragment(role="server")
    def ledger(total, value):
        return total + value, jnp.sqrt(jnp.abs(total) + 1)

    def outer(carry, weight):
        goal, x, total, untouched, clock = carry
        goal = manager(goal, x, weight)

        def inner(carry, _):
            x, total, t = carry
            push = score(goal, x)
            x = world(x, push)
            total, root = ledger(total, push.mean())
            return (x, total, t + 1), (push.max(), root, t)

        (x, total, clock), (pushes, roots, times) = jax.lax.scan(inner, (x, total, clock), None, length=3, reverse=True)
        final = score(-goal, x)  # the same fragment again, on other values
        return (goal, x, total, untouched[::-1], clock), (pushes, roots.sum(), final, times)

    weights = jnp.linspace(0.0, 1.0, 4)
    start = state["goal"], state["x"], state["total"], state["untouched"], state["clock"]
    (goal, x, total, untouched, clock), (pushes, roots, finals, times) = jax.lax.scan(outer, start, weights)
    after = {"goal": goal, "x": x, "total": total, "untouched": untouched, "clock": clock}
    return after, {"push": pushes.mean(), "root": roots.sum(), "final": finals.sum(0).mean(), "times": times.sum()}


def hierarchy_state():
    return {
        "goal": jnp.array([0.3, -0.7]),
        "x": jax.random.normal(jax.random.key(0), (16, 2)),
        "total": jnp.float32(0),
        "untouched": jnp.arange(5),
        "clock": jnp.int32(0),
    }


@pytest.fixture(scope="module")
def hierarchy_reference():
    return run_plain(hierarchy, hierarchy_state(), 3)


@pytest.mark.parametrize("num_devices", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4)), 8])
@pytest.mark.parametrize("name", mostly_slow(POLICIES, "Environments", "Central"))
def test_hierarchy_is_the_same_run(name, num_devices, hierarchy_reference, devices):
    state = hierarchy_state()
    axes = {"goal": P(), "x": P("env"), "total": P(), "untouched": P(), "clock": P()}
    policy = msrl.policies.get(name)
    program = msrl.compile(hierarchy, state, policy=policy, axes=axes, devices=devices[:num_devices])
    assert_close(program.run(state, 3), hierarchy_reference)


by_name = pytest.mark.parametrize("policy", random_loops.POLICIES, ids=lambda p: type(p).__name__)


def assert_same_run(seed, policy):
    """Asserts that a random loop computes and logs the same as under plain `jax.jit`."""
    iteration, state = random_loops.make_iteration(seed), random_loops.initial_state()
    random_loops.LOG.clear()
    expected = run_plain(iteration, state, 3)
    jax.effects_barrier()
    reference = list(random_loops.LOG)
    program = msrl.compile(iteration, state, policy=policy, axes=random_loops.axes())
    random_loops.LOG.clear()
    after = program.run(state, 3)
    jax.effects_barrier()
    assert_close(after, expected, rtol=2e-5, atol=2e-5)
    assert [entry[0] for entry in random_loops.LOG] == [entry[0] for entry in reference]
    ours, theirs = ([v for entry in log for v in entry[1:]] for log in (random_loops.LOG, reference))
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


RANDOM = [(seed, policy, f"{seed}-{type(policy).__name__}") for seed in (0, 2, 6, 12, 16) for policy in random_loops.POLICIES]
EACH_TIME = ("0-Scattered", "0-Apart", "12-Central")


@pytest.mark.parametrize(("seed", "policy"), [slow_unless(name in EACH_TIME, *case, id=name) for *case, name in RANDOM])
def test_random_loops_are_the_same_run(seed, policy):
    assert_same_run(seed, policy)


def test_arguments_and_results_of_one_shape_may_be_sharded_in_two_ways():
    """Here a donated argument has the shape of two results, all of which XLA shards as it likes."""
    assert_same_run(142, random_loops.Apart())


def test_a_program_on_one_device_takes_no_token_for_a_loop_of_no_steps():
    """Its body logs, inside of a fragment and another loop."""
    assert_same_run(1015, random_loops.Scattered())


@pytest.mark.slow
@by_name
@pytest.mark.parametrize("first", range(100, 1100, 50))
def test_a_thousand_random_loops_are_the_same_run(first, policy):
    for seed in range(first, first + 50):
        assert_same_run(seed, policy)
        jax.clear_caches()


def test_undeclared_axes_cost_speed_but_not_results():
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.SingleLearnerFine(learners=2))
    assert_close(program.run(state, 3), run_plain(toy.iteration, state, 3))


def test_members_vmapped_are_the_same_runs():
    states = jax.vmap(lambda d: toy.initial_state()._replace(x=toy.initial_state().x + d))(jnp.arange(3.0))
    iteration = jax.vmap(toy.iteration)
    axes = toy.State(P(), P(), P(None, "env"), P(None, "env"), P(), P())
    program = msrl.compile(iteration, states, policy=msrl.policies.Central(shards=2), axes=axes)
    result, metrics = program.run(states, 2)
    for member in range(3):
        alone = jax.tree.map(lambda x, m=member: x[m], states)
        expected = run_plain(toy.iteration, alone, 2)
        assert_close(jax.tree.map(lambda x, m=member: x[m], result), expected[0])
        assert_close(jax.tree.map(lambda x, m=member: x[:, m], metrics), expected[1])
