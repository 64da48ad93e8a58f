"""Scans that span placements, in every form that a rollout may take: constants stacked, no steps, nothing carried."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import RunProgram, walk
from msrl_jax.policies import Layout, Placement
from tests.support.compare import POLICIES, assert_close, run_plain
from tests.support.slow import slow_unless

ENVS = 8
TABLE = np.linspace(0.5, 1.5, ENVS, dtype=np.float32)
scale = jax.jit(lambda x: x * TABLE + jnp.asarray([1.5] * ENVS))


@msrl.fragment(role="actor")
def act(w, x):
    return jnp.tanh(w * x)


@msrl.fragment(role="env")
def env_step(x, action):
    return 0.9 * x + 0.1 * action


@msrl.fragment(role="learner")
def fit(w, x):
    return w + 0.1 * x.mean()


@msrl.fragment(role="env")
def rewards(x):
    return x.sum(-1), jnp.bool(False), 1.0  # termination and discount are constants, as in many environments


def initial_state():
    keys = jax.random.split(jax.random.key(3), ENVS)
    return {"w": jnp.float32(0.5), "x": jnp.arange(ENVS, dtype=jnp.float32), "keys": keys}


AXES = {"w": P(), "x": P("env"), "keys": P("env")}


def both(w, x):
    x = env_step(x, act(w, x))
    return fit(w, x), x


def constants_are_stacked(state, length=3):
    def step(carry, _):
        carry = both(*carry)
        return carry, (jnp.float32(1), False, 7, carry[1], np.ones(2, np.int8), jnp.ones(3))

    (w, x), stacked = jax.lax.scan(step, (state["w"], state["x"]), None, length=length)
    return {**state, "w": w, "x": x}, {str(i): y for i, y in enumerate(stacked)}


def constants_of_fragments_are_stacked(state):
    def step(carry, _):
        w, x = both(*carry)
        reward, done, discount = rewards(x)
        return (w, x), (reward, done, discount)

    (w, x), (reward, done, discount) = jax.lax.scan(step, (state["w"], state["x"]), None, length=3)
    return {**state, "w": fit(w, reward * discount), "x": x}, {"done": done, "reward": reward}


def no_steps(state):
    return constants_are_stacked(state, length=0)


def no_steps_with_rows(state):
    def step(carry, row):
        w, x = both(carry[0], carry[1] + row[0])
        return (w, x, carry[2]), (row[0] * 2, x, carry[2], row[1])  # keys are stacked too

    rows = jnp.zeros((0, ENVS)), jnp.zeros(0, jnp.int8)
    start = state["w"], state["x"], state["keys"]
    (w, x, keys), stacked = jax.lax.scan(step, start, rows, reverse=True)
    return {"w": w, "x": x, "keys": keys}, {"a": stacked[0], "b": fit(w, jnp.append(stacked[1].sum(0), 1.0)), "d": stacked[3]}


def no_steps_inside(state):
    def outer(carry, _):
        def step(carry, _):
            return both(*carry), (carry[0], 1.0)

        carry, (inner, ones) = jax.lax.scan(step, carry, None, length=0)
        return both(*carry), (inner, ones, carry[0])

    (w, x), stacked = jax.lax.scan(outer, (state["w"], state["x"]), None, length=2)
    return {**state, "w": w, "x": x}, {"stacked": stacked}


def constants_in_nested_loops(state):
    def outer(carry, row):
        def step(carry, _):
            return both(*carry), (2.0, carry[0])

        carry, (twos, ws) = jax.lax.scan(step, carry, None, length=2, reverse=True)
        return carry, (twos, 3, ws, row)

    (w, x), stacked = jax.lax.scan(outer, (state["w"], state["x"]), jnp.arange(3.0))
    return {**state, "w": w, "x": x}, {"stacked": stacked}


def rows_pass_through(state):
    def step(carry, row):
        return both(carry[0], carry[1] + row[0]), (row[0], row[1], carry[0], row[0])

    rows = jnp.ones((4, ENVS)) * state["w"], jnp.arange(4)
    (w, x), stacked = jax.lax.scan(step, (state["w"], state["x"]), rows)
    return {**state, "w": w, "x": x}, {"stacked": stacked}


def keys_are_stacked_and_read(state):
    @msrl.fragment(role="learner")
    def draw(w, keys):
        return w + jax.vmap(jax.random.normal)(keys.reshape(-1)).mean()

    def step(carry, _):
        w, x, keys = carry
        w, x = both(w, x)
        after = jax.vmap(lambda k: jax.random.split(k, 1)[0])(keys)
        return (w, x, after), keys

    (w, x, keys), stacked = jax.lax.scan(step, (state["w"], state["x"], state["keys"]), None, length=3)
    return {"w": draw(w, stacked), "x": x, "keys": keys}, {"w": w}


def captured_arrays_inside(state):
    def step(carry, _):
        w, x = both(*carry)
        return (w, scale(x) / TABLE), x * jnp.asarray(TABLE)

    (w, x), stacked = jax.lax.scan(step, (state["w"], state["x"]), None, length=2)
    return {**state, "w": w, "x": x}, {"stacked": stacked.sum()}


def unrolled_without_carry(state):
    def step(_, row):
        return None, (env_step(row, act(state["w"], row)), fit(state["w"], row))

    _, (xs, ws) = jax.lax.scan(step, None, jnp.stack([state["x"]] * 4), unroll=2)
    return {**state, "w": ws.sum(), "x": xs[-1]}, {}


CASES = [
    constants_are_stacked,
    constants_of_fragments_are_stacked,
    no_steps,
    no_steps_with_rows,
    no_steps_inside,
    constants_in_nested_loops,
    rows_pass_through,
    keys_are_stacked_and_read,
    captured_arrays_inside,
    unrolled_without_carry,
]


class Apart:
    """Every role on a device of its own."""

    def layout(self, devices, sizes):
        roles = zip(("env", "actor", "learner"), devices, strict=False)
        return msrl.policies.Layout({role: msrl.policies.Placement.over(role, [d]) for role, d in roles}, policy="Apart()")


def test_a_row_that_nothing_reads_is_stored_where_the_loop_runs_no_program(devices):
    @msrl.fragment(role="actor")
    def with_row(w, x, row):  # holds a fragment of another role, so it is opened; `lax.scan` does not see that it returns a row
        return env_step(x, act(w, x)), row

    def iteration(state):
        rows = jnp.arange(3.0) * state["w"]
        x, stacked = jax.lax.scan(lambda x, row: with_row(state["w"], x, row), state["x"], rows)
        return {**state, "w": fit(state["w"], x), "x": x}, {"stacked": stacked}

    program = msrl.compile(iteration, initial_state(), policy=Apart(), axes=AXES, devices=devices)
    assert any(isinstance(i, RunProgram) and i.name == "write row" and i.rows for i, _ in walk(program.instructions))
    assert_close(program.run(initial_state(), 2), run_plain(iteration, initial_state(), 2))


def test_literals_of_equal_bytes_and_several_types_are_apart(devices):
    def iteration(state):
        def step(carry, _):
            w, x, n, total = carry
            w, x = both(w, x)
            return (w, x, n + 1, total + x.sum()), None

        (w, x, n, total), _ = jax.lax.scan(step, (state["w"], state["x"], 0, 0.0), None, length=3)
        return {**state, "w": w, "x": x}, {"n": n, "total": total, "zeros": (0, 0.0)}

    program = msrl.compile(iteration, initial_state(), policy=Apart(), axes=AXES, devices=devices)
    found, expected = program.run(initial_state(), 2), run_plain(iteration, initial_state(), 2)
    assert_close(found, expected)
    assert [x.dtype for x in jax.tree.leaves(found[1])] == [x.dtype for x in jax.tree.leaves(expected[1])]


@functools.cache
def expected(case):
    return run_plain(case, initial_state(), 2)


def is_fast(case, name, num_devices):
    """The others divide the loops as these two do, which take turns."""
    fused = name == "GPUOnly" and case in (no_steps_with_rows, constants_in_nested_loops)
    return num_devices == 4 and (fused or name == ("SingleLearnerCoarse", "Environments")[CASES.index(case) % 2])


RUNS = [slow_unless(is_fast(*run), *run) for run in itertools.product(CASES, POLICIES, (1, 4))]


@pytest.mark.parametrize(("case", "name", "num_devices"), RUNS)
def test_loops_are_those_of_jit(case, name, num_devices, devices):
    state = initial_state()
    program = msrl.compile(case, state, policy=msrl.policies.get(name), axes=AXES, devices=devices[:num_devices])
    assert_close(program.run(state, 2), expected(case))


COARSE = msrl.policies.SingleLearnerCoarse()


@msrl.fragment(role="actor", name="act")
def add_one(x):
    return x + 1


@msrl.fragment(role="learner", name="fit")
def double(x):
    return x * 2


def compile_(iteration, state, policy=COARSE, **options):
    return msrl.compile(iteration, state, policy=policy, **options)


def test_a_cond_over_two_placements_is_refused():
    def iteration(s):
        return jax.lax.cond(s.sum() > 0, lambda x: add_one(x), lambda x: double(x), s), {}

    with pytest.raises(ValueError, match=r"`cond` spans placements: fragment 'fit'.*learners.*'act'.*actors.*jnp.where"):
        compile_(iteration, jnp.ones(4))
    after, _ = compile_(iteration, jnp.ones(4), msrl.policies.GPUOnly()).run(jnp.ones(4), 1)
    np.testing.assert_array_equal(after, 2.0 * np.ones(4))


def test_a_while_over_two_placements_is_refused():
    def iteration(s):
        return jax.lax.while_loop(lambda x: x.sum() < 100, lambda x: double(add_one(x)), s), {}

    with pytest.raises(ValueError, match=r"`while` loop spans placements.*scan or fori_loop"):
        compile_(iteration, jnp.ones(4))


def test_a_role_without_a_placement_is_named():
    class OnlyActors:
        def layout(self, devices, sizes):
            return Layout({"actor": Placement.over("actors", devices[:1])}, policy="OnlyActors()")

    with pytest.raises(ValueError, match=r"'fit' has role 'learner', for which policy OnlyActors\(\) has no placement"):
        compile_(lambda s: (double(add_one(s)), {}), jnp.ones(4), OnlyActors())


def test_a_role_of_ones_own_is_refused_with_the_one_that_every_policy_places():
    def iteration(role):
        return lambda s: (msrl.fragment(role=role)(lambda s: 2 * s)(s), {})

    with pytest.raises(ValueError, match=r"role 'adapter', for which policy GPUOnly\(\).*custom suffix \('actor:adapter'\)"):
        compile_(iteration("adapter"), jnp.ones(4), msrl.policies.GPUOnly())
    after, _ = compile_(iteration("actor:adapter"), jnp.ones(4), msrl.policies.GPUOnly()).run(jnp.ones(4), 1)
    np.testing.assert_array_equal(after, 2.0 * np.ones(4))


def test_a_policy_without_a_home_for_the_state_is_told_of_the_role():
    class Trainer:
        def layout(self, devices, sizes):
            roles = {"actor": Placement.over("a", devices[:1]), "trainer": Placement.over("b", devices[1:2])}
            return Layout(roles, policy="Trainer()")

    fit = msrl.fragment(role="trainer")(jnp.cos)
    with pytest.raises(ValueError, match=r"Trainer\(\) places \['actor', 'trainer'\], but values .* the role 'learner'; add"):
        compile_(lambda x: (fit(msrl.fragment(role="actor")(jnp.sin)(x)), {}), jnp.ones(4), Trainer())
