"""Parameters of which a few are fast; the rest, more cases of the same comparison, are slow."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_unless(fast: bool, *values: Any, **options: Any):
    """A parameter that is slow unless it is fast."""
    return pytest.param(*values, marks=[] if fast else [pytest.mark.slow], **options)


def mostly_slow(values: Iterable, *fast: str) -> list:
    """A parameter for each value, slow unless its text is one of `fast`."""
    values = [*values]
    assert {*fast} <= {*map(str, values)}
    return [slow_unless(str(value) in fast, value) for value in values]
