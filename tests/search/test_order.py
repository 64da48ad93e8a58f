"""The order of a sweep: rungs of successive halving, and trials that Optuna asks for."""

import math
import sys

import pytest

import msrl_jax as msrl
from msrl_jax.search import course
from msrl_jax.search.order import rung_steps
from msrl_jax.search.trials import Trial, survivors

from .test_sweep import COMMON, ENV


def test_rungs_by_hand():
    assert rung_steps(900, 3, None, None, 9, 10) == [100, 300, 900]
    assert rung_steps(900, 3, None, None, 9, 200) == [300, 900]
    assert rung_steps(900, 3, 2, None, 9, 10) == [300, 900]
    assert rung_steps(1000, 3, None, 50, 9, 10) == [50, 150, 450, 1000]
    trials = [Trial(i, {}, 0, returns=(x,)) for i, x in enumerate([1.0, math.nan, 5.0, 3.0, 4.0])]
    assert [t.number for t in survivors(trials, 2)] == [2, 3, 4]
    assert [t.number for t in survivors(trials[:2], 1)] == [0]



def test_optuna_asks_for_trials_by_what_it_was_told(tiny, one_device, tmp_path, monkeypatch):
    pytest.importorskip("optuna")

    def sweep(out, **options):
        return msrl.sweep(
            "ppo", ENV, method="optuna", num=4, members_at_once=2, learning_rate="log:1e-4:1e-1", activation=["tanh", "relu"],
            out=tmp_path / out, devices=one_device, resume=True, **(COMMON | {"total_steps": 128}), **tiny, **options,
        )  # fmt: skip

    found = sweep("sweep")
    assert len(found.trials) == 4 and sorted(t.rank for t in found.trials) == [1, 2, 3, 4]
    assert all(1e-4 <= t.values["learning_rate"] <= 1e-1 for t in found.trials)
    assert sweep("sweep").trials == found.trials

    calls, train = [], course.train

    def train_once(*args, **kwargs):
        calls.append(kwargs)
        if len(calls) > 1:
            raise RuntimeError("the machine is gone")
        return train(*args, **kwargs)

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="the machine is gone"):
        patched.setattr(course, "train", train_once)
        sweep("half")
    assert sweep("half").trials == found.trials



def test_optuna_that_is_not_installed_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match="pip install optuna"):
        msrl.sweep("ppo", ENV, method="optuna", num=2, learning_rate=[1e-3, 1e-2], **COMMON)

