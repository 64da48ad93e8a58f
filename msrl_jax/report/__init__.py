"""Reports: how fast an algorithm trains, and how its plan scales."""

from msrl_jax.report.bench import Measurement as Measurement
from msrl_jax.report.bench import bench as bench
from msrl_jax.report.bench import format_table as format_table
from msrl_jax.report.scaling import plans as plans
