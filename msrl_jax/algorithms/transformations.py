"""Transformations of agents: what all of them share, and the one that counts the iterations of a run.

What widens a run is a function from agent to agent. It has one state type, a NamedTuple with the state that it wraps in its
field `inner`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.algorithms.agent import Agent, Metrics
from msrl_jax.fragments import counters, fragment
from msrl_jax.fragments.counters import Counter
from msrl_jax.fragments.progress import Progress, parameter_age, parameter_version


def wrapped(agent: Agent, *, init: Callable[..., Any], iteration: Callable[..., Any], axes: Any) -> Agent:
    """An agent whose state holds that of another one in its field `inner`, and which acts like it.

    Args:
      agent: the other one.
      init: `key -> state`.
      iteration: the new iteration.
      axes: the logical axes of the state.

    Returns:
      The agent.
    """
    within = lambda f: None if f is None else lambda state, *args: f(state.inner, *args)  # noqa: E731
    new = {"act": within(agent.act), "probabilities": within(agent.probabilities)}
    return dataclasses.replace(agent, init=init, iteration=iteration, axes=axes, **new)


class Counted(NamedTuple):
    """The state of a run with its count."""

    inner: Any  # the state of the agent
    count: Counter  # iterations done  # pyright: ignore[reportIncompatibleMethodOverride]
    version: Any  # iterations done by learners, modulo 2**32, uint32 []; () if nothing acts


@fragment(role="learner", name="count")
def _next_version(count: Counter, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next version of the parameters, and the age of those that acted."""
    return count.low + 1, parameter_age(count, seen)


def counted(agent: Agent, iterations: int | None = None) -> Agent:
    """Counts the iterations of an agent, and tells them to it: `iteration(state) -> (state, metrics)`, ready to compile.

    The count depends on no fragment, so every placement counts for itself, and nobody waits for it.

    Args:
      agent: the agent.
      iterations: iterations of the whole run, over which schedules fall or rise; None if that is not known.

    Returns:
      The agent, with the state `Counted`. Its metrics have the age of the acting parameters, `parameter_age`.
    """
    acts = agent.unit == "environment steps"

    def init(key: jax.Array) -> Counted:
        return Counted(agent.init(key), counters.counter(), jnp.uint32(0) if acts else ())

    def iteration(state: Counted) -> tuple[Counted, Metrics]:
        inner, metrics = agent.iteration(state.inner, Progress(state.count, iterations, state.version))
        version, age = state.version, {}
        if acts:
            version, age["parameter_age"] = _next_version(state.count, parameter_version(state.version))
        return Counted(inner, counters.advance(state.count), version), {**age, **metrics}

    return wrapped(agent, init=init, iteration=iteration, axes=Counted(agent.axes, P(), P()))  # type: ignore[arg-type]
