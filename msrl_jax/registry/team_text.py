"""The text of a team: `TEAM=ALGORITHM:field=value,...`, optionally with `agents=PATTERN|...` among the fields."""

import contextlib
from typing import Any

from msrl_jax.fragments.support.text_values import parse_spec, read_values
from msrl_jax.registry.table import ALGORITHMS


def split_team(text: Any) -> tuple[str, str]:
    """Splits the text of a team into its name and the rest."""
    if not isinstance(text, str) or "=" not in text.partition(":")[0]:
        raise ValueError(f"Teams.teams has {text!r}; write TEAM=ALGORITHM or TEAM=ALGORITHM:field=value,...")
    team, _, algorithm = text.partition("=")
    return team.strip(), algorithm.strip()


def read_algorithm(team: str, text: str) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Reads the rest: the algorithm's name, its fields, and the patterns of agents; raises ValueError if it is invalid."""
    try:
        name, fields = parse_spec(text, prefixes=True)
    except ValueError as error:
        raise ValueError(f"team {team!r}: {error}") from None
    algorithm, _, word = name.partition(":")
    if word and algorithm in ALGORITHMS:
        raise ValueError(f"team {team!r}: cannot read {word!r} in {text!r}; write {algorithm}:field=value,field=value")
    if "agents" not in fields:
        return name, fields, ()
    agents = fields.pop("agents")
    patterns = tuple(part.strip() for part in str(agents).split("|"))
    if not isinstance(agents, str | int) or "" in patterns:
        raise ValueError(f"team {team!r}: cannot read agents in {text!r}; write names or patterns, as in agents=ally_*|medic")
    return name, fields, patterns


def write_agents(patterns: tuple[str, ...]) -> str:
    """Returns the field `agents`, quoted if it would not be read as text."""
    text = "|".join(patterns)
    with contextlib.suppress(ValueError):
        if read_values(f"agents={text}", wrong=text) == {"agents": text}:
            return f"agents={text}"
    return f"agents={text!r}"
