"""Every value of an instruction list has one owner: read while it is alive, given away once, freed after its last reader."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Free, Loop, RunProgram, Schedule, Value
from msrl_jax.fragments.passes.lifetimes import add_lifetimes
from tests.support import random_loops, toy
from tests.support.compare import POLICIES
from tests.support.slow import mostly_slow, slow_unless


def follow(instructions, held, shared, leaves, later):
    """Follows the owners of values through a straight line, and through the bodies of its loops.

    Args:
      instructions: the line.
      held: what the line may give away.
      shared: what it may only read.
      leaves: what it leaves to the next time.
      later: what somebody reads after it.
    """
    alive, used = set(held), set()
    for i in instructions:
        reads = i.values if isinstance(i, Free) else i.reads()
        assert {*reads} <= alive | shared, f"reads what is not there: {i}"
        used.update(reads)
        given = []
        if isinstance(i, Free):
            given = list(i.values)
        elif isinstance(i, RunProgram):
            given = [*(i.inputs[k] for k in i.donated), *(buffer for buffer, _ in i.writes)]
            assert all(reads.count(v) == 1 for v in given), f"gives away what it reads twice: {i}"
        elif isinstance(i, Loop):
            given = [c.init for c in i.carry]
            assert not {*given} & {*i.consts}, f"gives away what the body reads: {i}"
            body = {c.body_in for c in i.carry}
            follow(i.body, body, shared | {*i.consts, *i.indices}, [c.body_out for c in i.carry], [])
        assert len({*given}) == len(given) and {*given} <= alive, f"gives away what is not its own: {i}"
        alive -= {*given}
        assert not alive & {*i.makes()}
        alive |= {*i.makes()}
    assert len({*leaves}) == len(leaves) and {*leaves} <= alive, "two carried values share memory, or one is gone"
    assert not {*leaves} & {*later} and {*later} <= alive | shared
    forgotten = alive - {*leaves} - {*later} - ({*held} - used)
    assert not forgotten, f"never freed: {sorted(map(str, forgotten))}"


def assert_owned(iteration, state, policy, axes, devices=None):
    s = msrl.compile(iteration, state, policy=policy, axes=axes, devices=devices).schedule
    held, leaves = ([v for copies in side for v in copies] for side in (s.inputs, s.outputs))
    follow(s.body, held, set(s.constants), leaves, [*s.metrics, *(v for _, scalars in s.checks for v in scalars)])


RUNS = [slow_unless(n == 4 or name == "Environments", name, n) for n in (1, 4) for name in POLICIES]


@pytest.mark.parametrize(("name", "num_devices"), RUNS)
def test_every_value_of_an_actor_critic_has_one_owner(name, num_devices, devices):
    assert_owned(toy.iteration, toy.initial_state(), msrl.policies.get(name), toy.AXES, devices[:num_devices])


@pytest.mark.parametrize("policy", random_loops.POLICIES, ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("seed", mostly_slow(range(8), "0", "1"))
def test_every_value_of_random_loops_has_one_owner(seed, policy):
    assert_owned(random_loops.make_iteration(seed), random_loops.initial_state(), policy, random_loops.axes())


def test_every_value_of_a_delayed_and_packed_run_has_one_owner():
    policy = msrl.policies.SingleLearnerCoarse(actors=2, staleness=2, trajectory_codec="scaled_uint8")
    assert_owned(toy.iteration, toy.initial_state(), policy, toy.AXES)


def test_values_with_several_readers_have_one_owner():
    """One array stands in two leaves, a metric, a constant of a loop and what the loop starts from; constants become leaves."""
    table = np.arange(8, dtype=np.float32)
    act = msrl.fragment(role="actor")(lambda w, x: x * w)
    learn = msrl.fragment(role="learner")(lambda w, x: w + x.mean())

    def iteration(state):
        def step(carry, _):
            w, x, y, _ = carry
            x = act(w, x + state["x"])
            return (learn(w, x), x, y + 1.0, state["kept"]), (x, 1.0)

        start = state["w"], state["x"], state["x"], state["reset"]
        (w, x, y, late), (rows, ones) = jax.lax.scan(step, start, None, length=3)
        after = {"w": w, "x": x + late, "again": x, "old": state["x"], "kept": state["kept"], "reset": table}
        return after, {"x": x, "y": y, "kept": state["kept"], "rows": rows, "ones": ones.sum(), "old": state["old"]}

    x = jnp.arange(8.0)
    state = {"w": jnp.float32(0.5), "x": x, "again": x, "old": x, "kept": x, "reset": x}
    axes = {"w": P(), "x": P("env"), "again": P("env"), "old": P("env"), "kept": P("env"), "reset": P("env")}
    for name in POLICIES:
        assert_owned(iteration, state, msrl.policies.get(name), axes)


@pytest.mark.parametrize("case", ["read after it", "read in its body", "carried twice"])
def test_a_loop_starts_from_memory_of_its_own(case):
    """What a loop starts from may be read afterwards, be read in its body, or be what it starts from twice."""
    act = msrl.fragment(role="actor")(lambda w, x: x * w)
    env_step = msrl.fragment(role="env")(lambda x, y: (x + y, y * 0.5))

    def iteration(state):
        w, x = state
        start = w, x, x if case == "carried twice" else jnp.zeros(8)

        def step(carry, _):
            w, x, y = carry
            x, y = env_step(act(w, x), y)
            return (w, x + (state[1] if case == "read in its body" else 0), y), None

        (w, after, y), _ = jax.lax.scan(step, start, None, length=3)
        return (w, after + y), {"x": env_step(x, y)[0] if case == "read after it" else y}

    axes = P(), P("env")
    for name in POLICIES:
        assert_owned(iteration, (jnp.float32(0.5), jnp.arange(8.0)), msrl.policies.get(name), axes)


def test_what_a_program_reads_twice_is_not_given_away():
    place = msrl.policies.Placement.over("all", jax.devices()[:1])
    kind = jax.core.ShapedArray((4,), np.dtype(np.float32))
    x, once, y, z = (Value(i, kind, place, "") for i in range(4))
    program = jax.make_jaxpr(lambda a, b, c: (a + b, c))(*[jnp.zeros(4)] * 3)
    run = RunProgram("add", place, program, (x, x, once), (y, z))
    settled = add_lifetimes(Schedule(((x,), (once,)), (run,), ((y,), (z,)), ()))
    assert [i.donated for i in settled.body if isinstance(i, RunProgram)] == [(2,)]
    follow(settled.body, [x, once], set(), [y, z], [])
