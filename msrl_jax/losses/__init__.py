"""Losses per example, for custom algorithms: pure elementwise functions; the caller takes the mean.

Here are also the options of algorithms for what networks predict of returns, and for the targets of these predictions.
"""

from msrl_jax.losses import atoms as atoms
from msrl_jax.losses import cross_q as cross_q
from msrl_jax.losses import implicit_quantiles as implicit_quantiles
from msrl_jax.losses import munchausen as munchausen
from msrl_jax.losses import quantiles as quantiles
from msrl_jax.losses.policy_gradient import approximate_kl as approximate_kl
from msrl_jax.losses.policy_gradient import clipped_surrogate_loss as clipped_surrogate_loss
from msrl_jax.losses.policy_gradient import policy_gradient_loss as policy_gradient_loss
from msrl_jax.losses.values import clipped_value_loss as clipped_value_loss
from msrl_jax.losses.values import value_loss as value_loss
