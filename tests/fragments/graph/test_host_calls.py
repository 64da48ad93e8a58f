"""Functions that the host calls between programs: the same results as callbacks of `jax.jit`, in an order that overlaps."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments import host_fragment
from msrl_jax.fragments.passes.instructions import HostCall, Loop, Move, walk
from tests.support.compare import assert_close, run_plain
from tests.support.slow import slow_unless

ENVS, STEPS = 16, 3
POLICIES = [
    "MultiLearner",
    "SingleLearnerCoarse",
    "SingleLearnerCoarse:learners=2",
    "SingleLearnerFine",
    "Environments",
    "Central",
]


class Simulator:
    """`x <- 0.9 (x + action)` of some environments, and the order of its calls."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def __call__(self, *args):
        return self.start(*args)()

    def start(self, count, x, action):
        self.log.append(("start", self.name))
        after = (np.float32(0.9) * (x + action)).astype(np.float32)

        def finish():
            self.log.append(("finish", self.name))
            return count + np.int32(1), after, -np.abs(after)

        return finish


class State(NamedTuple):
    w: jax.Array
    x: tuple
    count: tuple


AXES = State(w=P(), x=P("env"), count=P())


def make(groups, log, **fragment_options):
    """An iteration with some groups of environments, and its initial state."""
    size = jax.ShapeDtypeStruct((ENVS // groups,), jnp.float32)
    results = (jax.ShapeDtypeStruct((), jnp.int32), size, size)
    calls = [host_fragment(Simulator(f"s{g}", log), results, name=f"s{g}") for g in range(groups)]

    @msrl.fragment(role="actor")
    def act(w, x):
        return jnp.tanh(w * x)

    @msrl.fragment(role="learner")
    def learn(w, reward):
        return w + 0.1 * reward.mean()

    def env_step(g):
        @msrl.fragment(role="env")
        def step(count, x, action):
            count, x, reward = calls[g](count, x, action)
            return count, x, 2 * reward

        return step

    steps = [env_step(g) for g in range(groups)]

    def iteration(state):
        def step(carry, _):
            outs = [steps[g](count, x, act(state.w, x)) for g, (count, x) in enumerate(carry)]
            return [(count, x) for count, x, _ in outs], [reward for _, _, reward in outs]

        carry, rewards = jax.lax.scan(step, list(zip(state.count, state.x, strict=True)), None, length=STEPS)
        w = learn(state.w, jnp.concatenate(rewards, 1))
        return State(w, tuple(x for _, x in carry), tuple(count for count, _ in carry)), {"w": w}

    x = jnp.linspace(-1, 1, ENVS).reshape(groups, -1)
    return iteration, State(jnp.float32(0.5), tuple(x), tuple(jnp.zeros(groups, jnp.int32)))


def is_fast(devices, policy, groups):
    if devices == 1:
        return policy == "SingleLearnerCoarse" and groups == 1
    return groups == 2 and policy in ("Environments", "SingleLearnerFine")


NEEDS_THREE = (1, "SingleLearnerCoarse:learners=2")
RUNS = [run for run in itertools.product((1, 4), POLICIES, (1, 2)) if run[:2] != NEEDS_THREE]


@pytest.mark.parametrize(("devices", "policy", "groups"), [slow_unless(is_fast(*run), *run) for run in RUNS])
def test_a_loop_around_a_host_call_equals_its_callbacks_under_jit(devices, policy, groups):
    iteration, state = make(groups, [])
    expected = run_plain(iteration, state, 2)
    program = msrl.compile(iteration, state, policy=msrl.policies.get(policy), axes=AXES, devices=jax.devices()[:devices])
    assert_close(program.run(state, 2), expected)
    calls = [times for i, times in walk(program.instructions) if isinstance(i, HostCall)]
    assert calls == [STEPS] * groups


def test_every_call_happens_once_and_a_group_is_simulated_while_another_acts():
    log = []
    iteration, state = make(2, log)
    program = msrl.compile(iteration, state, policy=msrl.policies.MultiLearner(), axes=AXES)
    program.warm_up()
    assert not log  # planning and compiling call nothing
    program.run(state, 1)
    start, finish = [("start", "s0"), ("start", "s1")], [("finish", "s0"), ("finish", "s1")]
    between = [pair for g in (0, 1) for pair in (finish[g], start[g])]
    assert log == [*start, *between * (STEPS - 1), *finish]


def test_without_groups_nothing_overlaps():
    log = []
    iteration, state = make(1, log)
    msrl.compile(iteration, state, policy=msrl.policies.MultiLearner(), axes=AXES).run(state, 1)
    assert log == [("start", "s0"), ("finish", "s0")] * STEPS


def test_a_step_moves_actions_and_results_once():
    iteration, state = make(1, [])
    program = msrl.compile(iteration, state, policy=msrl.policies.MultiLearner(), axes=AXES)
    (loop,) = [i for i in program.instructions if isinstance(i, Loop)]
    moved = [v.label for i in loop.body if isinstance(i, Move) and not i.is_copy for v in i.results]
    assert sorted(moved) == ["act()", "s0()[2]", "state.x[0]"]
    plan = program.explain()
    assert [(call.name, call.calls) for call in plan.host_calls] == [("s0", STEPS)]
    assert "called by the host" in str(plan)
    assert plan.placements["host"] == ("cpu:0",)


@pytest.mark.parametrize("policy", [msrl.policies.GPUOnly(), msrl.policies.GPUOnly(num_devices=1)], ids=str)
def test_a_policy_of_one_program_refuses_host_calls(policy):
    iteration, state = make(1, [])
    with pytest.raises(ValueError, match="has to call 's0' between programs; use a policy with several placements"):
        msrl.compile(iteration, state, policy=policy, axes=AXES)


def test_staleness_delays_the_parameters_of_actors_as_on_devices():
    iteration, state = make(2, [])
    policy = msrl.policies.SingleLearnerCoarse(staleness=1)
    program = msrl.compile(iteration, state, policy=policy, axes=AXES)
    after, metrics = program.run(state, 3)
    w, x = [0.5, *metrics["w"]], np.concatenate(state.x)
    for i, old in enumerate([w[0], w[0], w[1]]):  # actors lag by one iteration
        rewards = []
        for _ in range(STEPS):
            x = (np.float32(0.9) * (x + np.tanh(np.float32(old) * x))).astype(np.float32)
            rewards.append(-2 * np.abs(x))
        np.testing.assert_allclose(metrics["w"][i], w[i] + 0.1 * np.mean(rewards), rtol=1e-5)
    np.testing.assert_allclose(np.concatenate(program.unwrap(after).x), x, rtol=1e-5)


def test_an_error_of_the_function_reaches_the_caller_and_the_program_runs_again():
    fails = [True]

    def function(x):
        if fails[0]:
            raise ConnectionError("the robot does not answer")
        return x + 1

    host = host_fragment(function, jax.ShapeDtypeStruct((4,), jnp.float32), name="robot")
    learn = msrl.fragment(role="learner")(lambda x: x * 2)
    iteration, policy = lambda x: (learn(host(x)), {}), msrl.policies.MultiLearner()
    program = msrl.compile(iteration, jnp.zeros(4), policy=policy, axes=P("env"), devices=jax.devices()[:2])
    with pytest.raises(ConnectionError, match="robot does not answer"):
        program.run(jnp.zeros(4), 1)
    fails[0] = False
    np.testing.assert_array_equal(program.run(jnp.zeros(4), 2)[0], np.full(4, 6.0))


def test_results_may_share_memory_that_the_function_uses_again():
    memory = np.zeros(4, np.float32)

    def function(x):
        memory[:] = x + 1
        return memory

    host = host_fragment(function, jax.ShapeDtypeStruct((4,), jnp.float32))
    learn = msrl.fragment(role="learner")(lambda a, b: jnp.stack([a, b]))

    def iteration(x):
        first = host(x)
        return learn(first, host(first))[1], {"both": learn(first, host(first + 10))}

    program = msrl.compile(
        iteration, jnp.zeros(4), policy=msrl.policies.MultiLearner(num_devices=1), axes=P("env"), devices=jax.devices()[:1]
    )
    assert program.run(jnp.zeros(4), 1)[1]["both"][0, :, 0].tolist() == [1, 12]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda x: x.astype(np.float64), r"result of host fragment 'f' is float64\[4\], but it declares float32\[4\]"),
        (lambda x: x[:2], r"result of host fragment 'f' is float32\[2\], but it declares float32\[4\]"),
        (lambda x: (x, x), r"host fragment 'f' returned PyTreeDef\(\(\*, \*\)\), but declares PyTreeDef\(\*\)"),
    ],
    ids=["dtype", "shape", "structure"],
)
def test_results_of_another_type_are_refused(returned, message):
    host = host_fragment(returned, jax.ShapeDtypeStruct((4,), jnp.float32), name="f")
    program = msrl.compile(lambda x: (host(x), {}), jnp.zeros(4), policy=msrl.policies.MultiLearner())
    with pytest.raises(TypeError, match=message):
        program.run(jnp.zeros(4), 1)


