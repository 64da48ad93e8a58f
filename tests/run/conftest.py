"""Runs shared by several test modules, because training is slow."""

import shutil

import jax
import pytest

import msrl_jax as msrl
from tests.support.runs import stop_after, train


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "run"


@pytest.fixture(scope="session")
def trained(run_folder, one_device, tiny):
    """A finished run of 6 iterations in 3 chunks, evaluated twice, with a folder."""
    return msrl.train(
        "ppo",
        "CartPole-v1:max_steps_in_episode=30",
        total_steps=6 * 64 + 5,
        chunk=2,
        seed=3,
        out=run_folder,
        eval_episodes=4,
        eval_every=2 * 64,
        devices=one_device,
        progress=False,
        **tiny,
    )


@pytest.fixture(scope="session")
def members(one_device, tiny):
    """Three seeds at once, from seed 3."""
    return msrl.train(
        "ppo",
        "CartPole-v1:max_steps_in_episode=30",
        total_steps=6 * 64,
        chunk=2,
        seed=3,
        seeds=3,
        eval_episodes=4,
        devices=one_device,
        progress=False,
        **tiny,
    )


@pytest.fixture(scope="session")
def stale(tmp_path_factory, tiny):
    """A run of 3 iterations whose actors lag two behind, with a folder."""
    return msrl.train(
        "ppo",
        "CartPole-v1:max_steps_in_episode=30",
        policy="SingleLearnerCoarse:actors=1,learners=1,staleness=2",
        total_steps=3 * 64,
        chunk=1,
        eval_episodes=4,
        devices=jax.devices()[:2],
        progress=False,
        out=tmp_path_factory.mktemp("runs") / "run",
        **tiny,
    )


@pytest.fixture(scope="session")
def stopped(tmp_path_factory):
    """A run on one device that was stopped after 6 of 12 iterations."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    train("ppo", path, devices=1, iterations=12, callbacks=[stop_after(6)], eval_every=None, checkpoint_every=64)
    return path


@pytest.fixture
def copy(stopped, tmp_path):
    """A copy of that run, to be changed."""
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"
