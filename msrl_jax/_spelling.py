"""Finds the known name nearest to an unknown one, for messages."""

import difflib
import re
from collections.abc import Iterable


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Finds the option that a misspelled or shortened name probably means, in any case; None if there is none.

    It is one with these initials (`lr` for `learning-rate`), else one of similar spelling, else one that starts with the name.
    """
    lower, by_lower = name.lower(), {option.lower(): option for option in options}
    near = [option for option in by_lower if len(lower) > 1 and _initials(option) == lower]
    near = near or difflib.get_close_matches(lower, by_lower, n=1)
    near = near or [option for option in by_lower if option.startswith(lower)]
    return by_lower[near[0]] if near else None


def _initials(option: str) -> str:
    return "".join(word[0] for word in re.split(r"[\W_]+", option) if word)


def suggestion(name: str, options: Iterable[str]) -> str:
    """Text that proposes the nearest option, to follow the name in a message; empty if none is near."""
    near = nearest(name, options)
    return f" (did you mean {near!r}?)" if near else ""
