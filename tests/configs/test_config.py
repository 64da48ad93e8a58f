"""Configs: checked before anything compiles with a remedy, documented, pytrees whose leaves are the tunable numbers."""

import dataclasses
import fractions
import inspect
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.algorithms import PPO, config, field, make, tunable
from msrl_jax.configs.config import variant
from msrl_jax.configs.names import tunable_fields, value_of
from msrl_jax.registry.table import ALGORITHMS

TYPED = """
from msrl_jax.algorithms import PPO, SAC

config = PPO(learning_rate="cosine:1e-3", max_grad_norm="linear:0.1", discount=0.9)
PPO(learning_rate=lambda progress: 1e-3 * (1 - progress), clip_value=None)
rate: float = config.learning_rate
norm: float | None = config.max_grad_norm
SAC(initial_temperature="linear:0.1")
PPO(learning_rate=[1e-3])
"""


@pytest.mark.slow
def test_a_type_checker_accepts_schedules_where_they_are_accepted(tmp_path):
    root = str(Path(__file__).parents[2])
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [root], "include": ["typed.py"]}))
    (tmp_path / "typed.py").write_text(TYPED)
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable]
    found = json.loads(subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout)["generalDiagnostics"]
    wrong = [TYPED.splitlines()[x["range"]["start"]["line"]].partition("(")[0] for x in found]
    assert wrong == ["SAC", "PPO"] and all(x["rule"] == "reportArgumentType" for x in found)


