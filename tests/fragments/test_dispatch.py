"""What the host does for an iteration that it drives: what it sends at once, when it reads, and the measurement of it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Alloc, Loop, Move, Run, walk
from msrl_jax.fragments.runtime import execute as runtime
from msrl_jax.fragments.runtime import processes
from msrl_jax.fragments.runtime.lower import SMALL
from msrl_jax.policies import Central

from . import toy
from .conftest import as_numpy

DRIVEN = ["Central", "Environments", "SingleLearnerFine"]


@pytest.fixture(scope="module")
def programs(devices):
    """The actor-critic under the policies that the host drives, on four devices, run once."""
    state, found = toy.initial_state(), {}
    for name in DRIVEN:
        program = msrl.compile(
            toy.iteration, state, policy=msrl.policies.get(name), axes=toy.AXES, devices=devices[:4]
        )
        program.run(state, 1)
        found[name] = program
    return found


@pytest.fixture
def sent(monkeypatch):
    """The arrays of each transfer that the host makes from here on, and where they go."""
    calls, put = [], jax.device_put

    def noting(arrays, shardings):
        calls.append(list(zip(arrays, shardings, strict=True)))
        return put(arrays, shardings)

    monkeypatch.setattr(runtime, "jax", types.SimpleNamespace(**vars(jax) | {"device_put": noting}))
    return calls


@pytest.fixture
def reads(monkeypatch):
    """What the host reads and executes from here on, in order."""
    events, get, execute = [], jax.device_get, runtime.Executor.__call__

    def reading(arrays):
        events.append("read")
        return get(arrays)

    def executing(executor, leaves):
        events.append("execute")
        return execute(executor, leaves)

    monkeypatch.setattr(processes, "jax", types.SimpleNamespace(**vars(jax) | {"device_get": reading}))
    monkeypatch.setattr(runtime.Executor, "__call__", executing)
    array, as_host = type(jnp.zeros(1)), type(jnp.zeros(1)).__array__

    def converting(x, *args, **options):
        events.append("convert")
        return as_host(x, *args, **options)

    monkeypatch.setattr(array, "__array__", converting)
    return events


@pytest.mark.parametrize("name", DRIVEN)
def test_a_chunk_is_read_once_at_its_end(name, programs, reads):
    program = programs[name]
    state = program.place(toy.initial_state())
    reads.clear()
    program.run(state, 6, chunk=3, donate=True)
    assert [e for e in reads if e != "convert"] == (["execute"] * 3 + ["read"]) * 2
    first, rest = reads.index("read"), reads[reads.index("read") + 1 :]
    assert "convert" not in reads[:first] and "convert" not in rest[rest.index("execute") : rest.index("read")]


def test_a_value_lost_in_the_middle_of_a_chunk_stops_the_run_at_its_end(devices, reads):
    policy = Central(workers=1, gradient_codec={"gradients": "uint8"})

    @msrl.fragment(role="learner")
    def gradients(step, x):
        return jnp.where(step == 1, jnp.full(8, 0.5), jnp.ones(8)) + 0 * x

    @msrl.fragment(role="server")
    def apply_update(x, gradient):
        return x + gradient

    def iteration(state):
        step, x = state
        return (step + 1, apply_update(x, gradients(step, x))), {"x": x.sum()}

    state = jnp.int32(0), jnp.zeros(8)
    program = msrl.compile(iteration, state, policy=policy, axes=(P(), P()), devices=devices[:2])
    program.run(state, 1)
    reads.clear()
    with pytest.raises(ValueError, match=r"codec 'uint8' cannot hold gradients\(\).* in \[0\.5, 0\.5\]"):
        program.run(state, 4)
    assert [e for e in reads if e != "convert"] == ["execute"] * 4 + ["read"]


KINDS = [
    np.array([[1.5, np.nan], [-0.0, np.inf]], np.float32), np.arange(6, dtype=np.float32), np.zeros((0, 3), np.float32),
    np.arange(SMALL, dtype=np.float32), np.array([True, False]), np.array([[True]]), np.array([-128, 127], np.int8),
    np.int32(7), np.array([2**31 - 1, -5], np.int32), np.array([1.25, -0.0], jnp.bfloat16),
]  # fmt: skip


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
    run = next(i for i, _ in walk(program.instructions) if isinstance(i, Run) and "gradients" in i.fragments)
    (compiled,) = [c for c in program.compiled() if "gradients" in (c.as_text() or "").splitlines()[0]]
    assert not all(s.is_fully_replicated for s in compiled.output_shardings[: len(run.outputs)])
    sent.clear()
    program.run(state, 1)
    up = [x for call in sent for x, at in call if at.num_devices == 1]
    assert len(up) >= toy.EPOCHS * toy.MINIBATCHES and all(x.is_fully_replicated for x in up)


@pytest.mark.parametrize("name", DRIVEN)
def test_dispatch_is_measured_per_instruction(name, programs):
    program, state = programs[name], toy.initial_state()
    found = program.measure_dispatch(state)
    times = {kind: sum(n for i, n in walk(program.instructions) if isinstance(i, kind)) for kind in (Run, Move, Alloc, Loop)}
    assert times[Loop] > 0 and found.instructions == times[Run] + times[Move] + times[Alloc]
    assert 0 < found.python_microseconds < found.microseconds
    assert found.call_microseconds > 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_fused_loop_has_no_instructions_to_measure(devices):
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.GPUOnly(), axes=toy.AXES, devices=devices[:1])
    assert program.measure_dispatch(state) is None and program.num_compilations == 0


def test_programs_of_numbers_smaller_than_a_byte_are_measured_too(devices):
    """JAX calls these by another way."""

    @msrl.fragment(role="actor")
    def act(scale, x):
        return (x.astype(jnp.int8) * scale.astype(jnp.int8)[0]).astype(jnp.int4)

    @msrl.fragment(role="learner")
    def learn(scale, x):
        return (scale.astype(jnp.int8) + x.astype(jnp.int8).sum(dtype=jnp.int8)).astype(jnp.int4)

    def iteration(state):
        x = act(*state)
        return (learn(state[0], x), x), {}

    state = jnp.ones(3, jnp.int4), jnp.ones(4, jnp.int4)
    policy = msrl.policies.SingleLearnerCoarse()
    program = msrl.compile(iteration, state, policy=policy, axes=(P(), P("env")), devices=devices[:3])
    assert program.measure_dispatch(state).call_microseconds > 0
