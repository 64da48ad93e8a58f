"""Checks of the action spaces that an algorithm supports."""

import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.spaces import is_integers

_FOR_INTEGERS = (
    "for integers use a2c, a3c, bc, es, impala, ppo or recurrent_ppo (of several agents, ippo or mappo), or wrap "
    "the environment to take a Discrete space of their combinations"
)


def check_discrete(name: str, space: Space) -> Discrete:
    """Returns the space; raises TypeError, with the name of the algorithm, if it is not `Discrete`."""
    if isinstance(space, Discrete):
        return space
    if is_integers(space):
        raise TypeError(f"{name} values each of a finite number of actions, got {space}; {_FOR_INTEGERS}")
    raise TypeError(
        f"{name} values each of a finite number of actions, got {space}; wrap the environment to take a Discrete "
        "space, or for a Box of floats use sac or td3 or ddpg or ppo"
    )


def check_bounded(name: str, space: Space) -> Box:
    """Returns the space; raises TypeError if actions are not vectors of floats, and ValueError if a bound is infinite."""
    if isinstance(space, Discrete):
        raise TypeError(f"{name} acts in a bounded Box, not in {space}; use sac, ppo or a DQN for discrete actions")
    if is_integers(space):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; {_FOR_INTEGERS}")
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; wrap the environment to take one")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"{name} needs finite bounds of every component of an action, but the space is {space} (the largest float counts "
            "as no bound); give its action_space finite low and high, or use ppo (of several agents, ippo)"
        )
    return space


def check_discrete_or_bounded(name: str, space: Space) -> Discrete | Box:
    """Returns the space if its actions are discrete or bounded vectors of floats: `check_discrete` or `check_bounded`."""
    return space if isinstance(space, Discrete) else check_bounded(name, space)