@pytest.fixture
def ball():
    """The config of an algorithm that is defined elsewhere, as users do."""

    @config("ball")
    class Ball:
        """A ball."""

        bright: bool = field(default=False, doc="whether it shines.")
        bounces: int = field(default=2, doc="how often it bounces.")
        misses: int = field(default=0, doc="how often it does not.", low=0, high=9)
        radius: float = tunable(default=3.0, doc="its size.", above=0)
        share: float | None = tunable(default=None, doc="a part of it.", low=0, below=1)

        def check(self):
            if self.misses > self.bounces:
                raise ValueError(f"Ball.misses={self.misses} exceeds bounces={self.bounces}; use fewer")

        def build(self, env):
            return env, self.radius

    yield Ball
    for name in ("ball", "large_ball"):
        ALGORITHMS.pop(name, None)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("num_envs", 0, "an integer of at least 1"),
        ("num_epochs", True, "an integer of at least 1"),
        ("learning_rate", 0.0, "a finite number above 0"),
        ("learning_rate", "fast", "a finite number above 0"),
        ("learning_rate", 1e-60, "a number that float32 holds, 0 or from 1.2e-38 to 3.4e38"),
        ("clip_value", -1.0, "a finite number above 0"),
        ("discount", 1.01, "a finite number at least 0 and at most 1"),
        ("entropy_coef", -0.01, "a finite number at least 0"),
        ("normalize_advantage", True, r"one of \['batch', 'minibatch', 'none'\]"),
        ("normalize_rewards", 1, "True or False"),
        ("hidden_sizes", 64, r"a tuple of positive integers, such as \(64, 64\)"),
        ("activation", "tahn", "'tanh'"),
        ("network", "transformer", r"one of \['auto', 'cnn', 'impala_cnn', 'mlp', 'simba'\], your own object, or MODULE:NAME"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_a_remedy(name, value, remedy):
    with pytest.raises(ValueError, match=rf"PPO\.{name}=.*: use {remedy}"):
        PPO(**{name: value})


def refusal(kind, name):
    """What a config says to a value that fits no field."""
    try:
        kind(**{name: object()})
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("algorithm", algorithms.names())
def test_every_field_of_every_algorithm_is_checked(algorithm):
    kind = algorithms.get(algorithm)
    said = {f.name: refusal(kind, f.name) for f in dataclasses.fields(kind)}
    assert {name: x for name, x in said.items() if not re.search(rf"{kind.__name__}\.{name}=<object.*>: use ", x)} == {}


@pytest.mark.parametrize("name", algorithms.names())
def test_every_field_is_documented(name):
    kind = algorithms.get(name)
    texts = [f.metadata["doc"] for f in dataclasses.fields(kind)]
    assert all(len(text) > 10 and text.endswith(".") for text in texts)
    assert kind.__doc__ and kind.name == name


@pytest.mark.parametrize("name", algorithms.names())
def test_a_config_is_a_pytree_of_its_tunable_numbers(name):
    made = algorithms.get(name)()
    assert jax.tree.leaves(made) == [x for x in (value_of(made, f) for f in tunable_fields(made)) if x is not None]
    assert jax.tree.map(lambda x: x, made) == made
    doubled = jax.jit(lambda c: jax.tree.map(lambda x: 2 * x, c))(PPO())
    assert doubled.learning_rate == 2 * PPO().learning_rate and doubled.num_envs == PPO().num_envs


def test_checks_of_several_fields(ball):
    with pytest.raises(ValueError, match=r"Ball\.misses=3 exceeds bounces=2"):
        ball(misses=3)
    bad = ("misses", 10, "an integer of at least 0 and at most 9"), ("share", 1.0, "at least 0 and below 1")
    for name, value, remedy in bad:
        with pytest.raises(ValueError, match=rf"Ball\.{name}=.*{remedy}"):
            ball(**{name: value})
    assert make(ball, {"misses": 1}).misses == 1 and make(ball(bright=True), {}).bright
    with pytest.raises(ValueError, match=r"Ball has no field 'radios' \(did you mean 'radius'\?\); its fields are bright,"):
        make("ball", {"radios": 1.0})


def test_a_variant_differs_in_defaults_and_is_no_subclass(ball):
    large = variant(ball, "LargeBall", "large_ball", "A large ball.", radius=30.0)
    assert large().radius == 30.0 and ball().radius == 3.0 and algorithms.get("large_ball") is large
    assert not issubclass(large, ball) and large(bounces=5).build("env") == ("env", 30.0)
    with pytest.raises(ValueError, match=r"LargeBall\.bounces=0"):
        large(bounces=0)


def test_algorithms_are_found_by_name_class_and_place(ball):
    assert algorithms.get("PPO") is PPO is algorithms.get(PPO) is algorithms.get("msrl_jax.algorithms.ppo:PPO")
    with pytest.raises(ValueError, match=r"unknown algorithm 'pppo' \(did you mean 'ppo'\?\); choose from a2c"):
        algorithms.get("pppo")
    with pytest.raises(ValueError, match=r"'nowhere:Ball'.*MODULE:NAME"):
        algorithms.get("nowhere:Ball")
    with pytest.raises(TypeError, match="give a config such as PPO"):
        algorithms.get(3)
    same = {"build": ball.build, "__annotations__": {}, "__module__": ball.__module__, "__qualname__": ball.__qualname__}
    assert config("ball")(type("Ball", (), same)) is ALGORITHMS["ball"] is not ball  # a cell of a notebook that runs again
    with pytest.raises(ValueError, match="'ppo' is registered already"):
        config("ppo")(declared())


def test_a_program_whose_policy_is_named_by_its_module_is_one_place(tmp_path, monkeypatch):
    text = "from msrl_jax import algorithms\n\n@algorithms.config('twice')\nclass Twice:\n    def build(self, env): ...\n"
    (tmp_path / "my_program.py").write_text(f"{text}\nif __name__ == '__main__':\n    import my_program\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(ALGORITHMS, "twice", None)
    assert runpy.run_path(str(tmp_path / "my_program.py"), run_name="__main__")["my_program"].Twice is ALGORITHMS["twice"]


def declared(base=object, **parts):
    """A class as users write it, before it is decorated."""
    kinds = {name: type(x.default) for name, x in parts.items() if isinstance(x, dataclasses.Field)}
    return type("Own", (base,), {"__annotations__": kinds, "build": lambda self, env: None, **parts})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"build": None}, "Own has no method build"),
        ({"__post_init__": lambda self: None}, "name it check"),
        ({"k": tunable(default=3, doc="a number.")}, "'k', which is not a float"),
        ({"k": field(default=0, doc="a number.")}, r"Own\.k=0: use an integer of at least 1"),
        ({"__annotations__": {"rate": float}}, "'rate' without a default or a text"),
    ],
)
def test_a_bad_declaration_is_refused_at_once(parts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config("own")(declared(**parts))
    assert "own" not in ALGORITHMS


def test_a_bad_name_is_refused():
    for name in (declared(), "my ppo", "a:b", ""):
        with pytest.raises(ValueError, match="letters, digits and _"):
            config(name)
    with pytest.raises(ValueError, match="'PPO' is registered already"):
        config("PPO")(declared())


def test_a_plain_subclass_is_no_config():
    for algorithm in (type("Sub", (PPO,), {}), type("Sub", (PPO,), {})()):
        with pytest.raises(TypeError, match="Sub is a subclass of the config PPO"):
            make(algorithm, {})


def test_scalars_of_numpy_and_jax_are_numbers():
    for one in (np.float32(0.5), np.array(0.5), jnp.float32(0.5)):
        assert PPO(discount=one) == PPO(discount=0.5) and not hasattr(PPO(discount=np.array(0.5)).discount, "shape")
    with pytest.raises(ValueError, match=r"or give the list to msrl\.train"):
        PPO(learning_rate=[1e-3, 1e-4])


def test_lists_numbers_of_few_bits_and_fractions_become_those_of_python():
    half = fractions.Fraction(1, 2)
    given = PPO(unroll_length=np.uint8(128), hidden_sizes=[np.int64(8)], discount=half, num_envs=jnp.int32(4))
    assert given == PPO(unroll_length=128, hidden_sizes=(8,), discount=0.5, num_envs=4)
    kinds = [type(x) for x in (given.unroll_length, *given.hidden_sizes, given.discount, given.num_envs)]
    assert kinds == [int, int, float, int]
    assert type(PPO(learning_rate=np.longdouble("0.001")).learning_rate) is float and type(PPO(discount=1).discount) is int


LARGE = np.ones((50, 50))


@pytest.mark.parametrize(
    "call",
    [
        lambda: PPO(learning_rate=LARGE),
        lambda: algorithms.get(LARGE),
        lambda: envs.make(LARGE),
        lambda: envs.RandomizeParams(envs.make("CartPole-v1"), LARGE),
        lambda: msrl.train(callbacks=LARGE.tolist()),
    ],
)
def test_a_message_holds_the_start_of_a_large_value_only(call):
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


def test_a_config_is_not_subclassed():
    with pytest.raises(TypeError, match=r"Own inherits from the config PPO, .*; list its fields, and pass those of PPO"):
        config("own")(type("Own", (PPO,), {}))


def test_minibatches_must_divide_the_unroll():
    with pytest.raises(ValueError, match=r"unroll_length=10 .* num_minibatches=4 .* unroll_length=12"):
        PPO(unroll_length=10, num_minibatches=4)


def test_no_field_has_the_name_of_an_argument_of_train(monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "counting", None)

    @config("counting")
    class Counting:
        total_steps: int = field(default=1, doc="steps.")

        def build(self, env):
            return algorithms.A2C().build(env)

    with pytest.raises(TypeError, match=r"has the field 'total_steps', but that is an argument of msrl\.train"):
        msrl.train("counting", progress=False)
    parameters = inspect.signature(msrl.train).parameters
    names = {name for name in algorithms.names() if name != "counting"}
    assert not {f.name for name in names for f in dataclasses.fields(algorithms.get(name))} & parameters.keys()
