"""The nearest of some names, for messages about one that does not exist."""

import difflib
from collections.abc import Iterable


def nearest(name: str, options: Iterable[str]) -> str | None:
    """The option that a misspelt or shortened name probably means, whatever its case; None if none is near."""
    lower, by_lower = name.lower(), {option.lower(): option for option in options}
    near = difflib.get_close_matches(lower, by_lower, n=1) or [option for option in by_lower if option.startswith(lower)]
    return by_lower[near[0]] if near else None


def suggestion(name: str, options: Iterable[str]) -> str:
    """The part of a message, behind the name, that proposes the nearest option; empty if none is near."""
    near = nearest(name, options)
    return f" (did you mean {near!r}?)" if near else ""
