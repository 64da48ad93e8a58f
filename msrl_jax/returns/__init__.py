"""Returns and advantages over time-major arrays `[T, ...]`, for custom algorithms."""

from msrl_jax.returns.advantages import gae as gae
from msrl_jax.returns.advantages import standardize as standardize
from msrl_jax.returns.n_step import lambda_return as lambda_return
from msrl_jax.returns.n_step import n_step_return as n_step_return
from msrl_jax.returns.off_policy import retrace as retrace
from msrl_jax.returns.off_policy import vtrace as vtrace
