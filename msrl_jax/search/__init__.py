"""Hyperparameter search: sweeps."""

from msrl_jax.search.sweep import sweep as sweep
from msrl_jax.search.sweep_figure import plot_sweep as plot_sweep
from msrl_jax.search.sweep_result import SweepResult as SweepResult
