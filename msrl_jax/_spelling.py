"""Finds the known name nearest to an unknown one, for messages."""

import difflib
import re
from collections.abc import Iterable


def suggestion(name: str, options: Iterable[str]) -> str:
    """Text that proposes the option that a misspelled or shortened name probably means, to follow it; empty if there is none.

    It is one with these initials (`lr` for `learning-rate`), else one of similar spelling, else one that starts with the name.
    """
    lower, by_lower = name.lower(), {option.lower(): option for option in options}
    initials = {option: "".join(word[0] for word in re.split(r"[\W_]+", option) if word) for option in by_lower}
    near = [option for option in by_lower if len(lower) > 1 and initials[option] == lower]
    near = near or difflib.get_close_matches(lower, by_lower, n=1)
    near = near or [option for option in by_lower if option.startswith(lower)]
    return f" (did you mean {by_lower[near[0]]!r}?)" if near else ""
