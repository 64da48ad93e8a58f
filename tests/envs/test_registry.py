"""Environments by name."""

import gymnax
import pytest

from msrl_jax import envs
from msrl_jax.envs import registry
from tests.envs.corridor import Corridor


@pytest.fixture(autouse=True)
def clean_registry(monkeypatch):
    monkeypatch.setattr(registry, "_factories", {})


def test_all_of_gymnax_is_known():
    assert len(envs.names()) >= 26 and set(gymnax.registered_envs) <= set(envs.names())


def test_a_registered_environment_can_be_made_with_arguments():
    envs.register("Corridor-v0", Corridor)
    assert "Corridor-v0" in envs.names()
    env = envs.make("Corridor-v0", length=9)
    assert isinstance(env, Corridor) and env.length == 9


def test_a_name_is_registered_once():
    envs.register("Corridor-v0", Corridor)
    for name in ("Corridor-v0", "CartPole-v1"):
        with pytest.raises(ValueError, match=f"an environment named '{name}' is registered already"):
            envs.register(name, Corridor)
    with pytest.raises(TypeError, match="cannot be called"):
        envs.register("Corridor-v1", Corridor())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "near"),
    [("cartpole", "CartPole-v1"), ("Breakout", "Breakout-MinAtar"), ("Catch", "Catch-bsuite"), ("Corridor", "Corridor-v0")],
)
def test_an_unknown_name_suggests_the_nearest(name, near):
    envs.register("Corridor-v0", Corridor)
    with pytest.raises(ValueError, match=rf"unknown environment '{name}' \(did you mean '{near}'\?\)"):
        envs.make(name)


def test_a_name_like_no_other_suggests_none():
    with pytest.raises(ValueError, match=r"unknown environment 'qqq'; envs.names\(\) lists all"):
        envs.make("qqq")
