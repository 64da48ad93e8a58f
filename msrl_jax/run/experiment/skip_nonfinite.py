"""Discards the updates of an iteration that makes a learned value non-finite."""

import dataclasses

import jax
import jax.numpy as jnp

from msrl_jax.agents.agent import Agent, Metrics, Progress, innermost, with_innermost
from msrl_jax.envs.base import PyTree
from msrl_jax.run.evaluation.history import SKIPPED
from msrl_jax.run.experiment.members import learned_fields, with_learned_fields


def skip_nonfinite(agent: Agent) -> Agent:
    """Makes an agent that discards all values of learners if an iteration makes one non-finite; counters and keys advance.

    Running statistics of the environment are checked separately: they do not depend on the learner, so actors do not wait for
    it. Both checks select between the old and the new value, so every distribution policy computes the same.
    """

    def iteration(state: PyTree, progress: Progress) -> tuple[PyTree, Metrics]:
        next_state, metrics = agent.iteration(state, progress)
        fields, dropped = _unless_finite(learned_fields(agent, state), learned_fields(agent, next_state))
        next_state = with_learned_fields(next_state, fields)
        inner, next_inner = innermost(state), innermost(next_state)
        if inner.env_state != ():
            statistics, _ = _unless_finite(*(agent.env.statistics(s.env_state) for s in (inner, next_inner)))
            next_state = with_innermost(
                next_state, next_inner._replace(env_state=agent.env.with_statistics(next_inner.env_state, statistics))
            )
        return next_state, {**metrics, SKIPPED: dropped.astype(jnp.float32)}

    return dataclasses.replace(agent, iteration=iteration)


def _unless_finite(old: PyTree, new: PyTree) -> tuple[PyTree, jax.Array]:
    """Returns `new`, or `old` if `new` is non-finite; and whether it is `old`."""
    floats = [x for x in jax.tree.leaves(new) if jnp.issubdtype(x.dtype, jnp.inexact)]
    bad = jnp.array([~jnp.isfinite(x).all() for x in floats]).any() if floats else jnp.bool(False)
    return jax.tree.map(lambda a, b: jnp.where(bad, a, b), old, new), bad
