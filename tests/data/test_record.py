"""Recordings equal the actual steps of a trained policy or of a training run, and recording does not change the run."""

import json
import re

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.classic_control import cartpole

import msrl_jax as msrl
from msrl_jax import data, envs
from msrl_jax.cli import main
from msrl_jax.data.experience import ExperienceWriter, RecordedEnvironment
from msrl_jax.run.prepare import make_experiment
from tests.support.compiled import instructions
from tests.support.random_walk import RandomWalk
from tests.support.runs import assert_same_state
from tests.support.training_envs import Lottery

PPO = {
    "num_envs": 8,
    "unroll_length": 8,
    "num_epochs": 1,
    "num_minibatches": 2,
    "hidden_sizes": (8,),
    "normalize_observations": True,
    "normalize_rewards": True,
}
ENV = "CartPole-v1:max_steps_in_episode=30"


def by_gymnax(dataset, rtol=1e-6):
    """Plays every recorded action from every recorded observation, which is the whole state of CartPole, in gymnax."""
    env, params = gymnax.make("CartPole-v1")

    def step(obs, action):
        state = cartpole.EnvState(time=0, x=obs[0], x_dot=obs[1], theta=obs[2], theta_dot=obs[3])
        next_obs, _, reward, terminated, *_ = env.step_env(jax.random.key(0), state, action, params)
        return next_obs, reward, terminated

    next_obs, reward, terminated = jax.device_get(jax.jit(jax.vmap(step))(dataset.obs, dataset.action))
    np.testing.assert_allclose(dataset.next_obs, next_obs, rtol=rtol, atol=rtol)
    np.testing.assert_array_equal(dataset.reward, reward)
    np.testing.assert_array_equal(dataset.terminated, terminated)
    whole = ~dataset.terminated & ~dataset.truncated
    np.testing.assert_array_equal(dataset.next_obs[:-1][whole[:-1]], dataset.obs[1:][whole[:-1]])
    start, length, returns = dataset.episodes
    np.testing.assert_array_equal(returns, length)
    assert length.max() <= 30 and (np.abs(dataset.obs[start]) <= 0.05).mean() > 0.9


def train(algo="ppo", env=ENV, policy="GPUOnly", devices=1, iterations=5, chunk=2, config=PPO, **options):
    return msrl.train(
        algo,
        env,
        policy=policy,
        total_steps=iterations * 64,
        seed=3,
        chunk=chunk,
        eval_episodes=0,
        progress=False,
        devices=jax.devices()[:devices],
        **config,
        **options,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of 5 iterations in chunks of 2, 2 and 1, and what it recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    return train(record=folder / "run.npz", out=folder / "run"), folder / "run.npz"


def test_every_step_of_a_run_is_recorded(recorded):
    result, path = recorded
    dataset = data.load(path)
    assert len(dataset) == 5 * 64 and sorted(p.name for p in path.parent.iterdir()) == ["run", "run.npz"]
    by_gymnax(dataset)
    assert dataset.about["made_by"] == "training ppo" and dataset.about["env"] == ENV
    last = dataset.terminated.reshape(8, 40) | dataset.truncated.reshape(8, 40)
    assert last[:, -1].all()
    # The run's observation statistics include all recorded observations, and those after its last step.
    after = np.asarray(result.state.env_state.env_state.running.mean) * 8 * 41 - dataset.obs.sum(0)
    cart = result.state.env_state.env_state.env_state.env_state.env_state
    np.testing.assert_allclose(after / 8, [x.mean() for x in (cart.x, cart.x_dot, cart.theta, cart.theta_dot)], atol=1e-4)


def test_recording_changes_no_bit_and_leaves_no_trace(recorded):
    result, plain = recorded[0], train()
    assert_same_state(result.state, plain.state)
    for name, column in plain.history.items():
        if name not in ("seconds", "steps_per_second"):
            np.testing.assert_array_equal(result.history[name], column, err_msg=name)
    assert_same_state(msrl.Result.load(recorded[1].parent / "run").state, plain.state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "devices"),
    [("SingleLearnerFine", 3), ("Central", 8)]
    + [pytest.param(p, n, marks=pytest.mark.slow) for p in msrl.policies.names() for n in (2, 4)],
)
def test_every_policy_records_the_same(policy, devices, recorded, tmp_path):
    train(policy=policy, devices=devices, record=tmp_path / "run.npz")
    assert_same_rows(data.load(tmp_path / "run.npz"), data.load(recorded[1]))


