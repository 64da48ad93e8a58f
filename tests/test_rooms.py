"""Optional rooms: what their tables name is there, nothing is imported before it is looked up, and a registry is a mapping."""

import importlib
import inspect
import pkgutil
import sys
import tomllib
from unittest import mock

import pytest

import msrl_jax as msrl
from msrl_jax import _rooms
from msrl_jax._rooms import Registry, added
from msrl_jax.configs.config import DECLARED, config, field
from msrl_jax.registry.table import ALGORITHMS
from msrl_jax.run import Experiment
from msrl_jax.run.prepare import make_experiment
from tests.support import processes

ROOMS = sorted(_rooms.rooms())


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A registry with an entry of the core, and one of a room whose module is imported when it is looked up."""
    (tmp_path / "a_room.py").write_text("class Lamp: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_rooms, "added", lambda kind: {"lamp": "a_room:Lamp"} if kind == "furniture" else {})
    yield Registry("furniture", {"chair": int})
    sys.modules.pop("a_room", None)


def test_an_entry_of_a_room_is_there_before_it_is_imported(desk):
    assert sorted(desk) == ["chair", "lamp"] and len(desk) == 2 and "lamp" in desk and "table" not in desk
    assert "a_room" not in sys.modules
    assert desk["lamp"] is sys.modules["a_room"].Lamp
    assert dict(desk) == {"chair": int, "lamp": desk["lamp"]}
    assert list(Registry("rugs")) == []


def test_entries_may_be_replaced_and_taken_out(desk):
    desk["lamp"] = float
    assert desk["lamp"] is float and "a_room" not in sys.modules
    assert desk.pop("lamp") is float and list(desk) == ["chair"]
    for name in ("lamp", "table"):
        with pytest.raises(KeyError):
            del desk[name]
    with pytest.raises(KeyError):
        desk["lamp"]


KINDS = sorted({kind for table in _rooms.rooms().values() for kind in tomllib.loads(table.read_text())})


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_table_names_exists(kind):
    for name, place in added(kind).items():
        module, _, attribute = place.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute)), (kind, name)


def test_what_rooms_add_is_there():
    assert {"alphazero", "muzero", "self_play"} <= set(added("algorithms")) <= set(msrl.algorithms.names())
    assert {"KuhnPoker", "RockPaperScissors"} <= set(added("environments"))
    for name, place in added("algorithms").items():
        kind = msrl.algorithms.get(name)
        assert kind.name == name and place == f"{kind.__module__}:{kind.__qualname__}"
    for name, place in added("environments").items():
        assert type(msrl.envs.make(name)) is vars(importlib.import_module(place.partition(":")[0]))[name]


@pytest.mark.parametrize("room", ROOMS)
def test_every_algorithm_of_a_room_is_in_its_table(room):
    package = importlib.import_module(f"msrl_jax.{room}")
    modules = [importlib.import_module(found.name) for found in pkgutil.iter_modules(package.__path__, f"msrl_jax.{room}.")]
    configs = {c for m in modules for c in vars(m).values() if inspect.isclass(c) and "multi_agent" in vars(c)}
    own = {c.name for c in configs if c.__module__.startswith(f"{package.__name__}.")}
    assert own == {name for name, place in added("algorithms").items() if place.startswith(f"{package.__name__}.")}
    assert all(hasattr(package, name) for name in package.__all__)


@pytest.mark.parametrize("name", ["alphazero", "AlphaZero"])
def test_the_name_of_a_room_s_algorithm_is_taken(name):
    class Own:
        size: int = field(default=1, doc="a number.")

        def build(self, env): ...

    message = f"an algorithm named '{name}' is registered already; choose another name"
    with mock.patch.dict(DECLARED), pytest.raises(ValueError, match=message):
        msrl.train(config(name)(Own), "CartPole-v1")
    assert ALGORITHMS["alphazero"].__module__ == "msrl_jax.games.alphazero"


@pytest.mark.long
def test_no_room_is_imported_before_it_is_used():
    code = f"""
import sys
import msrl_jax as msrl
from msrl_jax import cli
cli.main(["list"])
msrl.train, msrl.sweep, msrl.profile, msrl.algorithms.names(), msrl.envs.names()
msrl.algorithms.make("ppo", {{}})
print([name for name in sys.modules if name.startswith({tuple(f"msrl_jax.{room}" for room in ROOMS)})])
msrl.algorithms.get("self_play")
print("msrl_jax.games.self_play" in sys.modules, "msrl_jax.games.muzero" in sys.modules)
"""
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[]", "True False"]


def test_runs_that_were_saved_before_an_algorithm_was_in_a_room_have_it():
    experiment = make_experiment("self_play", "RockPaperScissors", hidden_sizes=(4,))
    about = experiment.to_json()
    assert about["class"] == "msrl_jax.games.self_play:SelfPlay"
    again = Experiment.from_json(about | {"class": "msrl_jax.algorithms.self_play:SelfPlay"})
    assert again.algorithm == experiment.algorithm
