"""Discards the updates of an iteration that makes a learned value non-finite."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.agents.agent import Agent, Metrics, Progress, innermost, with_innermost
from msrl_jax.run.evaluation.history import SKIPPED
from msrl_jax.run.experiment.members import learned, with_learned


def skip_nonfinite(agent: Agent) -> Agent:
    """Makes an agent that discards all values of learners if an iteration makes one non-finite; counters and keys advance.

    Running statistics of the environment are checked separately: they do not depend on the learner, so actors do not wait for
    it. Both checks select between the old and the new value, so every distribution policy computes the same.
    """

    def iteration(state: Any, progress: Progress) -> tuple[Any, Metrics]:
        after, metrics = agent.iteration(state, progress)
        kept, dropped = _unless_finite(learned(agent, state), learned(agent, after))
        after = with_learned(after, kept)
        old, new = innermost(state), innermost(after)
        if old.env_state != ():
            statistics, _ = _unless_finite(*(agent.env.statistics(s.env_state) for s in (old, new)))
            after = with_innermost(after, new._replace(env_state=agent.env.with_statistics(new.env_state, statistics)))
        return after, {**metrics, SKIPPED: dropped.astype(jnp.float32)}

    return dataclasses.replace(agent, iteration=iteration)


def _unless_finite(old: Any, new: Any) -> tuple[Any, jax.Array]:
    """Returns `new`, or `old` if `new` is non-finite; and whether it is `old`."""
    floats = [x for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = jnp.array([~jnp.isfinite(x).all() for x in floats]).any() if floats else jnp.bool(False)
    return jax.tree.map(lambda a, b: jnp.where(bad, a, b), old, new), bad
