"""Networks as pure functions of their parameters, and distributions over actions."""

from msrl_jax.networks import convolutions as convolutions
from msrl_jax.networks import discrete_policies as discrete_policies
from msrl_jax.networks import simba as simba
