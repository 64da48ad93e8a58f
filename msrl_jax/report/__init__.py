"""Reports: how fast algorithms train (`bench`), and how their plans scale with the devices (`scaling`)."""

from msrl_jax.report import bench as bench
from msrl_jax.report import scaling as scaling
