"""Fragments: marking, tracing, partitioning and running a training loop."""

from msrl_jax.fragments.marker import fragment as fragment
