"""Options: values that stand for alternatives of a config, their text, and their fields by dotted names."""

import dataclasses
import sys
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import PBT, algorithms, envs
from msrl_jax.algorithms import C51, DQN, R2D2, SAC, Annealed, Expected, Munchausen, PerEnv, Prioritized, Replay, make
from msrl_jax.cli.command import parse
from msrl_jax.cli.commands import COMMANDS
from msrl_jax.configs.classes import class_of_fields
from msrl_jax.configs.fields import OPTIONS as DECLARED
from msrl_jax.configs.fields import field, is_option, tunable
from msrl_jax.configs.names import all_fields, tunable_fields, value_of
from msrl_jax.configs.options import option, option_text
from msrl_jax.configs.replacing import replace_unchecked
from msrl_jax.fragments.support.naming import TrustError
from msrl_jax.fragments.support.text_values import Call, read_call
from msrl_jax.losses.q_targets import QTarget
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.plain_data import RunFolderError
from msrl_jax.run.prepare import make_experiment
from msrl_jax.search.space import read_axes
from tests.support.random_walk import RandomWalk


@pytest.mark.parametrize(
    ("written", "call"),
    [
        ("per_env", Call("per_env")),
        (" per_env() ", Call("per_env")),
        ("c51:-10,v_max=2.5", Call("c51", (-10,), {"v_max": 2.5})),
        (
            "replay(5, priorities=prioritized(beta=None))",
            Call("replay", (5,), {"priorities": Call("prioritized", (), {"beta": None})}),
        ),
        ("a:b:c,d=e:1", Call("a", ("b:c",), {"d": "e:1"})),
        ("a:b='x,y:z',c=(1, word),d=[True]", Call("a", (), {"b": "x,y:z", "c": (1, "word"), "d": [True]})),
    ],
)
def test_text_is_a_name_and_arguments(written, call):
    assert read_call(written) == call


@pytest.mark.parametrize(
    "written",
    [
        "",
        "a:(",
        "a b",
        "3",
        "a.b",
        "a:1+x",
        "a:lambda: 1",
        "f'{x}'",
        "a:" + "(" * 5000,
        "a:b" + "(m:" * 5000 + ")" * 5000,
        "a:\0",
    ],
)
def test_what_is_no_call_is_refused_and_never_evaluated(written):
    with pytest.raises(ValueError, match="cannot read"):
        read_call(written)


OPTIONS = [
    PerEnv(0.3),
    Annealed(),
    C51(0, 200),
    Munchausen(clip=-0.5),
    Replay(100_000, priorities=Prioritized(beta=None)),
    Replay(storage="uint8", priorities=Prioritized("linear:0.1:0.5")),
    algorithms.TQC(num_dropped=0),
]


