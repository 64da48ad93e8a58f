"""msrl_jax: reinforcement learning as fragmented dataflow graphs, native to JAX."""

from msrl_jax.fragments import fragment as fragment
