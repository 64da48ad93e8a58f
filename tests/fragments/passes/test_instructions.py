"""The instructions of one loop under each policy: programs, transfers, collectives and dependencies."""

import types

import jax
import pytest

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Loop, Move, RunProgram, walk
from msrl_jax.fragments.runtime import execute as runtime
from tests.support import toy
from tests.support.compare import POLICIES

PARAMS = {"state.params['v']", "state.params['w']"}
DEVICES = 4


@pytest.fixture(scope="module")
def programs():
    """The actor-critic under every policy, run once."""
    found = {name: toy.program(name, DEVICES) for name in POLICIES}
    for program in found.values():
        program.run(toy.initial_state(), 1)
    return found


def runs(program):
    """(fragments of the program, placement, times per iteration) of every RunProgram."""
    return [(i.name, i.placement.name, n) for i, n in walk(program.instructions) if isinstance(i, RunProgram)]


def crossings(program):
    """(value, from, to, times per iteration) of every transfer."""
    return {(c.value, c.source, c.destination, c.times) for c in program.explain().crossings}


def test_gpu_only_is_one_program_without_transfers(programs):
    program = programs["GPUOnly"]
    assert runs(program) == [("act+env_step+learn", "all", 1)]
    assert program.is_fused and not crossings(program)


def test_multi_learner_is_two_programs_side_by_side(programs):
    program = programs["MultiLearner"]
    assert [r for r in runs(program) if r[0] != "glue"] == [("act+env_step", "actors", 1), ("learn", "learners", 1)]
    assert not crossings(program)


def test_single_learner_coarse_exchanges_once_per_iteration(programs):
    program = programs["SingleLearnerCoarse"]
    assert [r for r in runs(program) if r[0] != "glue"] == [("act+env_step", "actors", 1), ("learn", "learners", 1)]
    assert {c[0] for c in crossings(program) if c[1:] == ("learners", "actors", 1)} == {"state.params['w']"}
    up = {c[0] for c in crossings(program) if c[1:3] == ("actors", "learners")}
    assert {"act()[0]", "env_step()[1]"} <= up
    assert not any("opt_state" in c[0] or "keys" in c[0] for c in crossings(program))


def test_single_learner_fine_exchanges_every_step_and_never_parameters(programs):
    program = programs["SingleLearnerFine"]
    assert ("act", "learners", toy.UNROLL) in runs(program)
    assert ("env_step", "envs", toy.UNROLL) in runs(program)
    assert ("state.x", "envs", "learners", toy.UNROLL) in crossings(program)
    assert ("act()[0]", "learners", "envs", toy.UNROLL) in crossings(program)
    assert not {c[0] for c in crossings(program)} & PARAMS


def test_rows_are_read_and_written_inside_the_programs_of_a_loop(programs):
    (loop,) = [i for i in programs["SingleLearnerFine"].instructions if isinstance(i, Loop)]
    inner = [i for i in loop.body if isinstance(i, RunProgram)]
    assert [i.name for i in inner] == ["act", "env_step"]  # no program of its own stacks or slices
    assert sum(len(i.writes) for i in inner) == 3  # x, action, reward
    assert all(buffer.aval.shape[0] == toy.UNROLL for i in inner for pair in i.writes for buffer in pair)
    plan = programs["SingleLearnerFine"].explain()
    for i in inner:  # the stacks are written in place
        (described,) = [p for p in plan.programs if p.name == i.name]
        assert described.donated_bytes >= sum(buffer.nbytes for buffer, _ in i.writes) // i.placement.mesh.size > 0
    learn = next(i for i in programs["SingleLearnerFine"].instructions if isinstance(i, RunProgram) and "learn" in i.fragments)
    moved = [v for i in programs["SingleLearnerFine"].instructions if isinstance(i, Move) for v in i.results]
    stacked_there = [v for v in learn.inputs if v.aval.shape[:2] == (toy.UNROLL, toy.ENVS) and v not in moved]
    assert len(stacked_there) == 2  # x crosses for inference anyway and action is made there: neither crosses again


