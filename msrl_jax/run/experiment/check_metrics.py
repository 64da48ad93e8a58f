"""Checks an agent and the metrics that it reports."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp

from msrl_jax.agents.agent import Agent, Metrics, Progress, innermost
from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.checks import shown, whole

# Columns that a run adds to the metrics of its algorithm.
RESERVED = ("step", "iteration", "seconds", "steps_per_second", "eval_return", "eval_length")


def check_metrics(agent: Agent, name: str) -> Agent:
    """Makes an agent that raises an error for metrics that are not numbers."""
    if not isinstance(agent, Agent):
        raise TypeError(f"algorithm {name!r}: build returned {shown(agent)}; return an msrl_jax.algorithms.Agent")
    for number in ("steps_per_iteration", "updates_per_iteration"):
        whole(f"algorithm {name!r}: Agent.{number}", getattr(agent, number), least=int(number.startswith("steps")))
    if not hasattr(axes := innermost(agent.axes), "_fields"):
        raise TypeError(
            f"algorithm {name!r} has axes of a {type(axes).__name__}; its state is a NamedTuple, whose field 'inner', if it "
            "has one, is the state of the agent that a transformation widens"
        )

    def iteration(state: PyTree, progress: Progress) -> tuple[PyTree, Metrics]:
        result = agent.iteration(state, progress)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)):
            raise TypeError(f"algorithm {name!r}: its iteration returns a {type(result).__name__}; return (state, metrics)")
        state, metrics = result
        for metric, value in metrics.items():
            dtype = getattr(value.total if isinstance(value, Mean) else value, "dtype", type(value))
            if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating)):
                raise TypeError(f"algorithm {name!r} reports the metric {metric!r} as {shown(value)}; metrics are real numbers")
            if metric in RESERVED:
                raise ValueError(f"algorithm {name!r} reports the metric {metric!r}, as the run itself does; name it otherwise")
        return state, metrics

    return dataclasses.replace(agent, iteration=iteration)
