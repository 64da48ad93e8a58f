"""Shardings from program to program, and small arrays of a Move that travel as one."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Move, RunProgram, walk
from msrl_jax.fragments.runtime import execute as runtime
from msrl_jax.fragments.runtime.coalesce import SMALL
from msrl_jax.policies import Central
from tests.support import toy
from tests.support.compare import as_numpy, assert_close, run_plain


@pytest.fixture
def sent(monkeypatch):
    """The arrays of each transfer that the host makes from here on, and where they go."""
    calls, put = [], jax.device_put

    def noting(arrays, shardings):
        calls.append(list(zip(arrays, shardings, strict=True)))
        return put(arrays, shardings)

    monkeypatch.setattr(runtime, "jax", types.SimpleNamespace(**vars(jax) | {"device_put": noting}))
    return calls


def test_gradients_for_a_sharded_server_are_scattered_as_they_are_summed(devices):
    """Each worker keeps and sends the part of the sum that a shard needs: a reduce-scatter if the platform has one."""
    wide = 32

    @msrl.fragment(role="learner")
    def gradients(w, x):
        return jax.grad(lambda w: jnp.tanh(x @ w).mean())(w)

    @msrl.fragment(role="server")
    def apply_update(w, m, grads):
        m = 0.9 * m + grads
        return w - 0.1 * m, m

    def iteration(state):
        w, m, x = state
        w, m = apply_update(w, m, gradients(w, x))
        return (w, m, x), {"w": w.sum()}

    state = jnp.ones((4, wide)) * 0.1, jnp.zeros((4, wide)), jax.random.normal(jax.random.key(0), (16, 4))
    program = msrl.compile(
        iteration, state, policy=msrl.policies.Central(workers=4, shards=4), axes=(P(), P(), P("env")), devices=devices
    )
    assert_close(program.run(state, 3), run_plain(iteration, state, 3))
    (w, m, _), _ = program.run(state, 1)
    for x in (w, m):  # parameters and optimizer state lie in parts
        assert [s.data.shape for s in x.addressable_shards] == [(4, wide // 4)] * 4
    run = next(i for i in program.instructions if isinstance(i, RunProgram) and "gradients" in i.fragments)
    (compiled,) = [c for c in program.compiled() if "gradients" in (c.as_text() or "").splitlines()[0]]
    assert run.outputs[0].aval.shape == (4, wide)
    assert compiled.output_shardings[0].shard_shape((4, wide)) == (4, wide // 4)
    kinds = {c.kind for p in program.explain().programs if p.name == "gradients" for c in p.collectives}
    assert kinds <= {"all-reduce", "reduce-scatter"} and kinds  # XLA for CPUs reduces, then slices


KINDS = [
    np.array([[1.5, np.nan], [-0.0, np.inf]], np.float32),
    np.arange(6, dtype=np.float32),
    np.zeros((0, 3), np.float32),
    np.arange(SMALL, dtype=np.float32),
    np.array([True, False]),
    np.array([[True]]),
    np.array([-128, 127], np.int8),
    np.int32(7),
    np.array([2**31 - 1, -5], np.int32),
    np.array([1.25, -0.0], jnp.bfloat16),
]


@pytest.mark.parametrize("workers", [1, 2])
def test_small_arrays_of_one_dtype_travel_as_one_and_arrive_as_they_were(workers, devices, sent):
    @msrl.fragment(role="learner")
    def gradients(x, key):
        return [*jax.tree.map(lambda a: a.reshape(a.shape), x), key]

    @msrl.fragment(role="server")
    def apply_update(state, given):
        return given

    def iteration(state):
        return (state[0], apply_update(state[1], gradients(*state[0]))), {}

    values = [jnp.asarray(x) for x in KINDS], jax.random.key(5)
    state = values, [jnp.zeros_like(x) for x in values[0]] + [jax.random.key(0)]
    program = msrl.compile(iteration, state, policy=Central(workers=workers), axes=P(), devices=devices[: workers + 1])
    program.warm_up()
    sent.clear()
    (_, arrived), _ = program.run(state, 1)
    moves = [i for i in program.instructions if isinstance(i, Move) and not i.is_copy]
    assert len(moves) == len(sent) == 1 and len(moves[0].sources) == len(KINDS) + 1
    dtypes = sorted(x.dtype.name for x, _ in sent[0])
    # alone: the empty array, the large one, the only int8 and bfloat16, and the key
    assert dtypes == sorted(["float32", "float32", "int8", "bfloat16", "key<fry>", "float32", "bool", "int32"])
    for x, y in zip(as_numpy(arrived), as_numpy([*values[0], values[1]]), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()


def test_gradients_that_are_split_are_gathered_where_they_are_made(devices, sent):
    """JAX would wait for them, and read them to the host."""
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=Central(workers=2), axes=toy.AXES, devices=devices[:3])
    program.run(state, 1)
    run = next(i for i, _ in walk(program.instructions) if isinstance(i, RunProgram) and "gradients" in i.fragments)
    (compiled,) = [c for c in program.compiled() if "gradients" in (c.as_text() or "").splitlines()[0]]
    assert not all(s.is_fully_replicated for s in compiled.output_shardings[: len(run.outputs)])
    sent.clear()
    program.run(state, 1)
    up = [x for call in sent for x, at in call if at.num_devices == 1]
    assert len(up) >= toy.EPOCHS * toy.MINIBATCHES and all(x.is_fully_replicated for x in up)


def test_a_copy_that_changes_a_sharding_has_the_next_number(devices):
    """An iteration makes a list with a place for each number."""

    @msrl.fragment(role="actor")
    def act(a):
        return a * 2

    @msrl.fragment(role="learner")
    def learn(a):
        return a.sum()

    def iteration(state):
        a, b = state
        return (b, a), {"sum": learn(act(a))}

    state, axes = (jnp.ones((8, 4)), jnp.zeros((8, 4))), (P("env"), P())
    policy = msrl.policies.SingleLearnerCoarse(actors=4, learners=4)
    program = msrl.compile(iteration, state, policy=policy, axes=axes, devices=devices)
    assert_close(program.run(state, 3), run_plain(iteration, state, 3))
    values = [v for i, _ in walk(program.instructions) for v in (*i.reads(), *i.makes())]
    assert sorted({v.index for v in values}) == list(range(7)), "two values of the state, three of fragments, two copies"
