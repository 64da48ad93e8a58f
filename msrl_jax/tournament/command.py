"""The command `compete`."""

from pathlib import Path
from typing import Any

import tyro

from msrl_jax.cli.commands import Progress, What, command, option
from msrl_jax.cli.handlers import options_of, show


@command
class Compete(What):
    """Work on a leaderboard: draw a member, train it for a round, and return it if it improved. Workers can run in parallel."""

    leaderboard: tyro.conf.Positional[Path] = option(doc="folder of the leaderboard; created if it does not exist.")
    round_steps: int = option(100_000, "environment steps of a round.")
    total_steps: int = option(10_000_000, "steps after which a member is complete, and over which schedules run.")
    rounds: int | None = option(None, "number of rounds of this worker; unlimited if not given.")
    time_limit: str | None = option(None, "time after which this worker ends, such as 5h50m.")
    target: float | None = option(None, "the worker ends when the best score reaches this value.")
    fresh: float = option(0.2, "probability of starting a new member instead of drawing one.")
    size: int | None = option(None, "maximum number of members; that of the board, or 8, if not given.")
    seed: int | None = option(None, "seed of this worker's draws; a different one each time if not given.")
    eval_episodes: int = option(64, "number of episodes of an evaluation.")
    progress: Progress = option("lines", "auto, bar, lines or none.")


def _compete(args: Compete, config: dict[str, Any]) -> int:
    from msrl_jax.tournament.worker import compete

    board = compete(args.leaderboard, **options_of(args, "leaderboard"), **config)
    show(args, board.entries, board)
    return 0


COMPETE = (Compete, _compete)
