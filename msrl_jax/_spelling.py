"""The nearest of some names, for messages about one that does not exist."""

import difflib
import re
from collections.abc import Iterable


def nearest(name: str, options: Iterable[str]) -> str | None:
    """Finds the option that a misspelt or shortened name probably means, whatever its case.

    Args:
      name: a name that is none of the options.
      options: the names that exist.

    Returns:
      An option whose words have these initials (`lr` for `learning-rate`), else one that is spelled alike, else one that
      starts with the name; None if there is none.
    """
    lower, by_lower = name.lower(), {option.lower(): option for option in options}
    near = [option for option in by_lower if len(lower) > 1 and _initials(option) == lower]
    near = near or difflib.get_close_matches(lower, by_lower, n=1)
    near = near or [option for option in by_lower if option.startswith(lower)]
    return by_lower[near[0]] if near else None


def _initials(option: str) -> str:
    return "".join(word[0] for word in re.split(r"[\W_]+", option) if word)


def suggestion(name: str, options: Iterable[str]) -> str:
    """The part of a message that follows the name and proposes the nearest option; empty if none is near."""
    near = nearest(name, options)
    return f" (did you mean {near!r}?)" if near else ""
