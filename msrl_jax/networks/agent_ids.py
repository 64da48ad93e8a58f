"""Observations of several agents with the index of each agent, for networks that they share.

In the shape descriptions, `A` denotes the number of agents and `D` the length of an observation.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import Box, Space, spaces
from msrl_jax.envs.masks import unmasked, with_mask_of


def with_ids(obs: Any, num_agents: int, space: Space | None = None) -> Any:
    """Appends the one-hot agent index to vectors, or to observations in `space` after flattening: `[..., A, D + A]` float32."""
    plain = unmasked(obs)
    vectors = plain if space is None else spaces.flatten(space, plain)
    ids = jnp.broadcast_to(jnp.eye(num_agents, dtype=jnp.float32), (*vectors.shape[:-1], num_agents))
    return with_mask_of(obs, jnp.concatenate([vectors, ids], axis=-1))


def with_ids_space(space: Space, num_agents: int) -> Box:
    """Returns the space of the outputs of `with_ids`; raises TypeError if observations are arrays of several dimensions."""
    if isinstance(space, Box) and len(space.shape) > 1:
        raise TypeError(
            f"agent_ids=True appends the number of the agent to vectors, but observations are in {space}; flatten them, or use "
            "agent_ids=False"
        )
    return Box(-np.inf, np.inf, (spaces.flat_space(space).shape[0] + num_agents,))
