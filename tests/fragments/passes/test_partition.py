"""Glue and carried values are placed where nothing waits for them."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Move, RunProgram, walk
from msrl_jax.fragments.passes.placing import Places
from tests.support import toy
from tests.support.compare import assert_close, run_plain


def placements_of(program):
    """The placements that keep a copy of each leaf of the state."""
    return {copies[0].label: [v.placement.name for v in copies] for copies in program.schedule.inputs}


STATE = {"params": jnp.full(8, 0.5), "x": jnp.ones(8), "key": jax.random.key(0)}


AXES = {"params": P(), "x": P("env"), "key": P()}


act = msrl.fragment(role="actor")(lambda params, x: 0.5 * x + params.sum())


learn = msrl.fragment(role="learner")(lambda params, x: 0.9 * params - 0.01 * x.mean())


def loop_with(glue):
    def iteration(s):
        key, params, x = glue(s["key"], s["params"], s["x"])
        x = act(params, x)
        return {"params": learn(s["params"], x), "x": x, "key": key}, {"x": x}

    return iteration


def compiled(glue, **options):
    return msrl.compile(loop_with(glue), STATE, policy=msrl.policies.SingleLearnerCoarse(**options), axes=AXES)


def test_glue_makes_no_program_wait():
    """Unmarked code between fragments: `2 * loss` runs with the learner, and the rollout reads no output of the learner."""
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.SingleLearnerCoarse(), axes=toy.AXES)
    body = program.instructions
    learn = next(i for i in body if isinstance(i, RunProgram) and "learn" in i.fragments)
    rollout = next(i for i in body if isinstance(i, RunProgram) and "act" in i.fragments)
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


def test_chains_of_keys_are_placed_in_one_pass(monkeypatch):
    visits = []
    inner = Places.needed_at
    monkeypatch.setattr(Places, "needed_at", lambda *args: visits.append(1) or inner(*args))

    def visits_of(splits):
        def glue(key, params, x):
            for _ in range(splits):
                key, own = jax.random.split(key)
                x = x + jax.random.uniform(own)
            return key, params, x

        visits.clear()
        compiled(glue)
        return len(visits)

    assert visits_of(40) < 2.2 * visits_of(20)
