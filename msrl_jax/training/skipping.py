"""Agents that drop an update whose result is not finite."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms import Agent
from msrl_jax.algorithms.base import Metrics
from msrl_jax.replay import SHARD_AXIS

SKIPPED = "skipped_updates"
"""The metric that counts the dropped updates."""

_ELSEWHERE = {"env", SHARD_AXIS}
"""Logical axes of what actors, environments and buffers compute."""


def skipping(agent: Agent) -> Agent:
    """An agent that keeps its parameters if an iteration makes them nan or infinite.

    Everything that learners compute is kept together: parameters, target parameters, states of optimizers, and copies of
    parameters for acting. Counters and keys go on. Running statistics of the environment are kept on their own: they do not
    depend on the learner, so actors do not wait for it. Both are plain selections between the old and the new value, so every
    distribution policy computes the same.

    Args:
      agent: the agent of one run.

    Returns:
      The agent; its metrics have `skipped_updates`, 1 in an iteration whose update was dropped and 0 otherwise.
    """

    def iteration(state: Any) -> tuple[Any, Metrics]:
        after, metrics = agent.iteration(state)
        names = learned(agent, state)
        kept, dropped = _unless_finite(*({name: getattr(s, name) for name in names} for s in (state, after)))
        after = after._replace(**kept)
        if state.env_state != ():
            statistics = (agent.env.statistics(s.env_state) for s in (state, after))
            kept, _ = _unless_finite(*statistics)
            after = after._replace(env_state=agent.env.with_statistics(after.env_state, kept))
        return after, {**metrics, SKIPPED: dropped.astype(jnp.float32)}

    return dataclasses.replace(agent, iteration=iteration)


def learned(agent: Agent, state: Any) -> list[str]:
    """The fields of a state that learners compute.

    Args:
      agent: the agent.
      state: its state, or the shapes of one.

    Returns:
      The names of the fields that hold floats and have no axis of environments or of a buffer.
    """

    def is_spec(x: Any) -> bool:
        return isinstance(x, P)

    def is_learned(name: str) -> bool:
        specs = jax.tree.leaves(getattr(agent.axes, name), is_leaf=is_spec)
        axes = {axis for spec in specs for entry in spec for axis in (entry if isinstance(entry, tuple) else (entry,))}
        floats = any(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(getattr(state, name)))
        return floats and not axes & _ELSEWHERE

    skipped = {"env_state", "replay", *agent.data}
    return [name for name in state._fields if name not in skipped and is_learned(name)]


def _unless_finite(old: Any, new: Any) -> tuple[Any, jax.Array]:
    """`new`, or `old` if `new` is not finite; and whether it is `old`."""
    floats = [x for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = jnp.array([~jnp.isfinite(x).all() for x in floats]).any() if floats else jnp.bool(False)
    return jax.tree.map(lambda a, b: jnp.where(bad, a, b), old, new), bad
