"""Losses per example, for custom algorithms: pure elementwise functions; the caller takes the mean."""

from msrl_jax.losses.policy_gradient import approximate_kl as approximate_kl
from msrl_jax.losses.policy_gradient import clipped_surrogate_loss as clipped_surrogate_loss
from msrl_jax.losses.policy_gradient import policy_gradient_loss as policy_gradient_loss
from msrl_jax.losses.values import clipped_value_loss as clipped_value_loss
from msrl_jax.losses.values import value_loss as value_loss
