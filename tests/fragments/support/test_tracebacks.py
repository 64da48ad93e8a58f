"""Errors that a user's values and functions cause show the user's frames; bugs of this package show all."""

import sys
import traceback

import jax
import pytest

import msrl_jax as msrl
from msrl_jax.cli import main
from tests.support.corridor import Corridor


@pytest.fixture(autouse=True)
def as_by_default(monkeypatch):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "auto")
    yield
    jax.config.update("jax_traceback_filtering", before)


def functions(error):
    """The functions in the traceback of an error, behind that of this file that called the package."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(frame.name, "msrl_jax/" in frame.filename) for frame in frames[1:]]


class Failing(Corridor):
    def step(self, key, state, action):
        return self.inner(state)

    def inner(self, state):
        raise KeyError("mine")


class Undecided(Corridor):
    def step(self, key, state, action):
        return super().step(key, state, 1 if action > 0 else 0)


def stop(tick):
    raise RuntimeError("mine")


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (lambda: msrl.algorithms.PPO(learning_rate="fast"), []),
        (lambda: msrl.train("ppo", learning_rate=-1.0), []),
        (lambda: msrl.train("ppo", seed=jax.random.key(0)), []),
        (lambda: msrl.Experiment(algorithm=msrl.algorithms.PPO(), env=3), []),
        (lambda: msrl.sweep("ppo", learning_rate=[-1.0]), []),
        (lambda: msrl.Result.load("/nowhere"), []),
        (lambda: msrl.envs.FrameStack(Corridor(), 0), []),
        (lambda: msrl.envs.GymnasiumEnvironment("CartPole-v1", num_workers=-1), []),
        (lambda: msrl.envs.Box(1.0, 0.0), []),
        (lambda: msrl.policies.SingleLearnerCoarse(staleness=-1), []),
        (lambda: msrl.data.from_episodes([{}]), []),
        (lambda: msrl.replay.uniform({}, capacity=-1), []),
        (lambda: msrl.train("ppo", Failing(), progress=False), ["step", "inner"]),
        (lambda: msrl.train("ppo", Undecided(), progress=False), []),
    ],
)
def test_an_error_of_a_users_value_has_the_users_frames(call, kept):
    with pytest.raises((ValueError, TypeError, KeyError)) as caught:
        call()
    assert functions(caught.value) == [("<lambda>", False), *((name, False) for name in kept)]


def test_an_error_on_the_command_line_has_the_users_frames():
    with pytest.raises(KeyError) as caught:
        main(["train", "--env", f"{__name__}:Failing", "--total-steps", "512", "--num-envs", "4", "--out", "/nowhere"])
    assert functions(caught.value) == [("step", False), ("inner", False)]


def test_the_cause_of_an_error_has_the_users_frames():
    with pytest.raises(TypeError, match=r"Undecided\.step fails at") as caught:
        msrl.train("ppo", Undecided(), progress=False)
    assert [frame.name for frame in traceback.extract_tb(caught.value.__cause__.__traceback__)] == ["step"]


def test_an_error_of_a_callback_has_its_frame(tiny, one_device):
    with pytest.raises(RuntimeError, match="mine") as caught:
        msrl.train("ppo", total_steps=64, callbacks=[stop], eval_episodes=0, devices=one_device, progress=False, **tiny)
    assert functions(caught.value) == [("stop", False)]


@pytest.mark.parametrize("bug", [lambda *_: None + 1, lambda *_: {}["key"]])
def test_a_bug_keeps_all_frames(bug, monkeypatch):
    module = sys.modules["msrl_jax.run.training"]
    monkeypatch.setitem(vars(module), "make_experiment", type(bug)(bug.__code__, vars(module)))  # as if it were of the package
    with pytest.raises((TypeError, KeyError)) as caught:
        msrl.train("ppo")
    assert ("train", True) in functions(caught.value)


def test_an_assertion_keeps_all_frames(monkeypatch):
    def wrong(*args):
        raise AssertionError

    module = sys.modules["msrl_jax.run.training"]
    monkeypatch.setitem(vars(module), "make_experiment", type(wrong)(wrong.__code__, vars(module)))
    with pytest.raises(AssertionError) as caught:
        msrl.train("ppo")
    assert ("train", True) in functions(caught.value)


def test_jax_s_setting_shows_all_frames():
    jax.config.update("jax_traceback_filtering", "off")
    with pytest.raises(ValueError, match="use a finite number above 0") as caught:
        msrl.train("ppo", learning_rate=-1.0)
    assert ("train", True) in functions(caught.value)
