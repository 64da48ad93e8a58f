"""The command `compete`."""

from typing import Any

from msrl_jax.cli.command import Output, command
from msrl_jax.cli.options import OptionGroup


@command(OptionGroup("msrl_jax.tournament.worker:compete", without=("devices", "callbacks", "seeds", "pbt", "rank_by")))
def compete(arguments: dict[str, Any]) -> Output:
    """Work on a leaderboard: draw a member, train it for a round, and return it if it improved. Workers can run in parallel."""
    from msrl_jax.tournament.worker import compete

    arguments.setdefault("progress", "lines")
    board = compete(**arguments)
    return Output(board, board.entries)
