"""Networks as pure functions of their parameters, and distributions over actions."""

from msrl_jax.networks import convolutions as convolutions
