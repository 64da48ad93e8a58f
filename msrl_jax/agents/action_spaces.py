"""Checks of the action spaces that an algorithm supports."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from msrl_jax.configs.config import DECLARED, Actions
from msrl_jax.envs import Box, Discrete, Space
from msrl_jax.envs.spaces import is_integers


def check_discrete(name: str, space: Space) -> Discrete:
    """Returns the space; raises TypeError, with the name of the config, if it is not `Discrete`."""
    if isinstance(space, Discrete):
        return space
    fact = f"{name} values each of a finite number of actions, got {space}"
    if is_integers(space):
        raise TypeError(f"{fact}; {_for_integers()}")
    raise TypeError(f"{fact}; wrap the environment to take a Discrete space, or for a Box of floats use {_for('bounded')}")


def check_bounded(name: str, space: Space) -> Box:
    """Returns the space; raises TypeError if actions are not vectors of floats, and ValueError if a bound is infinite."""
    if isinstance(space, Discrete):
        raise TypeError(f"{name} acts in a bounded Box, not in {space}; for discrete actions use {_for('discrete')}")
    if is_integers(space):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; {_for_integers()}")
    if not isinstance(space, Box) or not jnp.issubdtype(space.dtype, jnp.floating):
        raise TypeError(f"{name} acts in a bounded Box of floats, not in {space}; wrap the environment to take one")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ValueError(
            f"{name} needs finite bounds of every component of an action, but the space is {space} (the largest float counts "
            f"as no bound); give its action_space finite low and high, or use {_for('unbounded')}"
        )
    return space


def check_discrete_or_bounded(name: str, space: Space) -> Discrete | Box:
    """Returns the space if its actions are discrete or bounded vectors of floats: `check_discrete` or `check_bounded`."""
    return space if isinstance(space, Discrete) else check_bounded(name, space)


def _for_integers() -> str:
    return f"for integers use {_for('integers')}, or wrap the environment to take a Discrete space of their combinations"


def _for(actions: Actions) -> str:
    """Lists the algorithms for a kind of actions, those of one agent first."""
    configs: dict[str, Any] = {name: config for name, config in sorted(DECLARED.items()) if actions in vars(config)["actions"]}
    single_agent, multi_agent = ([n for n, c in configs.items() if c.multi_agent is many] for many in (False, True))
    return f"{', '.join(single_agent)} (of several agents: {', '.join(multi_agent)})"
