import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.algorithms import DQN, PPO, counted
from msrl_jax.run.loop.callbacks import _facts
from tests.support.measured import Measured, MeasuredTeam, Unmeasured
from tests.support.slow import slow_unless

T, E = 40, 6
NAMES = list(Measured.metrics)


def by_hand(places, lengths):
    """The metrics of one episode by its places: before the first step, and after each."""
    places = np.array(places, float)
    after, crossings = places[1:], np.diff(places >= 0).sum()
    assert len(after) == lengths
    return {"place": after[-1], "crossings": crossings, "offset": (0.5 * after).mean(), "highest": after.max()}


def episodes_of(first, obs, final_obs, ended):
    """The metrics of all episodes that ended, from observations `[T, E, 2]`."""
    found = []
    for e in range(ended.shape[1]):
        places = [first[e, 0]]
        for t in range(len(ended)):
            places.append(final_obs[t, e, 0])
            if ended[t, e]:
                found.append(by_hand(places, final_obs[t, e, 1]))
                places = [obs[t, e, 0]]
    return found


WRAPPED = {
    "plain": lambda env: env,
    "time limit": lambda env: envs.TimeLimit(env, 100),
    "flat": lambda env: envs.FlattenObservation(envs.TimeLimit(env, 50)),
    "pool of one": lambda env: envs.ResetPool(env, 1),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_metrics_are_those_of_episodes_reduced_by_hand(wrap):
    venv = envs.EpisodeStatistics(envs.vectorize(WRAPPED[wrap](Measured()), E))
    actions = jax.random.randint(jax.random.key(1), (T, E), 0, 2)

    @jax.jit
    def play(key):
        state, first = venv.reset(key)
        state, played = jax.lax.scan(lambda s, a: (lambda s, t: (s, t))(*venv.step(s, a)), state, actions)
        state, metrics = venv.pop_episodes(state)
        return first, played, metrics, venv.pop_episodes(state)[1]

    first, t, metrics, again = jax.device_get(play(jax.random.key(0)))
    episodes = episodes_of(first, t.obs, t.final_obs, t.ended)
    assert len(episodes) > 40
    for name in NAMES:
        np.testing.assert_allclose(metrics[f"episode_{name}"].mean(), np.mean([x[name] for x in episodes]), rtol=1e-5)
        assert metrics[f"episode_{name}"].count == len(episodes) and again[f"episode_{name}"].count == 0


def test_several_agents_have_one_metric_in_common():
    venv = envs.vectorize(MeasuredTeam(), E)
    actions = jax.random.randint(jax.random.key(1), (T, E, 2), 0, 2)

    @jax.jit
    def play(key):
        state, first = venv.reset(key)
        state, played = jax.lax.scan(lambda s, a: (lambda s, t: (s, t))(*venv.step(s, a)), state, actions)
        return first, played, venv.pop_episodes(state)[1]

    first, t, metrics = jax.device_get(play(jax.random.key(0)))
    episodes = episodes_of(first[:, 0], t.obs[:, :, 0], t.final_obs[:, :, 0], t.ended)
    for name in NAMES:
        np.testing.assert_allclose(metrics[f"episode_{name}"].mean(), np.mean([x[name] for x in episodes]), rtol=1e-5)


def test_steps_without_an_answer_do_not_count():
    class Absent:
        """Each environment answers every second step; one that does not has no metrics."""

        num_envs, metrics, axes = 2, {"x": "mean", "y": "max", "z": "last", "n": "sum"}, None
        values = jnp.array([[3.0, -5], [jnp.nan, 7], [4, jnp.nan], [jnp.nan, -9]])

        def reset(self, key):
            return jnp.int32(0), jnp.zeros(2)

        def step(self, state, action):
            x = self.values[state]
            valid, over = ~jnp.isnan(x), jnp.full(2, state == 3)
            late = over & jnp.array([False, True])
            t = envs.TimeStep(x, jnp.zeros(2), late, over & ~late, x, valid, metrics=jnp.stack([x] * 4, 1))
            return state + 1, t

        def pop_episodes(self, state):
            return state, {}

    venv = envs.EpisodeStatistics(Absent())
    state, _ = venv.reset(jax.random.key(0))
    for _ in range(4):
        state, _ = venv.step(state, None)
    _, metrics = venv.pop_episodes(state)
    # The first episode is lost with its last step; the second one has three answers.
    found = {name: float(metrics[f"episode_{name}"].mean()) for name in "xyzn"}
    assert found == {"x": pytest.approx(-7 / 3), "y": 7, "z": -9, "n": -7}


def agent_of(algorithm, env):
    if algorithm == "ppo":
        return counted(PPO(num_envs=16, unroll_length=8, num_minibatches=2, num_epochs=1, hidden_sizes=(8,)).build(env), 9)
    options = {"batch_size": 16, "replay.capacity": 512, "replay.learning_starts": 128}
    return counted(
        msrl.algorithms.make(DQN, {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (8,)} | options).build(env), 9
    )


RUNS = [
    (algorithm, *where)
    for algorithm in ("ppo", "dqn")
    for where in (("SingleLearnerCoarse", 4), ("GPUOnly", 2), ("Environments", 4), ("Central", 8))
]


@pytest.mark.long
@pytest.mark.parametrize(("algorithm", "policy", "devices"), [slow_unless(run == RUNS[0], *run) for run in RUNS])
def test_metrics_change_no_bits_and_policies_none_of_them(algorithm, policy, devices):
    results = {}
    for kind in (Measured, Unmeasured):
        agent = agent_of(algorithm, kind())
        state = jax.jit(agent.init)(jax.random.key(0))

        def step(state, _, agent=agent):
            return agent.iteration(state)

        results[kind] = *jax.jit(lambda s, step=step: jax.lax.scan(step, s, None, length=3))(state), agent, state
    (after, metrics, agent, start), (other, fewer, *_) = results[Measured], results[Unmeasured]
    assert set(metrics) - set(fewer) == {f"episode_{name}" for name in NAMES}
    for x, y in zip(jax.tree.leaves(after.inner.params), jax.tree.leaves(other.inner.params), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(*(jax.device_get(m["episode_return"].total) for m in (metrics, fewer)))
    policy = msrl.policies.get(policy)
    program = msrl.compile(agent.iteration, start, policy=policy, axes=agent.axes, devices=jax.devices()[:devices])
    _, found = program.run(start, 3, chunk=3)
    for name in NAMES:
        same = found[f"episode_{name}"], metrics[f"episode_{name}"]
        np.testing.assert_array_equal(*(np.asarray(m.count) for m in same))
        np.testing.assert_allclose(*(np.asarray(m.total) for m in same), rtol=1e-5, atol=1e-5)


def run_of(env, tiny, **options):
    return msrl.train("ppo", env, total_steps=4 * 64, eval_episodes=8, progress=False, chunk=1, **tiny, **options)


@pytest.fixture(scope="module")
def run(tiny, one_device, tmp_path_factory):
    """A run of two members, its folder, and what its callback was told."""
    folder, lines = tmp_path_factory.mktemp("measured"), []
    result = run_of(
        Measured(),
        tiny,
        devices=one_device,
        seeds=2,
        out=folder / "run",
        record=folder / "steps.npz",
        callbacks=[lambda tick: lines.append((tick.metrics, _facts(tick)))],
    )
    return result, folder, lines


@pytest.mark.long
def test_history_evaluation_summary_and_data_have_them(run):
    result, folder, lines = run
    assert len(msrl.data.load(folder / "steps.npz")) == 2 * 4 * 64
    assert {f"episode_{name}" for name in NAMES} <= set(result.history) and result.history["episode_place"].shape == (4, 2)
    assert {f"eval_{name}" for name in NAMES} <= set(result.history)
    assert all("episode_highest" in row and re.search(r"  crossings \S+  highest \S+  offset ", facts) for row, facts in lines)
    assert {"episode_place", "eval_place"} <= set(result.summary())
    # An evaluation by hand: the place at the end of the same greedy episodes.
    evaluation = result.evaluation
    assert list(evaluation.metrics) == NAMES and evaluation.metrics["place"].shape == (2, 8)
    assert (evaluation.metrics["highest"] >= evaluation.metrics["place"]).all()
    moved = np.abs(evaluation.metrics["place"] - evaluation.metrics["place"].round())
    assert (moved == 0).all() and "highest" in repr(evaluation)
    loaded = msrl.Result.load(folder / "run", env=Measured())
    np.testing.assert_array_equal(loaded.evaluation.metrics["offset"], evaluation.metrics["offset"])


@pytest.mark.long
def test_an_evaluation_reduces_the_episodes_that_it_plays(run):
    result, *_ = run
    played = result.evaluate(16, seed=5)
    short = result.evaluate(16, seed=5, max_steps=1)
    # After one step, all four are about the same place.
    np.testing.assert_array_equal(short.metrics["place"], short.metrics["highest"])
    np.testing.assert_array_equal(short.metrics["place"] / 2, short.metrics["offset"])
    assert (played.metrics["highest"] >= short.metrics["highest"]).all()
    assert set(np.unique(short.metrics["crossings"])) <= {0, 1}


def test_env_params_reach_the_report():
    class Scaled(Measured):
        def __init__(self, scale=1.0):
            self.scale, self.default_params, self.metrics = scale, {"scale": 1.0}, {"place": "last"}

        def with_params(self, params):
            return Scaled(params.get("scale", self.scale))

        def step(self, key, state, action):
            state, obs, reward, terminated, truncated = super().step(key, state, action)
            return state, obs, reward * self.scale, terminated, truncated

        def report(self, state):
            return {"place": self.scale * jnp.ones(())}

    venv = envs.EpisodeStatistics(envs.vectorize(envs.RandomizeParams(envs.TimeLimit(Scaled(), 9), {"scale": 3.0}), E))

    @jax.jit
    def play(key):
        state, _ = jax.lax.scan(venv.step, venv.reset(key)[0], jnp.zeros((T, E), jnp.int32))
        return venv.pop_episodes(state)[1]["episode_place"]

    place = play(jax.random.key(0))
    assert place.count > E and place.total == 3 * place.count


def changed(**members):
    return type("Broken", (Measured,), members)()


def reporting(x):
    return changed(metrics={"x": "sum"}, report=lambda self, state: {"x": x})


REFUSED = {
    "reduction": (changed(metrics={"place": "lats"}), "Broken.metrics['place'] is 'lats' (did you mean 'last'?); use one of "),
    "name": (changed(metrics={"a place": "last"}), "Broken.metrics has 'a place'; use letters, digits and _"),
    "reserved": (changed(metrics={"return": "sum"}), "Broken.metrics has 'return', which every environment reports"),
    "missing": (changed(report=lambda self, s: {"place": s.place}), "Broken.report returned no 'crossings', which metrics"),
    "undeclared": (changed(metrics={"place": "last"}), "Broken.report returned 'highest', which metrics does not declare"),
    "shape": (reporting(jnp.ones(2)), "'x' of Broken.report is float32[2]; return a scalar number or bool"),
    "dict": (changed(report=lambda self, s: s.place), "Broken.report returned int32[]; return a dict of the metrics by name"),
    "method": (changed(report=property(lambda self: self.nothing)), "Broken declares metrics, but has no method report(state)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_metric_is_refused_before_anything_compiles(case, monkeypatch):
    env, message = REFUSED[case]
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *_: pytest.fail("compiled"))
    for use in (lambda: envs.vectorize(env, 2), lambda: msrl.train("ppo", env, total_steps=100)):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)) as caught:
            use()
        assert "\n" not in str(caught.value)
    assert envs.check(env).problems[0].startswith(message)


@pytest.mark.slow
def test_check_finds_metrics_that_are_no_numbers():
    env = changed(metrics={"x": "sum"}, report=lambda self, s: {"x": jnp.log(s.place.astype(float))})
    (problem,) = envs.check(env, num_envs=2).problems
    assert re.match(r"the metric 'x' of Broken.report is (-inf|nan) in \d+ of 400 steps", problem)
    silent = changed(metrics=None)
    assert any("report, but no metrics" in note for note in envs.check(silent).notes)
