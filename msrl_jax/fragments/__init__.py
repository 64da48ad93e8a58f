"""Fragments: marking, tracing, partitioning and running a training loop."""

from msrl_jax.fragments.marker import fragment as fragment
from msrl_jax.fragments.plan import Plan as Plan
from msrl_jax.fragments.program import Delayed as Delayed
from msrl_jax.fragments.program import Program as Program
from msrl_jax.fragments.program import compile as compile