@pytest.mark.parametrize("value", OPTIONS, ids=str)
def test_an_option_is_the_same_by_its_text(value):
    field = dataclasses.replace if isinstance(value, Replay) else None
    name = {"replay": "replay", "munchausen": "target", "annealed": "exploration", "per_env": "exploration"}.get(
        value.option, "returns"
    )
    kind = SAC if value.option == "tqc" else DQN
    for whole in (False, True):
        found = getattr(kind(**{name: option_text(value, full=whole)}), name)
        assert found == value and hash(found) == hash(value) and type(found) is type(value)
    assert field is None or str(field(value, capacity=7)).startswith("replay:capacity=7")
    nested = [x for f in dataclasses.fields(value) if is_option(x := getattr(value, f.name))]
    assert all(f"{f.name}=" in option_text(value, full=True) for x in (value, *nested) for f in dataclasses.fields(x))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"exploration": "per_evn:0.3"}, r"DQN\.exploration='per_evn:0.3': use one of .* \(did you mean 'per_env'\?\)"),
        ({"exploration": "per_env:1.5"}, r"DQN\.exploration\.base=1.5: use a finite number at least 0 and at most 1"),
        ({"exploration": "per_env:bas=1"}, r"DQN\.exploration: per_env takes base=0.4 \(did you mean 'base'\?\)"),
        ({"exploration": "per_env:1,2"}, r"DQN\.exploration: per_env takes base=0.4$"),
        ({"exploration": "per_env:("}, r"DQN\.exploration: cannot read 'per_env:\('"),
        ({"exploration": None}, r"DQN\.exploration=None: use one of annealed, per_env"),
        ({"exploration": ["per_env", "annealed"]}, r"DQN\.exploration=\['per_env'.*: give one option, or use msrl.sweep"),
        ({"exploration": PerEnv}, r"DQN\.exploration=PerEnv is a class; give an object, such as PerEnv\(\)"),
        ({"replay": "replay:priorities=prioritized(3,beta=2)"}, r"DQN\.replay\.priorities\.beta=2: use .* at most 1"),
        ({"replay.priorities": "prioritised"}, r"DQN\.replay\.priorities='prioritised': use one of prioritized, None \(did"),
        ({"exploration.base": 0.2}, r"DQN\.exploration\.base=0.2: exploration is .* or give exploration='per_env' too"),
        ({"exploration.bas": 0.2}, r"DQN has no field 'exploration.bas' \(did you mean 'exploration.base'\?\)"),
        ({"returns": "c51", "returns.num_atoms": 2.5}, r"DQN\.returns\.num_atoms=2.5: use an integer of at least 2"),
    ],
)
def test_what_is_wrong_is_named_with_its_place_and_a_remedy(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        make("dqn", given)
    assert "\n" not in str(caught.value)


def test_a_dotted_name_changes_one_number_of_an_option():
    made = make("r2d2", {"replay.n_step": 3, "replay.priorities.beta": 0.5})
    assert made.replay == Replay(50_000, n_step=3, learning_starts=2000, priorities=Prioritized(0.9, 0.5))
    assert make("dqn", {"exploration.base": 0.2, "exploration": "per_env"}).exploration == PerEnv(0.2)
    names = all_fields(DQN)
    assert {"exploration.base", "exploration.final", "replay.priorities.alpha"} < names.keys()
    assert "exploration.base" not in all_fields(DQN()) and "replay.priorities.alpha" not in tunable_fields(DQN())


def test_numbers_of_options_are_leaves_and_nothing_else_is():
    config = DQN(exploration=PerEnv(0.3), returns=C51(0, 200))
    doubled = jax.jit(lambda c: jax.tree.map(lambda x: 2 * x, c))(config)
    assert doubled.exploration.base == jnp.float32(0.6) and doubled.returns.v_max == 400 and doubled.returns.num_atoms == 51
    traced = jax.jit(lambda x: replace_unchecked(config, {"exploration.base": x}).exploration.base * 2)
    assert traced(0.25) == 0.5 and config.exploration.base == 0.3


def test_an_option_is_declared_as_a_config_is():
    with pytest.raises(TypeError, match="the option Round has the field 'size' without a default or a text"):

        @option
        class Round:
            size: int = 3

    with pytest.raises(ValueError, match=r"Square\.size=0: use an integer of at least 1"):

        @option
        class Square:
            size: int = algorithms.field(default=0, doc="a size.")


def test_a_schedule_of_a_number_of_an_option_is_checked():
    with pytest.raises(ValueError, match=r"DQN\.exploration\.base='linear:0.5:2': .* at the progress 0.34 it is .* at most 1"):
        make("dqn", {"exploration": "per_env", "exploration.base": "linear:0.5:2"})
    with pytest.raises(ValueError, match=r"DQN\.returns: v_min=3 is not below v_max=1"):
        make("dqn", {"returns": "c51:v_max=1", "returns.v_min": "linear:3:-3"})


SMALL = {
    "num_envs": 8,
    "unroll_length": 4,
    "num_updates": 1,
    "batch_size": 8,
    "hidden_sizes": (4,),
    "replay": "replay:256,learning_starts=32",
}


@pytest.mark.long
def test_members_and_schedules_reach_numbers_of_options(tmp_path):
    options = SMALL | {
        "progress": False,
        "total_steps": 128,
        "eval_episodes": 0,
        "devices": jax.devices()[:1],
        "exploration": "per_env",
    }
    bases = [0.2, 0.9]
    run = msrl.train(
        "dqn", RandomWalk(), **options, **{"exploration.base": bases}, learning_rate="linear:1e-3", out=tmp_path / "run"
    )
    assert run.members == 2
    alone = msrl.train("dqn", RandomWalk(), **options, **{"exploration.base": 0.9}, learning_rate="linear:1e-3", seed=0)
    np.testing.assert_allclose(run.history["episode_return"][:, 1], alone.history["episode_return"], rtol=1e-5)
    again = msrl.Result.load(tmp_path / "run", env=RandomWalk())
    assert again.config == run.config and value_of(again.config, "exploration.base") == 0.2
    assert 'exploration = "per_env:base=0.2"' in (tmp_path / "run" / "run.toml").read_text()
    assert '"exploration.base" = [0.2, 0.9]' in (tmp_path / "run" / "run.toml").read_text()
    with pytest.raises(ValueError, match=r"DQN\.replay\.capacity=.*changes the program"):
        msrl.train("dqn", RandomWalk(), **options, **{"replay.capacity": [64, 128]})


def test_expected_is_one_option():
    assert DQN().returns == Expected() and str(Expected()) == "expected" and repr(Expected(1.0)) == "Expected(huber_delta=1.0)"


def test_sweeps_and_populations_name_numbers_of_options():
    given = {"exploration": "per_env", "exploration.base": "uniform:0.1:0.9", "replay.n_step": [1, 3]}
    axes, constants = read_axes(DQN, given)
    assert [axis.field for axis in axes] == ["exploration.base", "replay.n_step"] and constants == {"exploration": "per_env"}
    assert axes[1].is_whole and read_axes(DQN, {"exploration": ["annealed", PerEnv(0.3)]})[0][0].points(None) == [
        "annealed",
        PerEnv(0.3),
    ]
    population = PBT({"replay.priorities.alpha": envs.uniform(0.1, 0.9)}, members=2)
    population.check(R2D2(), {})
    with pytest.raises(ValueError, match=r"replay\.priorities\.alpha belongs to an option that this DQN does not use"):
        population.check(DQN(), {})


def test_whole_numbers_may_be_written_as_fractions():
    config = make("dqn", {"replay": "replay:1e5,n_step=3", "num_envs": 8.0})
    assert (config.replay.capacity, config.num_envs) == (100_000, 8) and type(config.replay.capacity) is int
    with pytest.raises(ValueError, match=r"DQN\.num_envs=8\.5: use an integer of at least 1"):
        make("dqn", {"num_envs": 8.5})


def test_options_of_a_protocol_may_be_declared_anywhere_under_names_of_their_own():
    class Shape(Protocol):
        """A shape."""

    @option(of=Shape)
    class Round:
        """Round."""

    @option
    class Sheet:
        """A sheet."""

        shape: Shape = field(default=Round(), doc="a shape. Usual: round.")

    @option(of=Shape)
    class Oblong:
        """Declared later."""

        side: float = tunable(default=1.0, above=0, doc="length of a side. Usual: 1.")

        def check_config(self, config):
            if self.side > config.longest:
                raise ValueError("too long for a page")

    class Page:
        """A page."""

        longest: int = field(default=9, doc="length of the longest side. Usual: 9.")
        sheet: Sheet = field(default=Sheet(), doc="what is on the page. Usual: a sheet.")

    Page = class_of_fields(Page, "the class Page")

    sheet = Sheet("oblong:2.0")
    assert sheet.shape == Oblong(2.0) and jax.tree.leaves(sheet) == [2.0] and tunable_fields(Sheet) == ("shape.side",)
    known = r"round, oblong, MODULE:CLASS of your own \(did you mean 'oblong'\?\)"
    with pytest.raises(ValueError, match=rf"Sheet.shape='oblon': use one of {known}"):
        Sheet("oblon")
    assert Sheet(Oblong(10.0)).shape.side == 10.0
    with pytest.raises(ValueError, match="too long for a page"):  # a config checks the options in its options, too
        Page(sheet="sheet(shape=oblong(10.0))")
    unmarked = type("Unmarked", (Oblong,), {})
    with pytest.raises(ValueError, match=r"Sheet.shape=.*: the class Unmarked is not an option; decorate it with option"):
        Sheet(unmarked(2.0))
    longer = option(of=Shape)(type("Longer", (Oblong,), {"__doc__": "With the fields of another option."}))
    assert Sheet("longer:3.0").shape == longer(3.0) != Oblong(3.0)
    other = type("Round", (), {"__doc__": "Round.", "__qualname__": "mine.Round"})
    with pytest.raises(ValueError, match=r"Shape has the option 'round' already, .*; give the class Round another name"):
        option(of=Shape)(other)
    again = type("Round", (), {"__doc__": "Round.", "__qualname__": Round.__qualname__, "__module__": Round.__module__})
    assert option(of=Shape)(again)() == Sheet("round").shape  # as in a notebook cell that is run again


class Drawn(Protocol):
    def draw(self, size, *, color): ...


def declared(name, **body):
    return type(name, (), {"__doc__": "An option.", **body})


DECLARED_WRONG = [
    (lambda: option(of="Drawn"), r"option\(of='Drawn'\): give a protocol"),
    (lambda: option(of=int), r"option\(of=.*int.*\): give a protocol"),
    (lambda: option(Drawn), r"@option\(Drawn\): write @option\(of=Drawn\)"),
    (lambda: option(of=Drawn)(lambda: None), "is not a class"),
    (lambda: option(of=Drawn)(declared("Blank")), r"the option Blank has no method draw; Drawn has draw\(self, size"),
    (lambda: option(of=Drawn)(declared("Short", draw=lambda self: 0)), r"draw\(self\) of the option Short does not take"),
    (lambda: option(declared("Named", option="my name")), r"Named.option='my name': use small letters"),
    (lambda: option(declared("Named", option=5)), r"Named.option=5: use small letters"),
]


@pytest.mark.parametrize(("declare", "message"), DECLARED_WRONG)
def test_an_option_is_checked_where_it_is_declared(declare, message):
    with pytest.raises((TypeError, ValueError), match=message):
        declare()


OWN_TARGET = """
from msrl_jax.algorithms import option, tunable
from msrl_jax.losses.q_targets import QTarget

@option(of=QTarget)
class Mixed:
    share: float = tunable(default=0.1, low=0, high=1, doc="a share.")
    def next_outputs_and_reward(self, values, params, target_params, e, next_outputs): ...

class Plain: ...
"""


def test_a_custom_option_is_saved_by_the_name_of_its_class(tmp_path, monkeypatch):
    (tmp_path / "my_targets.py").write_text(OWN_TARGET)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(DECLARED, QTarget, dict(DECLARED[QTarget]))

    def in_a_new_process():
        sys.modules.pop("my_targets", None)
        DECLARED[QTarget].pop("mixed", None)

    assert read_call("mixed(inner=other(0.1, inner=m.n:Own(x='a:b')))").kwargs["inner"].kwargs == {"inner": "m.n:Own(x='a:b')"}
    config = make("dqn", {"target": "my_targets:Mixed(0.2)"})
    assert config.target.share == 0.2 and str(config.target) == "my_targets:Mixed(share=0.2)"
    saved = Experiment(algorithm=config).to_json()
    for given in (saved, saved | {"config": saved["config"] | {"target": "my_targets:Mixed"}}):
        in_a_new_process()
        with pytest.raises(TrustError, match="target='my_targets:Mixed"):
            Experiment.from_json(given)
        assert "my_targets" not in sys.modules
        assert type(Experiment.from_json(given, trust=True).algorithm.target).__name__ == "Mixed"
    for name in ("Plain", "option"):
        with pytest.raises(ValueError, match=rf"DQN.target 'my_targets:{name}' is not a class made with option\(of=QTarget\)"):
            make("dqn", {"target": f"my_targets:{name}()"})
    method = "next_outputs_and_reward"
    facts = {"__doc__": "Own.", "__module__": "__main__", method: getattr(sys.modules["my_targets"].Mixed, method)}
    dotted = {"target": "my_targets:Mixed", "target.share": [0.3, 0.2]}
    words = ["--algo", "dqn", "--target", "my_targets:Mixed", "--target.share", "0.3,0.2"]
    for read in (
        lambda: make_experiment("dqn", **dotted).settings["target.share"],
        lambda: make("dqn", dotted | {"target.share": 0.3}).target.share,
        lambda: read_axes(DQN, dotted)[0][0].values.numbers,
        lambda: parse("msrl-jax train", COMMANDS["train"], words).values["target.share"],
    ):
        in_a_new_process()
        assert read() in ((0.3, 0.2), 0.3)  # fields of a class that nothing had imported
    own = type("Own", (), facts)
    saved = Experiment(algorithm=make("dqn", {"target": option(of=QTarget)(own)()})).to_json()
    with pytest.raises(RunFolderError, match=r"has a target object \(Own\(\)\); pass it again"):
        Experiment.from_json(saved)
