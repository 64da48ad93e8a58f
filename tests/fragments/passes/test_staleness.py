"""Staleness is an exact, bounded delay from learner to actor; the actor does not wait for the learner."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Move, RunProgram
from tests.support import replay_loop, toy
from tests.support.compare import assert_close
from tests.support.program import dependencies
from tests.support.slow import mostly_slow, slow_unless


def delayed_reference(staleness, iterations):
    """The order of events in plain Python: iteration i acts with the parameters of i - staleness."""
    state = toy.initial_state()
    history = [state.params] * (staleness + 1)
    losses = []
    roll, update = jax.jit(toy.rollout), jax.jit(toy.learn)
    for _ in range(iterations):
        (x, keys), trajectory = roll(history[0], state.x, state.keys)
        key, learn_key = jax.random.split(state.key)
        params, opt_state, loss = update(state.params, state.opt_state, learn_key, trajectory)
        state = toy.State(params, opt_state, x, keys, key, state.step + 1)
        history = [*history[1:], params]
        losses.append(loss)
    return state, np.stack(losses)


@pytest.mark.parametrize("staleness", mostly_slow([0, 1, 3], "3"))
def test_actors_use_parameters_of_that_age(staleness):
    policy = msrl.policies.SingleLearnerCoarse(actors=4, learners=2, staleness=staleness)
    program = msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)
    run_state, metrics = program.run(toy.initial_state(), 6)
    expected, losses = delayed_reference(staleness, 6)
    assert_close((program.unwrap(run_state), metrics["loss"]), (expected, losses))


def test_a_delayed_run_resumes_from_its_state():
    policy = msrl.policies.SingleLearnerCoarse(actors=2, staleness=2)
    program = msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)
    whole, _ = program.run(toy.initial_state(), 5)
    half, _ = program.run(toy.initial_state(), 2)
    assert isinstance(half, msrl.Delayed) and len(half.registers) == 2  # one leaf that actors read, two iterations
    assert program.registers == {".params['w']": 2}
    on_the_host = jax.tree.map(lambda x: x if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else np.asarray(x), half)
    rest, _ = program.run(on_the_host, 3)
    for a, b in zip(jax.tree.leaves(rest), jax.tree.leaves(whole), strict=True):
        assert bool((a == b).all())


@pytest.mark.parametrize("staleness", mostly_slow([0, 1, 2], "2"))
def test_the_actor_depends_on_no_younger_learner(staleness):
    policy = msrl.policies.SingleLearnerCoarse(actors=4, staleness=staleness)
    program = msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)
    depends = dependencies(program, staleness)
    for iteration in range(staleness + 3):
        learned = {i for i, fragment in depends[iteration, "act"] if fragment == "learn"}
        assert learned == set(range(iteration - staleness))


def late_replay(staleness, late_priorities, iterations):
    """The order of events in plain Python: iteration i writes the errors of iteration i - 1 - staleness before it draws."""
    state = replay_loop.initial_state()
    params, errors = [state.w] * (staleness + 1), [state.pending] * (1 + staleness * late_priorities)
    steps = (replay_loop.rollout, replay_loop.remember, replay_loop.draw, replay_loop.learn)
    roll, remember, draw, learn = map(jax.jit, steps)
    for _ in range(iterations):
        (x, keys), items = roll(params.pop(0), state.x, state.keys)
        held = remember(state.replay, errors.pop(0), items)
        key, sample = draw(held, state.key)
        w, updates, pending, _ = learn(state.w, state.updates, sample)
        state = replay_loop.State(w, updates, x, keys, held, key, pending)
        params, errors = [*params, w], [*errors, pending]
    return state


@pytest.fixture(scope="module")
def replays():
    """Staleness and buffers -> the program."""

    @functools.cache
    def program(staleness, buffers):
        policy = msrl.policies.SingleLearnerCoarse(actors=4, staleness=staleness, buffers=buffers)
        return msrl.compile(replay_loop.iteration, replay_loop.initial_state(), policy=policy, axes=replay_loop.AXES)

    return program


BUFFERS = [(0, 2), (2, None), (2, 2), (1, "actors")]


@pytest.mark.long
@pytest.mark.parametrize(("staleness", "buffers"), [slow_unless(b == (2, 2), *b) for b in BUFFERS])
def test_buffers_apart_from_the_learner_receive_errors_with_the_same_delay(staleness, buffers, replays):
    after, _ = replays(staleness, buffers).run(replay_loop.initial_state(), 9)  # the ring is overwritten after 6
    expected = late_replay(staleness, buffers is not None, 9)
    assert_close(replays(staleness, buffers).unwrap(after), expected)
    if staleness:
        other = late_replay(staleness, buffers is None, 9)
        assert not np.allclose(expected.replay.priorities.largest, other.replay.priorities.largest)


@pytest.mark.parametrize(("staleness", "buffers"), [slow_unless(b in ((2, 2), (2, None)), *b) for b in BUFFERS])
def test_neither_actors_nor_buffers_depend_on_a_younger_learner(staleness, buffers, replays):
    depends = dependencies(replays(staleness, buffers), staleness)
    for iteration in range(staleness + 3):
        for fragment, apart in (("act", True), ("remember", buffers), ("draw", buffers)):
            learned = {i for i, name in depends[iteration, fragment] if name == "learn"}
            assert learned == set(range(iteration - staleness if apart else iteration)), fragment


def test_late_errors_travel_with_their_windows(replays):
    assert replays(2, 2).registers == {".w": 2, ".pending[0].step": 2, ".pending[0].env": 2, ".pending[1]": 2}
    assert replays(2, None).registers == {".w": 2}


def test_new_parameters_move_to_the_actors_and_nothing_waits_for_them():
    policy = msrl.policies.SingleLearnerCoarse(actors=4, staleness=1)
    program = msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)
    down = [r for i in program.instructions if isinstance(i, Move) for r in i.results if r.placement.name == "actors"]
    assert [v.label for v in down] == ["state.params['w']"]
    assert not any(v in i.reads() for v in down for i in program.instructions if isinstance(i, RunProgram))
    assert not any("wait for the learner" in w for w in program.explain().warnings)


@dataclasses.dataclass(frozen=True)
class Apart:
    """A custom policy: every role has a separate device, so a fragment that contains others is opened."""

    staleness: int

    def layout(self, devices, sizes):
        roles = ("env", "actor", "learner", "server")
        return msrl.policies.Layout(
            {role: msrl.policies.Placement.over(role, [d]) for role, d in zip(roles, devices, strict=False)}, self.staleness
        )


def test_unmarked_code_in_an_opened_fragment_has_its_role():
    """Actors read a learner's unmarked code with delay, and an actor's unmarked code reads a learner with delay."""

    @msrl.fragment(role="env")
    def move(x):
        return 0.5 * x

    @msrl.fragment(role="actor")
    def act(w, count, x):
        return move(x) + w, count.astype(jnp.float32)

    @msrl.fragment(role="server")
    def apply(w, x):
        return w + x

    @msrl.fragment(role="learner")
    def learn(w, count, x, acted_at):
        return apply(w, x), count + 1, count - acted_at

    def iteration(state):
        w, count, x = state
        x, acted_at = act(w, count, x)
        w, count, age = learn(w, count, x, acted_at)
        return (w, count, x), {"age": age}

    start = jnp.float32(1), jnp.int32(0), jnp.float32(1)
    program = msrl.compile(iteration, start, policy=Apart(2))
    assert program.registers == {"[0]": 2, "[1]": 2}
    after, metrics = program.run(start, 4)
    w, x, late = 1.0, 1.0, [1.0, 1.0, 1.0]
    for _ in range(4):
        x = 0.5 * x + late.pop(0)
        w += x
        late.append(w)
    np.testing.assert_allclose([after.state[0], after.state[2]], [w, x])
    np.testing.assert_array_equal(metrics["age"], [0, 1, 2, 2])


@dataclasses.dataclass(frozen=True)
class Stale:
    """A custom policy: another policy with staleness added."""

    policy: msrl.policies.DistributionPolicy
    staleness: object = 1

    def layout(self, devices, sizes):
        return dataclasses.replace(self.policy.layout(devices, sizes), staleness=self.staleness)


@pytest.mark.parametrize("name", ["GPUOnly", "SingleLearnerFine", "Environments"])
def test_staleness_needs_actors_apart_from_learners(name):
    with pytest.raises(ValueError, match=r"nothing to delay.*SingleLearnerCoarse"):
        policy = Stale(msrl.policies.get(name))
        msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)


def test_a_loop_that_acts_and_learns_is_not_delayed():
    """It would learn from old parameters, and every other update would be lost."""

    def iteration(state):
        def step(state, _):
            state, metrics = toy.iteration(state)
            return state, metrics["loss"]

        state, losses = jax.lax.scan(step, state, None, length=2)
        return state, {"loss": losses.mean()}

    policy = msrl.policies.SingleLearnerCoarse(actors=4, staleness=1)
    with pytest.raises(ValueError, match=r"staleness=1 has nothing to delay"):
        msrl.compile(iteration, toy.initial_state(), policy=policy, axes=toy.AXES)


def test_staleness_is_refused_if_the_policy_has_none_or_it_is_not_a_number_of_iterations():
    for name in ("GPUOnly", "MultiLearner", "SingleLearnerFine", "Central", "Environments"):
        with pytest.raises(ValueError, match=r"has no parameter .staleness.*SingleLearnerCoarse"):
            msrl.policies.get(name, staleness=1)
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match=rf"staleness={wrong} must be an integer of at least 0"):
            msrl.policies.SingleLearnerCoarse(staleness=wrong)
        with pytest.raises(ValueError, match=rf"staleness={wrong} must be an integer of at least 0"):
            Stale(msrl.policies.SingleLearnerCoarse(), wrong).layout(jax.devices(), {})


def test_states_of_another_staleness_are_refused():
    def program(staleness):
        policy = msrl.policies.SingleLearnerCoarse(actors=2, staleness=staleness)
        return msrl.compile(toy.iteration, toy.initial_state(), policy=policy, axes=toy.AXES)

    one, two = program(1), program(2)
    state = one.place(toy.initial_state())
    with pytest.raises(ValueError, match=r"1 registers.*program has 2.*unwrap"):
        two.run(state, 1)


def test_environments_that_read_fresh_parameters_are_warned_of():
    step = lambda params, x: x + params.sum()
    learn = msrl.fragment(role="learner")(lambda params, x: params - x.mean())
    act = msrl.fragment(role="actor")(lambda params, x: x * params.sum())

    def warnings(role):
        env = msrl.fragment(role=role, name="step")(step)

        def iteration(s):
            params, x = s
            x = env(params, act(params, x))
            return (learn(params, x), x), {}

        state, policy = (jnp.ones(2), jnp.ones(8)), msrl.policies.SingleLearnerCoarse(staleness=1)
        return msrl.compile(iteration, state, policy=policy, axes=(P(), P("env"))).explain().warnings

    assert any("step' on the actors' devices (actors) reads the learner's newest values" in w for w in warnings("env"))
    assert not any("newest values" in w for w in warnings("actor"))
