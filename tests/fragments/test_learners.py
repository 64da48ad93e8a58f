"""Several learners in one graph: each is a separate role with its own placement."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import RunProgram, walk
from msrl_jax.policies import Layout, Placement
from tests.support.compare import POLICIES, assert_close, run_plain
from tests.support.slow import slow_unless

ENVS, STEPS = 16, 4


class Apart:
    """Acting on four devices, and a sub-mesh for each of two learners."""

    def __init__(self, first, second, staleness=0):
        self.first, self.second, self.staleness = f"learner:{first}", f"learner:{second}", staleness

    def layout(self, devices, sizes):
        actors = Placement.over("actors", devices[:4])
        first, second = Placement.over("first", devices[4:6]), Placement.over("second", devices[6:])
        roles = {"env": actors, "actor": actors, "learner": first, self.first: first, self.second: second}
        return Layout(roles, self.staleness, policy="Apart()")


@msrl.fragment(role="env")
def chase(x, push, pull):
    x = 0.9 * x + 0.1 * jnp.stack([push, pull], -1)
    return x, -jnp.abs(x[:, 0] - x[:, 1]), jnp.abs(x[:, 0] - x[:, 1])


def linear_learner(name):
    @msrl.fragment(role=f"learner:{name}", name=f"learn_{name}")
    def learn(w, x, target):
        grads = jax.grad(lambda w: ((x @ w - target) ** 2).mean())(w)
        return w - 0.1 * grads

    return learn


def rollout(state, length=STEPS):
    @msrl.fragment(role="actor")
    def act(predator, prey, x):
        return jnp.tanh(x @ predator), jnp.tanh(x @ prey)

    def step(x, _):
        push, pull = act(state["predator"], state["prey"], x)
        after, gain, loss = chase(x, push, pull)
        return after, (x, gain, loss)

    return jax.lax.scan(step, state["x"], None, length=length)


def two_algorithms(state):
    """Predator and prey learn from one stream of experience, each with its own rule."""
    x, (seen, gain, loss) = rollout(state)
    predator = linear_learner("predator")(state["predator"], seen, gain)
    prey = linear_learner("prey")(state["prey"], seen, loss)
    after = state | {"predator": predator, "prey": prey, "x": x, "count": state["count"] + 1}
    return after, {"gain": gain.mean(), "loss": loss.mean()}


def two_rates(state):
    """The second learner (the critic of a slow actor) takes three updates for each of the first."""
    x, (seen, gain, loss) = rollout(state)
    learn = linear_learner("prey")
    prey = jax.lax.scan(lambda w, row: (learn(w, *row), None), state["prey"], (seen[:3], loss[:3]))[0]
    updated = linear_learner("predator")(state["predator"], seen, gain)
    predator = jnp.where(state["count"] % 2 == 0, updated, state["predator"])
    after = state | {"predator": predator, "prey": prey, "x": x, "count": state["count"] + 1}
    return after, {"gain": gain.mean(), "loss": loss.mean()}


def two_time_scales(state):
    """A manager (predator) learns once from two rounds of a worker (prey), which learns after each round."""

    def round_(carry, _):
        x, prey = carry
        x, (seen, gain, loss) = rollout(state | {"x": x, "prey": prey})
        prey = linear_learner("prey")(prey, seen, loss)
        return (x, prey), (seen, gain)

    (x, prey), (seen, gain) = jax.lax.scan(round_, (state["x"], state["prey"]), None, length=2)
    predator = linear_learner("predator")(state["predator"], seen, gain)
    after = state | {"predator": predator, "prey": prey, "x": x, "count": state["count"] + 1}
    return after, {"gain": gain.mean(), "loss": -gain.mean()}


def two_in_a_loop(state):
    """Both learn after each of two rounds."""

    def round_(carry, _):
        x, predator, prey = carry
        x, (seen, gain, loss) = rollout(state | {"x": x, "predator": predator, "prey": prey})
        after = linear_learner("predator")(predator, seen, gain), linear_learner("prey")(prey, seen, loss)
        return (x, *after), (gain.mean(), loss.mean())

    start = state["x"], state["predator"], state["prey"]
    (x, predator, prey), (gain, loss) = jax.lax.scan(round_, start, None, length=2)
    after = state | {"predator": predator, "prey": prey, "x": x, "count": state["count"] + 1}
    return after, {"gain": gain.mean(), "loss": loss.mean()}


LOOPS = [two_algorithms, two_rates, two_time_scales, two_in_a_loop]
AXES = {"predator": P(), "prey": P(), "x": P("env"), "count": P()}


def initial_state():
    return {
        "predator": jnp.array([0.1, -0.2]),
        "prey": jnp.array([0.3, 0.2]),
        "x": jax.random.normal(jax.random.key(0), (ENVS, 2)),
        "count": jnp.int32(0),
    }


@functools.cache
def reference(iteration):
    return run_plain(iteration, initial_state(), 4)


def is_fast(iteration, name):
    return name == "Apart" or (name, iteration) in (("SingleLearnerCoarse", two_time_scales), ("GPUOnly", two_in_a_loop))


RUNS = [slow_unless(is_fast(*run), *run) for run in itertools.product(LOOPS, ["Apart", *POLICIES])]


@pytest.mark.parametrize(("iteration", "name"), RUNS)
def test_the_same_run_wherever_the_learners_are(iteration, name):
    policy = Apart("predator", "prey") if name == "Apart" else msrl.policies.get(name)
    program = msrl.compile(iteration, initial_state(), policy=policy, axes=AXES)
    assert_close(program.run(initial_state(), 4), reference(iteration))


@pytest.mark.parametrize("iteration", LOOPS, ids=lambda f: f.__name__)
def test_each_learner_runs_at_its_own_placement(iteration):
    program = msrl.compile(iteration, initial_state(), policy=Apart("predator", "prey"), axes=AXES)
    at = {(f, i.placement.name) for i, _ in walk(program.instructions) if isinstance(i, RunProgram) for f in i.fragments}
    assert {("learn_predator", "first"), ("learn_prey", "second")} <= at
    assert not {("learn_predator", "second"), ("learn_prey", "first")} & at


def test_learners_do_not_wait_for_each_other():
    program = msrl.compile(two_algorithms, initial_state(), policy=Apart("predator", "prey"), axes=AXES)
    made_by = {v: i for i, _ in walk(program.instructions) for v in i.makes()}

    def ancestors(i):
        direct = [made_by[v] for v in i.reads() if v in made_by]
        return {i, *direct}.union(*(ancestors(d) for d in direct))

    predator, prey = (
        next(i for i in program.instructions if isinstance(i, RunProgram) and f"learn_{name}" in i.fragments)
        for name in ("predator", "prey")
    )
    assert predator not in ancestors(prey) and prey not in ancestors(predator)


def test_stale_actors_read_every_learner_late():
    @jax.jit
    def step(state, old):
        acting = {name: old[name] for name in ("predator", "prey")}
        x, (seen, gain, loss) = rollout(state | acting)
        predator = linear_learner("predator")(state["predator"], seen, gain)
        return {"predator": predator, "prey": linear_learner("prey")(state["prey"], seen, loss), "x": x}

    history = [initial_state()] * 3
    for _ in range(5):
        history.append(history[-1] | step(history[-1], history[-3]))

    policy = Apart("predator", "prey", staleness=2)
    program = msrl.compile(two_algorithms, initial_state(), policy=policy, axes=AXES)
    assert program.registers == {"['predator']": 2, "['prey']": 2}
    run_state, _ = program.run(initial_state(), 5)
    learned = {name: value for name, value in program.unwrap(run_state).items() if name != "count"}
    assert_close(learned, {name: history[-1][name] for name in learned})


@pytest.mark.parametrize("how", ["one after the other", "side by side"])
def test_two_learners_that_claim_the_same_parameters_are_refused(how):
    def iteration(state):
        x, (seen, gain, loss) = rollout(state)
        shared = linear_learner("predator")(state["predator"], seen, gain)
        if how == "side by side":
            shared += linear_learner("prey")(state["predator"], seen, loss)
        else:
            shared = linear_learner("prey")(shared * 1.0, seen, loss)
        return state | {"predator": shared, "x": x}, {}

    message = r"state\['predator'\] is updated by.*'learn_predator'.*'learn_prey'.*two learners update the same parameters"
    for policy in (Apart("predator", "prey"), msrl.policies.GPUOnly()):
        with pytest.raises(ValueError, match=message):
            msrl.compile(iteration, initial_state(), policy=policy, axes=AXES)
