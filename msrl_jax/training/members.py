"""Many runs at once: a population of independent runs is one agent with a leading member axis in its arrays."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms import Agent


def member_axes(axes: Any) -> Any:
    """Puts the logical axis `"member"` in front of every entry of a prefix tree of PartitionSpecs."""
    return jax.tree.map(lambda spec: P("member", *(spec or ())), axes, is_leaf=lambda spec: spec is None or isinstance(spec, P))


def population(agent: Agent, hyperparameters: Mapping[str, np.ndarray] | None = None) -> Agent:
    """Vectorizes an agent over independent members.

    Args:
      agent: the agent of one run.
      hyperparameters: the numbers of the config in which the members differ, as `tuned` agents take them. `[M]`

    Returns:
      An agent with a leading dimension `M` in its state and metrics; its `init` takes keys `[M]`. Data have no such dimension,
      because all members share them. Every member computes the same as a separate run. `act` and `env` are for one member.
    """
    dims, axes = 0, member_axes(agent.axes)
    if agent.data:  # all members share the data
        dims = agent.axes._replace(**{name: None if name in agent.data else 0 for name in agent.axes._fields})
        axes = axes._replace(**{name: getattr(agent.axes, name) for name in agent.data})
    return dataclasses.replace(
        agent,
        # One member after another: an orthogonal initializer under vmap is a batched QR, which takes minutes on a CPU.
        init=lambda keys: jax.lax.map(lambda x: agent.init(*x), (keys, hyperparameters) if hyperparameters else (keys,)),
        iteration=jax.vmap(agent.iteration, in_axes=(dims,), out_axes=(dims, 0)),
        axes=axes,
    )


def initial_key(seed: int, seeds: int, settings: int | None = None) -> jax.Array:
    """The initial key or keys of a run: member `i` of a setting has the key `jax.random.key(seed + i)`.

    Args:
      seed: the first seed.
      seeds: the number of members of each setting.
      settings: the number of settings of the config, one after another; None if it has constants only.

    Returns:
      A typed key if there is one seed and no setting, else keys `[M]`.
    """
    if seeds == 1 and settings is None:
        return jax.random.key(seed)
    return jnp.stack([jax.random.key(seed + i) for i in range(seeds)] * (settings or 1))