def test_central_exchanges_gradients_every_minibatch(programs):
    program = programs["Central"]
    updates = toy.EPOCHS * toy.MINIBATCHES
    assert ("gradients", "workers", updates) in runs(program)
    assert ("apply_update", "server", updates) in runs(program)
    up = {c[0] for c in crossings(program) if c[1:] == ("workers", "server", updates)}
    assert up == {"gradients()[1]['v']", "gradients()[1]['w']"}
    down = {c[0] for c in crossings(program) if c[1:] == ("server", "workers", updates)}
    assert down == PARAMS
    assert not any("opt_state" in c[0] for c in crossings(program))


@pytest.mark.parametrize("name", POLICIES)
def test_collectives_are_one_gradient_reduction_per_minibatch(name, programs):
    program = programs[name]
    plan = program.explain()
    found = [(c.kind, c.nbytes, c.times * p.runs) for p in plan.programs for c in p.collectives]
    assert {kind for kind, *_ in found} <= {"all-reduce"}
    learners = len(program.layout.placement("learner", "learn").devices)
    gradients = [times for _, nbytes, times in found if nbytes >= 16]  # w and v: two float32 each
    assert gradients == ([toy.EPOCHS * toy.MINIBATCHES] if learners > 1 else [])
    assert sum(nbytes * times for _, nbytes, times in found) <= 40 * toy.EPOCHS * toy.MINIBATCHES


@pytest.mark.parametrize("name", ["GPUOnly", pytest.param("Central", marks=pytest.mark.long)])
def test_no_collective_grows_with_the_batch(name, programs, devices, monkeypatch):
    def sizes(program):
        return [(c.kind, c.nbytes, c.times * p.runs) for p in program.explain().programs for c in p.collectives]

    few = sizes(programs[name])
    monkeypatch.setattr(toy, "ENVS", 4 * toy.ENVS)
    state, policy = toy.initial_state(), msrl.policies.get(name)
    assert sizes(msrl.compile(toy.iteration, state, policy=policy, axes=toy.AXES, devices=devices[:DEVICES])) == few


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_that_cross_are_those_of_the_plan(name, programs, moved_bytes):
    assert moved_bytes(programs[name], toy.initial_state()) == programs[name].explain().bytes_crossing


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_compiles_after_the_first_iteration(name, programs):
    program = programs[name]
    state, _ = program.run(program.place(toy.initial_state()), 1)
    before, compiled = program.executables.count, []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    program.run(state, 3, chunk=1, donate=True)
    jax.monitoring.clear_event_listeners()
    assert not compiled and program.executables.count == before


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "GPUOnly"])
def test_memory_of_the_learner_is_reused(name, programs):
    program = programs[name]
    last = [i for i, _ in walk(program.instructions) if isinstance(i, RunProgram) and "apply_update" in i.fragments][-1]
    reused = {last.inputs[k].label for k in last.donated}
    assert {"state.opt_state[0].mu['w']", "state.opt_state[0].nu['v']"} <= reused


def test_states_stay_valid_unless_donated(programs):
    for program in programs.values():
        state = toy.initial_state()
        placed = program.place(state)
        program.run(placed, 1)
        program.run(state, 1)
        assert not any(x.is_deleted() for x in jax.tree.leaves((state, placed)))
        again, _ = program.run(placed, 1, donate=True)
        assert not any(x.is_deleted() for x in jax.tree.leaves((state, again)))


def test_the_host_stays_within_what_cpu_devices_admit(programs, monkeypatch):
    """XLA's CPU devices admit 32 programs; with more, programs that depend on each other may deadlock."""
    program, waits = programs["Environments"], []
    state = program.place(toy.initial_state())
    ready = jax.block_until_ready
    counting = {"block_until_ready": lambda x: waits.append(ready(x))}
    monkeypatch.setattr(runtime, "jax", types.SimpleNamespace(**{**vars(jax), **counting}))
    program.run(state, 6, donate=True)
    meshes = {i.placement.mesh for i in program.instructions if isinstance(i, RunProgram)}
    launched = 6 * sum(n for _, _, n in runs(program))
    assert len(waits) >= launched // 12 - len(meshes)
