"""What the host does for an iteration that it drives: what it sends at once, when it reads, and the measurement of it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.measure import dispatch_time
from msrl_jax.fragments.passes.instructions import Alloc, Loop, Move, RunProgram, walk
from msrl_jax.fragments.runtime import execute as runtime
from msrl_jax.fragments.runtime import transfer
from msrl_jax.fragments.runtime.host_queue import HostQueue
from msrl_jax.policies import Central
from tests.support import toy

DRIVEN = ["Central", "Environments", "SingleLearnerFine"]


@pytest.fixture(scope="module")
def programs():
    """The actor-critic under the policies that the host drives, on four devices, run once."""
    found = {name: toy.program(name, 4) for name in DRIVEN}
    for program in found.values():
        program.run(toy.initial_state(), 1)
    return found


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

    monkeypatch.setattr(transfer, "jax", types.SimpleNamespace(**vars(jax) | {"device_get": reading}))
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


@pytest.mark.parametrize("name", DRIVEN)
def test_dispatch_is_measured_per_instruction(name, programs):
    program, state = programs[name], toy.initial_state()
    found = dispatch_time(program, state)
    times = {
        kind: sum(n for i, n in walk(program.instructions) if isinstance(i, kind)) for kind in (RunProgram, Move, Alloc, Loop)
    }
    assert times[Loop] > 0 and found.instructions == times[RunProgram] + times[Move] + times[Alloc]
    assert 0 < found.python_microseconds < found.microseconds
    assert found.call_microseconds > 0
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_fused_loop_has_no_instructions_to_measure(devices):
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.GPUOnly(), axes=toy.AXES, devices=devices[:1])
    assert dispatch_time(program, state) is None and program.executables.count == 0


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
    assert dispatch_time(program, state).call_microseconds > 0


def test_a_task_that_consumes_an_array_waits_for_those_that_read_it():
    order = []

    class Never:
        can_start = True

        def start(self):
            return lambda: [np.float32(1)]

    def note(name):
        return lambda *args: order.append(name) or [np.float32(len(args))]

    queue, shared = HostQueue(), np.zeros(3)
    (pending,) = queue.start(Never(), lambda made: made, [], 1)
    queue.call(note("reads"), [pending, shared], (), 1)
    queue.call(note("other"), [np.zeros(3)], (0,), 1)
    queue.call(note("consumes"), [shared], (0,), 1)
    assert order == ["other"]
    queue.drain()
    assert order == ["other", "reads", "consumes"]
