import dataclasses
import json
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.agents.transformations import counted
from msrl_jax.fragments.counters import to_int
from msrl_jax.run import Experiment, Result, StopReason
from msrl_jax.run.loop.loop import _call
from msrl_jax.run.prepare import make_experiment

ENV = "CartPole-v1:max_steps_in_episode=30"


def assert_trees_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_allclose(x, y, err_msg=jax.tree_util.keystr(path), **tolerance)


@pytest.fixture(scope="module")
def by_hand(tiny):
    """The same run in plain JAX: a Python loop around one jitted iteration."""
    agent = counted(algorithms.get("ppo")(**tiny).build(envs.make("CartPole-v1", max_steps_in_episode=30)), 6)
    state, step, metrics = jax.jit(agent.init)(jax.random.key(3)), jax.jit(agent.iteration), []
    for _ in range(6):
        state, m = step(state)
        metrics.append(jax.device_get(m))
    return state, metrics


def test_training_is_the_plain_loop(trained, by_hand):
    state, metrics = by_hand
    assert_trees_close(trained.run_state, state, rtol=1e-5, atol=1e-6)
    for chunk in range(3):
        first, second = metrics[2 * chunk : 2 * chunk + 2]
        entropy = (float(first["entropy"]) + float(second["entropy"])) / 2
        assert trained.history["entropy"][chunk] == pytest.approx(entropy, rel=1e-5)
        one, two = first["episode_return"], second["episode_return"]
        mean = (one.total + two.total) / (one.count + two.count)
        assert trained.history["episode_return"][chunk] == pytest.approx(mean, rel=1e-6)


def test_the_history_counts_whole_iterations(trained):
    np.testing.assert_array_equal(trained.history["step"], [128, 256, 384])
    np.testing.assert_array_equal(trained.history["iteration"], [2, 4, 6])
    assert trained.status == "finished" and not trained.interrupted
    assert (np.diff(trained.history["seconds"]) > 0).all() and trained.history["seconds"][-1] < trained.wall_seconds
    assert (trained.history["steps_per_second"] > 0).all()
    assert 0 < trained.compile_seconds < trained.wall_seconds


def test_compilation_is_left_out_of_the_rate(trained):
    # With compilation inside, the first chunk alone would take compile_seconds.
    assert 128 / trained.history["steps_per_second"][0] < 0.5 * trained.compile_seconds


def test_the_state_does_not_depend_on_the_chunk(trained, tiny, one_device):
    run = msrl.train(
        "ppo", ENV, total_steps=6 * 64, chunk=4, seed=3, eval_episodes=0, devices=one_device, progress=False, **tiny
    )
    np.testing.assert_array_equal(run.history["iteration"], [4, 6])
    assert_trees_close(run.run_state, trained.run_state, rtol=1e-5, atol=1e-6)


def test_evaluations_happen_when_due_and_at_the_end(tiny, one_device):
    run = msrl.train(
        "ppo", ENV, total_steps=6 * 64, chunk=1, eval_episodes=2, eval_every=150, devices=one_device, progress=False, **tiny
    )
    # 150 is passed at 192, 300 at 320; 384 is the end.
    np.testing.assert_array_equal(~np.isnan(run.history["eval_return"]), [False, False, True, False, True, True])
    assert run.evaluation is not None
    assert run.history["eval_return"][-1] == run.evaluation.mean_return


def test_a_run_reports_the_parts_of_its_time(trained):
    parts = [trained.compile_seconds, *trained.timings.values()]
    assert len(parts) == 4 and min(parts) > 0 and sum(parts) <= trained.wall_seconds
    assert trained.wall_seconds - sum(parts) < 0.3 * trained.wall_seconds
    text = repr(trained)
    for word in ("compiling", "setting up", "training", "evaluation"):
        assert f"{word} " in text
    assert "384 steps of 389 asked for (whole iterations of 64)" in text


