"""Configs inherit fields, their texts and their checks."""

import dataclasses
from typing import Literal

import pytest
from msrl_jax.algorithms.configs.base import Config, field_docs
from msrl_jax.algorithms.configs.checks import check_integers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sized(Config):
    """A size.

    Attributes:
      size: how large
        it is.
      shape: "round" or "square".
    """

    size: int = 1
    shape: Literal["round", "square"] | None = None

    def check(self) -> None:
        """Raises ValueError unless the size is positive."""
        check_integers(self, 1, "size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Colored(Config):
    """A color.

    Attributes:
      bright: whether it shines.
    """

    bright: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ball(Colored, Sized):
    """A ball.

    Attributes:
      bounces: how often it bounces.
      size: its radius.
    """

    size: int = 3
    bounces: int = 2

    def check(self) -> None:
        """Raises ValueError unless it bounces."""
        check_integers(self, 1, "bounces")


def test_texts_are_inherited_and_the_nearest_counts():
    assert field_docs(Sized) == {"size": "how large it is.", "shape": '"round" or "square".'}
    assert field_docs(Ball) == {
        "size": "its radius.",
        "shape": '"round" or "square".',
        "bright": "whether it shines.",
        "bounces": "how often it bounces.",
    }
    assert list(field_docs(Ball)) == [field.name for field in dataclasses.fields(Ball)]
    assert Ball().size == 3


@pytest.mark.parametrize(
    ("field", "value", "remedy"),
    [
        ("bounces", 0, "an integer of at least 1"),
        ("size", 0, "an integer of at least 1"),
        ("bright", 1, "True or False"),
        ("shape", "squar", "'square'"),
        ("shape", "xyz", r"one of \['round', 'square'\]"),
    ],
)
def test_checks_of_all_bases_are_made(field, value, remedy):
    with pytest.raises(ValueError, match=rf"Ball\.{field}=.*: use {remedy}"):
        Ball(**{field: value})
    assert Ball(shape="round").shape == "round"


def test_fields_are_given_by_keyword():
    with pytest.raises(TypeError, match="positional"):
        Ball(1)
