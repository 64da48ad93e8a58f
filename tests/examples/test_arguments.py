"""The arguments of the examples: bad ones are refused in a sentence, before anything is computed."""

import importlib
from unittest import mock

import jax
import pytest

from msrl_jax.registry.table import ALGORITHMS

COUNTS = {
    "archer": ["--seeds", "--cpu-devices"], "contrastive_rl": ["--seeds", "--episodes", "--cpu-devices"],
    "maml": ["--seeds", "--cpu-devices"], "rl3": ["--seeds", "--steps", "--episodes", "--cpu-devices"],
    "rl_darts": ["--seeds", "--cpu-devices"], "transferred_q": ["--seeds", "--cpu-devices"],
}  # fmt: skip


def example(name):
    with mock.patch.dict(ALGORITHMS):  # other tests go through the algorithms of the package
        return importlib.import_module(f"examples.{name}")


@pytest.mark.parametrize("name", COUNTS)
def test_what_there_is_none_of_is_refused(name, capsys):
    for option in COUNTS[name]:
        for given in ("0", "-1", "1.5"):
            with pytest.raises(SystemExit):
                example(name).main([f"{option}={given}"])
            assert f"argument {option}: {given}: use an integer of at least 1" in capsys.readouterr().err
    if "--cpu-devices" in COUNTS[name]:
        with pytest.raises(SystemExit):
            example(name).main(["--cpu-devices=100000"])
        assert "argument --cpu-devices: 100000: use at most 1024" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["examples.archer:Apart", "SingleLearnerCoarse:learners=2"])
def test_the_devices_of_archer_are_counted_before_it_learns_to_talk(policy, monkeypatch):
    devices = jax.devices()[:2]
    monkeypatch.setattr(jax.config, "update", lambda *setting: None)
    monkeypatch.setattr(jax, "devices", lambda: devices)
    monkeypatch.setattr(example("archer").game, "cloned", None)
    with pytest.raises(ValueError, match="needs 3 devices"):
        example("archer").main(["--policy", policy])