@pytest.mark.long
def test_a_callback_that_takes_the_state_away_is_named(tiny, one_device):
    def greedy(tick):
        jax.tree.leaves(tick.state.params)[0].delete()

    with pytest.raises(ValueError, match=r"callback .*greedy deleted or donated tick\.state\.params.*; donate a copy"):
        msrl.train(
            "ppo",
            ENV,
            total_steps=128,
            chunk=1,
            eval_episodes=0,
            devices=one_device,
            callbacks=[greedy],
            progress=False,
            **tiny,
        )


def test_callbacks_see_every_tick_and_may_stop(tiny, one_device):
    seen = []

    def stop_after_two(tick):
        seen.append((tick.step, tick.iteration, tick.total_steps, tick.metrics["entropy"]))
        assert jax.tree.leaves(tick.state.params)[0].shape
        return np.bool_(tick.iteration == 2)  # what comparisons of arrays give

    run = msrl.train(
        "ppo",
        ENV,
        total_steps=4 * 64,
        chunk=1,
        eval_episodes=0,
        devices=one_device,
        callbacks=[stop_after_two],
        progress=False,
        **tiny,
    )
    assert [s[:3] for s in seen] == [(64, 1, 256), (128, 2, 256)]
    np.testing.assert_array_equal(run.history["entropy"], [s[3] for s in seen])
    assert run.status == "stopped" and to_int(run.run_state.count) == 2


