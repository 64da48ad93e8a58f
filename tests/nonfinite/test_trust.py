"""The file of a step that was not finite runs nothing on its own word."""

import functools
import json

import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.fragments.support.naming import TrustError
from msrl_jax.nonfinite import failure


def test_a_file_that_somebody_sent_runs_nothing(tmp_path):
    told = msrl.Experiment(algorithm=msrl.algorithms.PPO(), env="CartPole-v1").to_json() | {"env_spec": "evil:Env"}
    about = {"run": told, "origin": {}, "record": None, "operands": []}
    np.savez(tmp_path / "non_finite.npz", **{failure._ABOUT: json.dumps(about)})
    with pytest.raises(TrustError, match=r"non_finite\.npz names code to run"):
        msrl.nonfinite.replay_step(tmp_path / "non_finite.npz")


def test_the_command_passes_the_users_trust_on(tmp_path, monkeypatch):
    asked = []
    replay_step = functools.wraps(failure.replay_step)(lambda path, *, trust=False: asked.append(trust))
    monkeypatch.setattr(failure, "replay_step", replay_step)
    for words in ([], ["--trust"]):
        assert main(["replay", str(tmp_path / "step.npz"), *words]) == 1  # nothing is not finite
    assert asked == [False, True]
