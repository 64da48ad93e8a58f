"""The names of the room, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.tournament.leaderboard import Entry as Entry
from msrl_jax.tournament.leaderboard import Leaderboard as Leaderboard
from msrl_jax.tournament.worker import compete as compete