@pytest.fixture
def heeded():
    """Python's handler of Ctrl-C, which a shell has processes in the background ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield signal.default_int_handler
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_run_with_what_it_has(tiny, one_device, tmp_path, heeded):
    def press(tick):
        if tick.iteration == 2:
            signal.raise_signal(signal.SIGINT)  # is noted, and the chunk ends first
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)  # the second one means it

    run = msrl.train(
        "ppo",
        ENV,
        total_steps=4 * 64,
        chunk=1,
        eval_episodes=0,
        devices=one_device,
        out=tmp_path / "run",
        callbacks=[press],
        progress=False,
        **tiny,
    )
    assert run.interrupted and signal.getsignal(signal.SIGINT) is heeded
    np.testing.assert_array_equal(run.history["iteration"], [1, 2])
    loaded = Result.load(tmp_path / "run")
    assert loaded.interrupted and to_int(loaded.run_state.count) == 2


@pytest.mark.long
def test_a_callback_may_raise_ctrl_c_and_nothing_is_written_unless_asked_for(tiny, one_device, tmp_path, monkeypatch, capfd):
    def press(tick):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    run = msrl.train(
        "ppo", ENV, total_steps=2 * 64, chunk=1, eval_episodes=0, devices=one_device, callbacks=[press], progress=False, **tiny
    )
    assert run.interrupted and to_int(run.run_state.count) == 1
    assert list(tmp_path.iterdir()) == []
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err == ""


MISTAKES = [
    ({"algo": "pppo"}, "did you mean 'ppo'"),
    ({"env": "CartPol-v1"}, "did you mean 'CartPole-v1'"),
    ({"policy": "GPUOnli"}, "did you mean 'GPUOnly'"),
    ({"policy": "SingleLearnerCoarse:learner=2"}, "did you mean 'learners'"),
    ({"num_env": 3}, "has no field 'num_env' .did you mean 'num_envs'"),
    ({"total_steps": 63}, "less than the 64 steps of one iteration"),
    ({"total_steps": 0}, "total_steps=0"),
    ({"chunk": 0}, "chunk=0"),
    ({"progress": "loud"}, "progress='loud'"),
    ({"config": object()}, "PPO has no field 'config'"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[m for _, m in MISTAKES])
def test_mistakes_are_found_before_anything_compiles(tiny, mistake, message, tmp_path, caplog):
    arguments = {"total_steps": 64, "progress": False, "out": tmp_path / "run", **tiny} | mistake
    with jax.log_compiles(), pytest.raises(ValueError, match=message):
        msrl.train(**arguments)
    assert not [r for r in caplog.records if "Finished XLA compilation of jit(initial_state)" in r.getMessage()]
    assert not (tmp_path / "run").exists()


def test_an_experiment_is_what_its_arguments_say(tiny, one_device, tmp_path):
    experiment = make_experiment("ppo", ENV, total_steps=4 * 64, seed=3, **tiny)
    assert Experiment.from_json(json.loads(json.dumps(experiment.to_json()))) == experiment
    assert make_experiment(type(experiment.algorithm)(**tiny), ENV, total_steps=4 * 64, seed=3) == experiment
    assert experiment.difference(dataclasses.replace(experiment, seed=4)) == ("seed", 3, 4)
    options = {"chunk": 2, "eval_episodes": 0, "devices": one_device, "progress": False}
    half = msrl.train(experiment, out=tmp_path / "run", callbacks=[lambda tick: True], **options)
    assert half.experiment == experiment and half.status == "stopped"
    other = dataclasses.replace(experiment, seed=4)
    with pytest.raises(ValueError, match="has seed=3, and cannot resume with seed=4"):
        msrl.train(other, resume=tmp_path / "run", **options)
    with pytest.raises(ValueError, match="seeds=2: an Experiment already holds it"):
        msrl.train(experiment, seeds=2, **options)
    goes_on = msrl.train(experiment, resume=tmp_path / "run", **options)
    assert goes_on.status == "finished" and goes_on.history["iteration"].tolist() == [2, 4]


def test_hooks_are_called_around_every_chunk(tiny, one_device):
    calls = []

    class Hook:
        def begin(self, run):
            calls.append(("begin", run.iteration))

        def before(self, run):
            return StopReason("stopped") if run.iteration == 2 else calls.append(("before", run.iteration))

        def after(self, run):
            calls.append(("after", run.iteration))

        def end(self, run):
            calls.append(("end", run.stop_reason.status))

    run = msrl.train(
        "ppo", ENV, total_steps=4 * 64, chunk=1, eval_episodes=0, devices=one_device, callbacks=[Hook()], progress=False, **tiny
    )
    assert run.status == "stopped" and run.history["iteration"].tolist() == [1, 2]
    around = [(phase, i) for i in (0, 1) for phase in ("before", "after")]
    assert calls == [("begin", 0), *((phase, i + (phase == "after")) for phase, i in around), ("end", "stopped")]


def test_a_hook_stops_a_run_by_any_true_value_and_by_no_status_of_its_own():
    answering = lambda answer: type("Answering", (), {"after": lambda self, run: answer})()
    for answer in (True, np.True_, jnp.bool_(True)):
        assert _call(answering(answer), "after", None) == StopReason("stopped")
    for answer in (None, False, np.False_, 1, "stop"):
        assert _call(answering(answer), "after", None) is None
    with pytest.raises(ValueError, match=r"Answering.after returned StopReason\('plateau'\); the status is one of"):
        _call(answering(StopReason("plateau")), "after", None)


@pytest.mark.slow
def test_a_hook_that_cannot_end_keeps_neither_the_others_nor_the_result(tiny, one_device, tmp_path):
    ended = []

    class First:
        def end(self, run):
            ended.append(run.stop_reason.status)

    class Broken:
        def end(self, run):
            raise OSError("no connection")

    class Last:
        def end(self, run):
            raise KeyError("missing")

    options = {"total_steps": 2 * 64, "eval_episodes": 0, "devices": one_device, "progress": False, "out": tmp_path / "run"}
    with pytest.raises(KeyError, match="missing") as caught:
        msrl.train("ppo", ENV, callbacks=[First(), Broken(), Last()], **options, **tiny)
    notes = "\n".join(caught.value.__notes__)
    assert re.search(r"`end` of the hook \S*Last;.*\nthen OSError: no connection\n.*`end` of the hook \S*Broken", notes)
    assert ended == ["finished"] and caught.value.result.status == Result.load(tmp_path / "run").status == "finished"


@pytest.mark.parametrize("policy", ["GPUOnly:num_devices=1", "SingleLearnerCoarse:actors=1"])
def test_a_run_makes_all_its_transfers_explicit(policy, tmp_path):
    small = {"num_envs": 4, "unroll_length": 8, "hidden_sizes": (8,), "num_epochs": 1, "num_minibatches": 2, "progress": False}
    with jax.transfer_guard("disallow"):
        msrl.train("ppo", "CartPole-v1", policy=policy, total_steps=64, eval_episodes=1, out=tmp_path / "run", **small)
