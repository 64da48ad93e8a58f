"""Optimizers of a user's own, which tests name as MODULE:NAME."""

import optax


def falling() -> optax.GradientTransformation:
    """Adam after a clip, with a learning rate that falls over its updates."""
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adam(optax.linear_schedule(3e-3, 1e-3, 20)))


ready = falling()
"""The same one, made."""


def halving(progress):
    """A schedule from 1 to 1/2."""
    return 1 - progress / 2
