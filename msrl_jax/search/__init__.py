"""Searches over runs: sweeps and tournaments."""

from msrl_jax.search.sweep import sweep as sweep
from msrl_jax.search.sweep_result import SweepResult as SweepResult
from msrl_jax.search.tournament import Entry as Entry
from msrl_jax.search.tournament import Leaderboard as Leaderboard
from msrl_jax.search.tournament import compete as compete
