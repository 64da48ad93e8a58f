"""Environments by name."""

import sys

import gymnax
import pytest

from msrl_jax import envs
from msrl_jax.envs import registry
from tests.support.corridor import Corridor


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


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("CartPole-v1", "GymnaxEnvironment('CartPole-v1')"),
        ("CartPole-v1:max_steps_in_episode=9", "GymnaxEnvironment('CartPole-v1', max_steps_in_episode=9)"),
        ("gymnasium:CartPole-v1", "GymnasiumEnvironment('gymnasium:CartPole-v1')"),
        ("pgx:tic_tac_toe", "PgxGame('pgx:tic_tac_toe')"),
    ],
)
def test_an_environment_shows_what_it_is(name, shown):
    assert repr(envs.make(name)) == shown


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


def test_parameters_may_stand_in_the_name():
    assert envs.make("CartPole-v1:max_steps_in_episode=9").params.max_steps_in_episode == 9
    assert envs.make("CartPole-v1:gravity=1", max_steps_in_episode=9).params.gravity == 1.0
    with pytest.raises(ValueError, match="has 'gravity' twice; give it once"):
        envs.make("CartPole-v1:gravity=1,gravity=2")


def test_an_environment_of_a_module_is_named_by_its_module(tmp_path, monkeypatch):
    code = "from tests.support.corridor import Corridor\ndef walk(length) -> Corridor: return Corridor(2 * length)\n"
    code += "def silent(length): return Corridor(length)\nlimit = 3\n"
    code += "def typed(length: 'Absent') -> 'Corridor': return Corridor(length)\n"
    code += "def absent(length) -> 'Absent': return Corridor(length)\n"
    code += "class Maker:\n    def __call__(self, length) -> Corridor: return Corridor(length)\nmaker = Maker()\n"
    code += "import functools\npartly = functools.partial(silent, 3)\n"
    (tmp_path / "my_walks.py").write_text(code)
    (tmp_path / "my_broken_walks.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert envs.make("my_walks:Corridor:length=9").length == 9
    assert envs.make("my_walks:walk", length=9).length == 18
    assert envs.make("my_walks:typed", length=9).length == envs.make("my_walks:maker", length=9).length == 9
    assert sys.path == before
    with pytest.raises(ValueError, match=r"module 'my_walks' has no attribute 'Coridor' \(did you mean 'Corridor'\?\)"):
        envs.make("my_walks:Coridor")
    with pytest.raises(ValueError, match="'my_walks:limit' is not an environment: a class with reset and step"):
        envs.make("my_walks:limit")
    for name, function in {"silent": "silent", "absent": "absent", "partly": "silent"}.items():
        with pytest.raises(ValueError, match=rf"annotate what it returns: def {function}\(\.\.\.\) -> \.\.\., a class that"):
            envs.make(f"my_walks:{name}")
    with pytest.raises(ValueError, match=r"'my_walks:walk': .* 'length'; its parameters are: length"):
        envs.make("my_walks:walk:lenght=9")
    with pytest.raises(ValueError, match=r"No module named 'your_walks'; give MODULE:NAME of an environment.* from "):
        envs.make("your_walks:Corridor")
    for file, module in {"my_walks.py": "my_walks", "./my_walks.py": "my_walks", "of/my_walks.py": r"of\.my_walks"}.items():
        with pytest.raises(ValueError, match=rf"{file}:Corridor' is a file; write {module}:Corridor$"):
            envs.make(f"{file}:Corridor:length=9")
    with pytest.raises(ValueError, match=r"'/x/my_walks\.py' is a file; write my_walks:NAME, in the folder /x or where Python"):
        envs.make("/x/my_walks.py")
    with pytest.raises(ValueError, match=r"No module named 'bra'; .* or use a suite \(did you mean 'brax'"):
        envs.make("bra:halfcheetah")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        envs.make("my_broken_walks:Corridor")
    with pytest.raises(ValueError, match="cannot read 'length' in 'CartPole-v1:length'; write parameters as"):
        envs.make("CartPole-v1:length")
