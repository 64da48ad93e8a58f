"""The instructions of one loop under each policy: programs, transfers, collectives and dependencies."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Loop, Move, Run, walk
from msrl_jax.fragments.runtime import execute as runtime

from . import toy
from .conftest import POLICIES, assert_close, run_plain

PARAMS = {"state.params['v']", "state.params['w']"}
DEVICES = 4


@pytest.fixture(scope="module")
def programs(devices):
    """The actor-critic under every policy, run once."""
    state, found = toy.initial_state(), {}
    for name in POLICIES:
        policy = msrl.policies.get(name)
        program = msrl.compile(toy.iteration, state, policy=policy, axes=toy.AXES, devices=devices[:DEVICES])
        program.run(state, 1)
        found[name] = program
    return found


def runs(program):
    """(fragments of the program, placement, times per iteration) of every Run."""
    return [(i.name, i.placement.name, n) for i, n in walk(program.instructions) if isinstance(i, Run)]


def crossings(program):
    """(value, from, to, times per iteration) of every transfer."""
    return {(c.value, c.source, c.destination, c.times) for c in program.explain().crossings}


def placements_of(program):
    """The placements that keep a copy of each leaf of the state."""
    return {copies[0].label: [v.placement.name for v in copies] for copies in program.schedule.inputs}


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
    inner = [i for i in loop.body if isinstance(i, Run)]
    assert [i.name for i in inner] == ["act", "env_step"]  # no program of its own stacks or slices
    assert sum(len(i.writes) for i in inner) == 3  # x, action, reward
    assert all(buffer.aval.shape[0] == toy.UNROLL for i in inner for pair in i.writes for buffer in pair)
    plan = programs["SingleLearnerFine"].explain()
    for i in inner:  # the stacks are written in place
        (described,) = [p for p in plan.programs if p.name == i.name]
        assert described.donated_bytes >= sum(buffer.nbytes for buffer, _ in i.writes) // i.placement.mesh.size > 0
    learn = next(i for i in programs["SingleLearnerFine"].instructions if isinstance(i, Run) and "learn" in i.fragments)
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


@pytest.mark.parametrize("name", ["GPUOnly", "MultiLearner", "Central"])
def test_no_collective_grows_with_the_batch(name, devices, monkeypatch):
    sizes = []
    for envs in (16, 64):
        monkeypatch.setattr(toy, "ENVS", envs)
        state = toy.initial_state()
        program = msrl.compile(
            toy.iteration, state, policy=msrl.policies.get(name), axes=toy.AXES, devices=devices[:DEVICES]
        )
        plan = program.explain()
        sizes.append([(c.kind, c.nbytes, c.times * p.runs) for p in plan.programs for c in p.collectives])
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("name", POLICIES)
def test_bytes_that_cross_are_those_of_the_plan(name, programs, moved_bytes):
    assert moved_bytes(programs[name], toy.initial_state()) == programs[name].explain().bytes_crossing


@pytest.mark.parametrize("name", POLICIES)
def test_nothing_compiles_after_the_first_iteration(name, programs):
    program = programs[name]
    state, _ = program.run(program.place(toy.initial_state()), 1)
    before, compiled = program.num_compilations, []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )
    program.run(state, 3, chunk=1, donate=True)
    jax.monitoring.clear_event_listeners()
    assert not compiled and program.num_compilations == before


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "GPUOnly"])
def test_memory_of_the_learner_is_reused(name, programs):
    program = programs[name]
    last = [i for i, _ in walk(program.instructions) if isinstance(i, Run) and "apply_update" in i.fragments][-1]
    reused = {last.inputs[k].label for k in last.donated}
    assert {"state.opt_state[0].mu['w']", "state.opt_state[0].nu['v']"} <= reused


def test_glue_makes_no_program_wait():
    """Unmarked code between fragments: `2 * loss` runs with the learner, and the rollout reads no output of the learner."""
    state = toy.initial_state()
    program = msrl.compile(
        toy.iteration, state, policy=msrl.policies.SingleLearnerCoarse(), axes=toy.AXES
    )
    body = program.instructions
    learn = next(i for i in body if isinstance(i, Run) and "learn" in i.fragments)
    rollout = next(i for i in body if isinstance(i, Run) and "act" in i.fragments)
    assert body.index(rollout) < body.index(learn)
    loss_label = {v.label for v in program.schedule.metrics}
    assert loss_label  # every metric has a readable name
    made_by = {v: i for i, _ in walk(body) for v in i.makes()}
    twice = program.schedule.metrics[sorted(["loss", "twice", "reward", "gap"]).index("twice")]
    assert made_by[twice].placement.name == "learners"
    assert not any(v in made_by and made_by[v] is learn for v in rollout.inputs)


def test_free_values_are_computed_where_they_are_needed():
    """A schedule that actor and learner read depends on no fragment: both compute it, and neither sends it or waits for it."""

    @msrl.fragment(role="actor")
    def explore(x, epsilon):
        return x + epsilon

    @msrl.fragment(role="learner")
    def fit(w, x, epsilon):
        return w + x.mean() * epsilon

    def iteration(state):
        epsilon = 1.0 / (1 + state["step"])
        x = explore(state["x"], epsilon)
        return {"w": fit(state["w"], x, epsilon), "x": x, "step": state["step"] + 1}, {"epsilon": epsilon}

    state = {"w": jnp.float32(0), "x": jnp.zeros(8), "step": jnp.int32(0)}
    axes = {"w": P(), "x": P("env"), "step": P()}
    program = msrl.compile(iteration, state, policy=msrl.policies.SingleLearnerCoarse(), axes=axes)
    moved = {v.label for i in program.instructions if isinstance(i, Move) for v in i.results}
    assert moved == {"explore()"}
    assert placements_of(program)["state['step']"] == ["actors", "learners"]  # kept at both, given back from the first reader
    side_by_side = msrl.compile(iteration, state, policy=msrl.policies.MultiLearner(), axes=axes)
    assert placements_of(side_by_side)["state['step']"] == ["actors"]  # two placements on one mesh keep one copy
    after, metrics = program.run(state, 3)
    assert after["step"].devices() == set(program.layout.placement("actor", "explore").devices)
    assert_close((after, metrics), run_plain(iteration, state, 3))


def test_rows_that_pass_through_a_loop_are_stored_by_programs_that_run_anyway():
    """A carried value as it enters, a row that a program of the loop reads, and a row that none reads."""
    push = msrl.fragment(role="env", name="push")(lambda x, row: x + row)
    fit = msrl.fragment(role="learner", name="fit")(lambda w, x: w + x.mean())

    @msrl.fragment(role="learner")
    def both(w, x, row, unread):  # `lax.scan` does not see that it returns rows
        x = push(x, row)
        return fit(w, x), x, row, unread

    def iteration(state):
        def step(carry, rows):
            w, x, row, unread = both(*carry, *rows)
            return (w, x), (row, unread, carry[0])

        start, rows = (state["w"], state["x"]), jnp.ones((3, 8)) * state["x"]
        (w, x), (rows, unread, ws) = jax.lax.scan(step, start, (rows, jnp.arange(3.0) * state["w"]))
        return {"w": w, "x": push(x, rows.sum(0))}, {"unread": unread, "w": ws}

    state = {"w": jnp.float32(1), "x": jnp.arange(8.0)}
    program = msrl.compile(iteration, state, policy=msrl.policies.SingleLearnerFine(), axes={"w": P(), "x": P("env")})
    (loop,) = [i for i in program.instructions if isinstance(i, Loop)]
    stored = [(i.name, i.placement.name, len(i.writes)) for i in loop.body if isinstance(i, Run)]
    assert stored == [("push", "envs", 1), ("fit", "learners", 2)]
    assert_close(program.run(state, 2), run_plain(iteration, state, 2))


def test_a_fragment_used_twice_is_compiled_once():
    @msrl.fragment(role="actor")
    def squash(x):
        return jnp.tanh(x) @ jnp.ones((4, 4))

    @msrl.fragment(role="learner")
    def shift(x):
        return x + 1

    def iteration(x):
        return squash(shift(squash(x))), {}

    state = jnp.ones((8, 4))
    program = msrl.compile(iteration, state, policy=msrl.policies.SingleLearnerCoarse(actors=1), axes=P())
    names = [i.name for i in program.instructions if isinstance(i, Run)]
    assert names == ["squash", "shift", "squash"]
    after, metrics = program.run(state, 2)
    assert program.num_compilations == 2 and metrics == {}
    assert_close(after, run_plain(lambda x: (iteration(x)[0], {"_": x[0, 0]}), state, 2)[0])


def test_fused_program_costs_no_more_than_the_handwritten_scan(devices):
    """Invariant: GPUOnly is `jit(scan(iteration))`, in results, FLOPs and bytes."""
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.GPUOnly(), axes=toy.AXES, devices=devices[:1])
    program.warm_up(3)

    @jax.jit
    def handwritten(state):
        return jax.lax.scan(lambda s, _: toy.iteration(s), state, None, length=3)

    reference = handwritten.lower(state).compile()
    (fused,) = program.compiled(3)
    ours = fused.cost_analysis()
    theirs = reference.cost_analysis()
    assert ours["flops"] <= theirs["flops"]
    assert ours["bytes accessed"] <= theirs["bytes accessed"]
    expected, metrics = reference(state)
    after, stacked = program.run(state, 3)
    for x, y in zip(jax.tree.leaves((after.params, stacked)), jax.tree.leaves((expected.params, metrics)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_states_stay_valid_unless_donated(programs):
    for program in programs.values():
        state = toy.initial_state()
        placed = program.place(state)
        program.run(placed, 1)
        program.run(state, 1)
        assert not any(x.is_deleted() for x in jax.tree.leaves((state, placed)))
        again, _ = program.run(placed, 1, donate=True)
        assert not any(x.is_deleted() for x in jax.tree.leaves((state, again)))


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
    run = next(i for i in program.instructions if isinstance(i, Run) and "gradients" in i.fragments)
    (compiled,) = [c for c in program.compiled() if "gradients" in (c.as_text() or "").splitlines()[0]]
    assert run.outputs[0].aval.shape == (4, wide)
    assert compiled.output_shardings[0].shard_shape((4, wide)) == (4, wide // 4)
    kinds = {c.kind for p in program.explain().programs if p.name == "gradients" for c in p.collectives}
    assert kinds <= {"all-reduce", "reduce-scatter"} and kinds  # XLA for CPUs reduces, then slices


def test_the_host_stays_within_what_cpu_devices_admit(programs, monkeypatch):
    """XLA's CPU devices admit 32 programs; with more, programs that depend on each other may deadlock."""
    program, waits = programs["Environments"], []
    state = program.place(toy.initial_state())
    ready = jax.block_until_ready
    monkeypatch.setattr(
        runtime, "jax", types.SimpleNamespace(device_put=jax.device_put, block_until_ready=lambda x: waits.append(ready(x)))
    )
    program.run(state, 6, donate=True)
    meshes = {i.placement.mesh for i in program.instructions if isinstance(i, Run)}
    launched = 6 * sum(n for _, _, n in runs(program))
    assert len(waits) >= launched // 12 - len(meshes)
