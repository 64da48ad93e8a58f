"""Text as values: names with parameters, words, literals and calls."""

import pytest

from msrl_jax.fragments.support.text_values import parse_spec, read_value, read_values, split_specs

CALLS = {"uniform": lambda low, high: ("uniform", low, high), "choice": lambda *options: ("choice", *options)}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a=1,b.c=-2.5e3,d=None,", {"a": 1, "b.c": -2500.0, "d": None}),
        ("a=(1, 2),b=[x, f(1)]", {"a": (1, 2), "b": ["x", "f(1)"]}),
        ("a=(1, 2),c={k: v, 'w': [1, 2]}", {"a": (1, 2), "c": {"k": "v", "w": [1, 2]}}),
        ("a='x,b=3m(',d=2s3z, e = word.s", {"a": "x,b=3m(", "d": "2s3z", "e": "word.s"}),
        ("a=linear:3e-4:0,b=my.cells:Cell,c=a_[12] | b*", {"a": "linear:3e-4:0", "b": "my.cells:Cell", "c": "a_[12] | b*"}),
        ("codec=frame_stack(4),lambda=0.9", {"codec": "frame_stack(4)", "lambda": 0.9}),
        ("a==1", None),
        ("=1", None),
        ("a=1 2", None),
        ("1a=2", None),
    ],
)
def test_values_by_key(text, values):
    if values is None:
        with pytest.raises(ValueError, match=r"^not so$"):
            read_values(text, wrong="not so")
    else:
        assert read_values(text, wrong="not so") == values == parse_spec(f"Name:{text}")[1]


def test_calls_are_made_where_they_are_known():
    text = "a=uniform:0.25:1,b=choice:1:2:4,c=uniform(0, uniform(1, 2)),d=choice([1, 2]),e=word,f=[0, -1]"
    assert read_values(text, CALLS, wrong="") == {
        "a": ("uniform", 0.25, 1),
        "b": ("choice", 1, 2, 4),
        "c": ("uniform", 0, ("uniform", 1, 2)),
        "d": ("choice", [1, 2]),
        "e": "word",
        "f": [0, -1],
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unifrom:0:1", r"x: there is no 'unifrom' \(did you mean 'uniform'\?\); use uniform, choice"),
        ("uniform:0", r"x=uniform\(0\): write uniform\(low, high\)"),
        ("1 + y", "^not so$"),
        ("1 +", "^not so$"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(text, message):
    with pytest.raises(ValueError, match=message):
        read_value("x", text, CALLS, wrong="not so")


def test_a_key_is_there_once():
    with pytest.raises(ValueError, match="'a=1,b=2,a=3' has 'a' twice; give it once"):
        parse_spec("Name:a=1,b=2,a=3")


def test_commas_in_brackets_and_before_keys_do_not_separate_texts():
    texts = ["dqn:tau=1,clip=2", "replay(5, n_step=3)", "'a,b'", "c"]
    assert split_specs(",".join(texts)) == texts
