"""The command `compete`."""

from pathlib import Path
from typing import Any

import tyro

from msrl_jax.cli.commands import Progress, What, command, option
from msrl_jax.cli.handlers import options_of, show


@command
class Compete(What):
    """Work on a leaderboard: draw a member, train it for a round, put back what is better. Any number of workers may."""

    leaderboard: tyro.conf.Positional[Path] = option(doc="folder of the leaderboard, which is made if there is none.")
    round_steps: int = option(100_000, "environment steps of a round.")
    total_steps: int = option(10_000_000, "steps after which a member trains no further, and over which schedules go.")
    rounds: int | None = option(None, "rounds of this worker; it does not end if not given.")
    time_limit: str | None = option(None, "time after which this worker ends, such as 5h50m.")
    target: float | None = option(None, "the worker ends when the best score is as high.")
    fresh: float = option(0.2, "probability of a new member in place of a drawn one.")
    size: int | None = option(None, "largest number of members; that of the board, or 8, if not given.")
    seed: int | None = option(None, "the seed of this worker's draws; another one each time if not given.")
    eval_episodes: int = option(64, "episodes of an evaluation.")
    progress: Progress = option("lines", "auto, bar, lines or none.")


def _compete(args: Compete, config: dict[str, Any]) -> int:
    from msrl_jax.tournament.worker import compete

    board = compete(args.leaderboard, **options_of(args, "leaderboard"), **config)
    show(args, board.entries, board)
    return 0


COMPETE = (Compete, _compete)