def test_what_the_host_cannot_do_is_refused_in_words():
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)
    host = host_fragment(lambda x: x, struct, name="f")
    with pytest.raises(ValueError, match=r"'f' runs on the host, where jax.vmap cannot batch"):
        jax.vmap(host)(jnp.zeros((2, 4)))
    with pytest.raises(TypeError, match=r"argument\[0\] of host fragment 'f' is a typed key; pass jax.random.key_data"):
        host(jax.random.key(0))
    with pytest.raises(TypeError, match="host fragment 'f' declares 3 for result; declare a"):
        host_fragment(lambda x: x, 3, name="f")
    iteration = lambda x: (jax.lax.cond(x[0] > 0, host, lambda x: x, x), {})
    with pytest.raises(ValueError, match=r"a `cond` holds calls of the host: fragment 'f' \(role 'host'\) runs at host"):
        msrl.compile(iteration, jnp.zeros(4), policy=msrl.policies.MultiLearner())


def test_a_loop_of_host_calls_alone_is_opened_and_unused_results_do_not_remove_them():
    calls = []
    host = host_fragment(lambda i: (calls.append(int(i)), i + 1)[1], jax.ShapeDtypeStruct((), jnp.int32), name="count")
    learn = msrl.fragment(role="learner")(lambda x: x + 1)

    def iteration(state):
        x, i = state
        i, _ = jax.lax.scan(lambda i, _: (host(i), None), i, None, length=3)
        host(i)
        return (learn(x), i), {}

    program = msrl.compile(iteration, (jnp.float32(0), jnp.int32(0)), policy=msrl.policies.MultiLearner())
    (x, i), _ = program.run((jnp.float32(0), jnp.int32(0)), 2)
    assert (float(x), int(i)) == (2, 6)
    assert calls == [0, 1, 2, 3, 3, 4, 5, 6]
