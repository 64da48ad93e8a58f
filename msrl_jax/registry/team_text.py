"""The text of a team: `TEAM=ALGORITHM:field=value,...`, maybe with `agents=PATTERN|...` among the fields."""

import re
from typing import Any

from msrl_jax.fragments.support.text_values import parse_spec

_AGENTS = re.compile(r"([:,])\s*agents\s*=([^,]*)")
"""The field `agents` of a text, which is none of its algorithm."""


def without_agents(team: str, text: str) -> tuple[str, tuple[str, ...]]:
    """Takes `agents=...` out of `ALGORITHM:field=value,...`; returns the rest, and the patterns."""
    found = _AGENTS.findall(text)
    if not found:
        return text, ()
    patterns = tuple(part.strip() for part in found[0][1].strip().strip("'\"").split("|"))
    if len(found) > 1 or "" in patterns or patterns[0][:1] in "([":
        raise ValueError(f"team {team!r}: cannot read agents in {text!r}; write names or patterns once: agents=ally_*|medic")
    return _AGENTS.sub(r"\1", text).replace(":,", ":").replace(",,", ",").rstrip(":,"), patterns


def split_team(text: Any) -> tuple[str, str]:
    """Splits the text of a team into its name and the rest."""
    if not isinstance(text, str) or "=" not in text.partition(":")[0]:
        raise ValueError(f"Teams.teams has {text!r}; write TEAM=ALGORITHM or TEAM=ALGORITHM:field=value,...")
    team, _, rest = text.partition("=")
    return team.strip(), rest.strip()


def named_by(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the algorithm's name and the fields in the text of a team; raises ValueError if the text is invalid."""
    return parse_spec(without_agents(*split_team(text))[0], prefixes=True)