def test_a_step_writes_its_row_and_copies_no_other():
    setup = make_experiment("ppo", ENV, total_steps=6400, **PPO).record(1600)
    (program,) = setup.compile(msrl.policies.GPUOnly(1)).compiled()
    made_by = [made.kind for made in instructions(program) if re.match(r"\w+\[1600,8", made.shape)]
    assert [kind for kind in made_by if kind in ("copy", "dynamic-update-slice")] == ["dynamic-update-slice"] * 6


def assert_same_rows(a, b):
    for name in data.dataset.FIELDS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


@pytest.mark.slow
def test_members_are_recorded_one_after_another(recorded, tmp_path):
    train(seeds=2, record=tmp_path / "run.npz")
    both = data.load(tmp_path / "run.npz")
    assert len(both) == 2 * 320
    by_gymnax(both)
    assert_same_rows(both.select(slice(320)), data.load(recorded[1]))
    assert (both.obs[320:] != both.obs[:320]).any()


OTHERS = {
    "es": {"num_envs": 8, "unroll_length": 12, "hidden_sizes": (4,)},
    "sac": {
        "num_envs": 8,
        "unroll_length": 6,
        "hidden_sizes": (4,),
        "replay.learning_starts": 48,
        "replay.capacity": 400,
        "batch_size": 16,
        "num_updates": 1,
    },
    "a3c": {"num_envs": 8, "unroll_length": 6, "hidden_sizes": (4,), "num_workers": 4},
    "recurrent_ppo": {"num_envs": 8, "unroll_length": 6, "hidden_sizes": (4,), "num_minibatches": 2, "core.size": 4},
    "impala": {"num_envs": 8, "unroll_length": 6, "hidden_sizes": (4,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("algo", OTHERS)
def test_any_algorithm_can_be_recorded(algo, tmp_path):
    """A walk shows its position, its square and the time in units of 5; each step is worth the position that it reaches."""
    settings = {"algo": algo, "env": RandomWalk(algo == "sac"), "config": OTHERS[algo], "iterations": 9}
    plain, result = train(**settings), train(**settings, record=tmp_path / "walk.npz")
    assert_same_state(result.state, plain.state)
    dataset = data.load(tmp_path / "walk.npz")
    assert len(dataset) == result.history["step"][-1]
    np.testing.assert_array_equal(dataset.reward, dataset.next_obs[:, 0])
    np.testing.assert_allclose(dataset.next_obs[:, 2], dataset.obs[:, 2] + 0.2, rtol=1e-6)
    np.testing.assert_array_equal(dataset.terminated, np.abs(dataset.reward) > 1)
    assert (dataset.obs[dataset.episodes.start, 2] == 0).mean() > 0.9 and dataset.episodes.length.max() == 5
    data.check_spaces(dataset, settings["env"])


def test_what_a_run_did_that_ended_with_an_error_is_there(tmp_path):
    def fail(tick):
        if tick.iteration == 4:
            raise OSError("no connection")

    with pytest.raises(OSError, match="no connection"):
        train(record=tmp_path / "run.npz", callbacks=[fail])
    assert len(data.load(tmp_path / "run.npz")) == 4 * 64


@pytest.mark.long
def test_a_run_that_is_killed_leaves_parts_that_can_be_read(tmp_path):
    env = RecordedEnvironment(Lottery(), 3).vectorize(2)
    state, _ = env.reset(jax.random.key(0))
    recording, rows = ExperienceWriter(tmp_path / "run.npz", {"env": "Lottery"}), []
    for steps in (3, 3, 2):
        for _ in range(steps):
            before = state
            state, t = env.step(state, jnp.array([0, 1]))
            rows.append(jax.device_get((before.obs, t)))
        recording.add((state,), steps)
    (parts,) = tmp_path.iterdir()
    dataset = data.load(parts)
    assert len(dataset) == 16 and dataset.about == {"env": "Lottery"}
    for lane in range(2):
        part = dataset.select(slice(8 * lane, 8 * lane + 8))
        np.testing.assert_array_equal(part.obs, [obs[lane] for obs, _ in rows])
        np.testing.assert_array_equal(part.next_obs, [t.final_obs[lane] for _, t in rows])
        np.testing.assert_array_equal(part.action, lane)
        np.testing.assert_array_equal(part.terminated, [t.terminated[lane] for _, t in rows])
    with pytest.raises(ValueError, match=r"run.npz.parts holds the recording of a killed run"):
        ExperienceWriter(tmp_path / "run.npz", {})
    recording.finish()
    assert_same_rows(data.load(tmp_path / "run.npz"), dataset)
    assert not parts.exists()


@pytest.mark.parametrize(
    ("record", "message"),
    [("run", "suffix ''; use a file name that ends in .npz"), ("there.npz", "there.npz already exists; record to another")],
)
def test_a_file_that_cannot_be_is_refused_before_anything_compiles(record, message, tmp_path):
    (tmp_path / "there.npz").touch()
    with pytest.raises(ValueError, match=message):
        train(record=tmp_path / record)
    assert (tmp_path / "there.npz").stat().st_size == 0


class Parted:
    """Observations of one part, with a name that no column can have."""

    observation_space = envs.Dict({"x/y": envs.Box(0, 1, (2,))})
    action_space = envs.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), {"x/y": jnp.zeros(2)}

    def step(self, key, state, action):
        return state, {"x/y": jnp.zeros(2)}, jnp.float32(0), jnp.asarray(True), jnp.asarray(False)


def test_what_cannot_be_recorded_is_refused_before_anything_compiles(tmp_path):
    where = str(tmp_path / "run.npz")
    still, none = np.zeros((900, 4), np.float32), np.zeros(900, int)
    standing = data.Dataset(still, none, none, none, np.arange(900) % 9 == 8, still)
    with pytest.raises(ValueError, match=r"run.npz': bc takes no environment steps; omit it"):
        msrl.train("bc", "CartPole-v1", data=standing, record=where)
    with pytest.raises(ValueError, match=r"Parted cannot be recorded: obs has a part with the name 'x/y'"):
        msrl.train("ppo", Parted(), record=where)
    too_large = r"a data set of [\d,]+ rows of 42 bytes, .* takes at least [\d,]+ bytes of memory.* Record a shorter run"
    with pytest.raises(ValueError, match=too_large):
        train(record=where, iterations=10**9, chunk=10**8)
    assert not list(tmp_path.iterdir())


def test_a_greedy_policy_is_recorded(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr("msrl_jax.data.rollout._CHUNK", 64)
    result = recorded[0]
    dataset = data.record(result, 401, tmp_path / "greedy.npz", epsilon=0, num_envs=4)
    assert len(dataset) == 401
    by_gymnax(dataset)
    np.testing.assert_array_equal(dataset.action, result.act(dataset.obs))
    assert_same_rows(data.load(tmp_path / "greedy.npz"), dataset)
    assert dataset.about["made_by"] == "ppo, greedy except for epsilon=0"
    with pytest.raises(ValueError, match=r"greedy\.npz already exists"):
        data.record(result, 5, tmp_path / "greedy.npz")


def test_random_and_sampled_actions_have_their_frequencies(recorded):
    result = recorded[0]
    half = data.record(result, 4000, epsilon=0.5, seed=1)
    differs = (half.action != np.asarray(result.act(half.obs))).mean()
    assert abs(differs - 0.25) < 4 * np.sqrt(0.25 * 0.75 / 4000)
    sampled = data.record(result, 4000, seed=1)
    again = np.stack([result.act(sampled.obs, key) for key in jax.random.split(jax.random.key(5), 50)])
    assert abs(sampled.action.mean() - again.mean()) < 4 * np.sqrt(0.25 / 4000)
    assert (sampled.action != half.action).any()


def test_the_seed_of_a_run_records_other_episodes_than_those_of_its_training(recorded):
    result, path = recorded
    trained, dataset = data.load(path), data.record(result, 64, seed=3, num_envs=8)
    first, others = trained.obs[trained.episodes[0]], dataset.obs[dataset.episodes[0]]
    assert len(others) >= 8 and not (first[:, None] == others).all(-1).any()


@pytest.mark.slow
def test_a_carry_is_reset_at_the_start_of_an_episode():
    result = train(algo="recurrent_ppo", env=RandomWalk(), config=OTHERS["recurrent_ppo"], iterations=3)
    dataset, memory = data.record(result, 40, epsilon=0, num_envs=1), None
    for i in range(40):
        action, memory = result.act_with_carry(dataset.obs[i], memory)
        assert action == dataset.action[i]
        if dataset.terminated[i] or dataset.truncated[i]:
            memory = None


def test_the_command_line_records(recorded, tmp_path, capsys):
    folder, out = recorded[1].parent / "run", tmp_path / "some.npz"
    assert main(["record", str(folder), "--steps", "50", "--out", str(out), "--epsilon", "0.1", "--json"]) == 0
    described = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert described["rows"] == len(data.load(out)) == 50 and described["file"] == str(out)
    assert main(["record", str(folder), "--steps", "50", "--out", str(out)]) == 2
    assert "already exists" in capsys.readouterr().err
