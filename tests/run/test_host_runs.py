"""Runs with simulators on the host: killed workers, evaluation, recording, resuming."""

import os
import signal
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import msrl_jax as msrl

PENDULUM = "gymnasium:Pendulum-v1:num_workers=2"
SMALL = {"num_envs": 8, "unroll_length": 32, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (8,), "progress": False}
POLICY = "MultiLearner:num_devices=1"


def children():
    """The worker processes of this process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            command, parent = path.with_name("cmdline").read_bytes(), path.read_text().rsplit(")", 1)[1].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"msrl_jax.envs.simulate" in command and int(parent) == os.getpid():
            found.add(int(path.parent.name))
    return found


@pytest.fixture
def workers():
    """Returns a function that lists the workers which the test has started: a test before may have left some."""
    before = children()
    return lambda: sorted(children() - before)


@pytest.mark.long
def test_a_policy_that_works_is_chosen_for_simulators_and_their_workers_end(capfd, workers):
    """With the run, and with an evaluation."""
    small = SMALL | {"progress": "lines"}
    result = msrl.train("ppo", "gymnasium:Pendulum-v1", total_steps=256, eval_episodes=1, **small)
    assert result.description["policy"].startswith("MultiLearner") and "MultiLearner on" in repr(result)
    assert capfd.readouterr().err.startswith("policy MultiLearner: the host simulates gymnasium:Pendulum-v1\n")
    assert not workers()
    result.evaluate(1, max_steps=3)
    assert not workers()
    with pytest.raises(ValueError, match="MultiLearner"):
        msrl.train("ppo", "gymnasium:Pendulum-v1", policy="GPUOnly", **SMALL)


KILLS = 2


@pytest.mark.long
def test_a_run_goes_on_when_its_workers_are_killed(caplog, workers):
    killed, all_step, over, begun = [], threading.Event(), threading.Event(), time.monotonic()

    def noticed():
        return caplog.text.count("the worker ended with code -9")

    def kill():
        all_step.wait(60)  # a worker that never stepped has fewer tries
        while len(killed) < KILLS and not over.wait(0.7):
            if pids := workers():
                os.kill(pids[len(killed) % len(pids)], signal.SIGKILL)
                killed.append(pids)

    def enough(tick):
        if tick.metrics["absent"] == 0:
            all_step.set()
        return noticed() == KILLS or time.monotonic() - begun > 120

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        options = SMALL | {"total_steps": 10**7, "chunk": 2, "eval_episodes": 0, "callbacks": [enough]}
        result = msrl.train("ppo", PENDULUM, policy=POLICY, **options)
    finally:
        over.set()
        killer.join()
    history = result.history
    assert len(killed) == KILLS and noticed() == KILLS
    np.testing.assert_array_equal(np.diff(history["step"]), 2 * 8 * 32)  # every step of the run was taken
    absent = history["absent"]
    assert 0 < absent.mean() < 0.9 and absent.min() == 0
    returns = history["episode_return"][np.isfinite(history["episode_return"])]
    assert ((returns > -2000) & (returns < -500)).all(), "episodes that were cut do not count"


@pytest.mark.slow
def test_evaluation_recording_and_resuming_are_as_on_devices(tmp_path):
    out, data = tmp_path / "run", tmp_path / "data.npz"
    options = SMALL | {"policy": POLICY}
    msrl.train("ppo", PENDULUM, total_steps=2048, record=data, **options)
    recorded = msrl.data.load(data)
    assert len(recorded) == 2048 and len(recorded.episodes.start) == 16
    first = msrl.train("ppo", PENDULUM, total_steps=2048, out=out, **options)
    evaluated = first.evaluate(3)
    assert (evaluated.lengths == 200).all() and (evaluated.returns < -200).all()
    np.testing.assert_array_equal(evaluated.returns, msrl.Result.load(out).evaluate(3).returns)
    assert len(msrl.data.record(first, 100, seed=1)) == 100
    after = msrl.train("ppo", PENDULUM, total_steps=4096, out=out, resume=True, **options)
    absent = after.history["absent"][np.searchsorted(after.history["step"], 2049)]
    assert absent > 0, "the steps that cut the episodes do not count"
    assert after.history["step"][-1] == 4096 and after.history["absent"][-1] == 0


def test_what_cannot_run_is_refused():
    with pytest.raises(ValueError, match=r"seeds=2: .* gymnasium:Pendulum-v1 is simulated on the host; run one after another"):
        msrl.train("ppo", PENDULUM, policy=POLICY, total_steps=2048, seeds=2, **SMALL)
    with pytest.raises(TypeError, match="creates its own parallel copies, so its parameters cannot be data"):
        msrl.train("ppo", PENDULUM, policy=POLICY, total_steps=2048, env_params={"g": 5.0}, **SMALL)


class Licensed(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, **options):
        raise PermissionError("no licence file")


def test_errors_of_environments_are_those_of_the_run():
    env = msrl.envs.GymnasiumEnvironment(Licensed, "licensed", num_workers=1)
    with pytest.raises(RuntimeError, match=r"of licensed failed 3 times in a row(.|\n)*PermissionError: no licence file"):
        msrl.train("ppo", env, policy=POLICY, total_steps=2048, **SMALL)


@pytest.mark.long
def test_learning_from_data_alone_and_evaluating_on_the_host(tmp_path):
    name = "gymnasium:CartPole-v1:num_workers=1"
    options = {"hidden_sizes": (8,), "progress": False}
    made = msrl.train("a2c", name, policy=POLICY, total_steps=512, num_envs=8, eval_episodes=0, **options)
    data = msrl.data.record(made, 300, tmp_path / "data.npz")
    result = msrl.train("bc", name, data=data, total_steps=20, batch_size=32, eval_episodes=2, **options)
    assert result.evaluation.lengths.min() > 5


@pytest.mark.slow
def test_memory_stays_flat_over_a_million_steps():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    held = []
    msrl.train(
        "ppo",
        "gymnasium:CartPole-v1:num_workers=2",
        policy=POLICY,
        total_steps=1_000_000,
        callbacks=[lambda tick: held.append((tick.step, resident()))],
        chunk=20,
        **SMALL | {"num_envs": 64},
    )
    early = [size for step, size in held if 200_000 < step < 400_000]
    late = [size for step, size in held if step > 800_000]
    assert np.mean(late) - np.mean(early) < 2**23, "8 MiB"
