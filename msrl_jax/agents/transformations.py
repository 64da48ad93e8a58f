"""Transformations of agents: common code, and the transformations for schedules and for counting iterations.

A transformation is a function from agent to agent. It has one state type, a NamedTuple that keeps the wrapped state in the
field `inner`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, Metrics
from msrl_jax.agents.schedules import ScheduleFunction, at
from msrl_jax.fragments import counters, fragment
from msrl_jax.fragments.counters import Counter
from msrl_jax.fragments.progress import Progress, parameter_age, parameter_version

# Exceptions that JAX raises if Python code needs the value of a traced array.
BRANCHES = (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError, jax.errors.TracerIntegerConversionError)


def wrapped(agent: Agent, *, init: Callable[..., Any], iteration: Callable[..., Any], axes: Any) -> Agent:
    """Wraps an agent: keeps the wrapped state in the field `inner` of the new state, and acts like the wrapped agent.

    Args:
      agent: the agent to wrap.
      init: `key -> state`.
      iteration: the new iteration.
      axes: the logical axes of the state.

    Returns:
      The agent.
    """
    on_inner = lambda f: None if f is None else lambda state, *args: f(state.inner, *args)
    functions = {"act": on_inner(agent.act), "probabilities": on_inner(agent.probabilities)}
    return dataclasses.replace(agent, init=init, iteration=iteration, axes=axes, **functions)


class Scheduled(NamedTuple):
    """The state of an agent whose config has schedules."""

    inner: Any  # the state of the agent
    numbers: dict[str, jax.Array]  # the values of the last iteration, used for acting. shape=() each, float32


_NOTE = (
    "The program holds {}, which have schedules, as arrays. If the algorithm branches on such a field in Python or converts it "
    "to a Python number, use jnp.where instead, or declare the field with field and not with tunable."
)


def scheduled(build: Callable[[Mapping[str, Any]], Agent], schedules: Mapping[str, ScheduleFunction]) -> Agent:
    """Makes an agent whose config follows schedules: each iteration uses their current values.

    The values depend only on the iteration count, so every placement computes them itself, outside of an iteration's loops.

    Args:
      build: makes the agent from the values by name.
      schedules: functions of the progress, already checked.

    Returns:
      The agent; `build({})` without schedules.
    """
    if not schedules:
        return build({})
    first = {name: at(schedule, 0.0) for name, schedule in schedules.items()}
    agent = build(first)

    def init(key: jax.Array) -> Scheduled:
        return Scheduled(agent.init(key), {name: jnp.float32(x) for name, x in first.items()})

    def iteration(state: Scheduled, progress: Progress) -> tuple[Scheduled, Metrics]:
        if progress.total is None:
            raise ValueError(f"schedules of {', '.join(schedules)} need the length of the run: counted(agent, iterations)")
        numbers = {name: jnp.asarray(x(progress.fraction), jnp.float32) for name, x in schedules.items()}
        try:
            inner, metrics = build(numbers).iteration(state.inner, progress)
        except BRANCHES as error:
            error.add_note(_NOTE.format(", ".join(schedules)))
            raise
        return Scheduled(inner, numbers), metrics

    def call_inner(name: str) -> Callable[..., Any]:
        return lambda state, *args: getattr(build(state.numbers), name)(state.inner, *args)

    return dataclasses.replace(
        agent,
        init=init,
        iteration=iteration,
        axes=Scheduled(agent.axes, P()),  # type: ignore[arg-type]
        act=call_inner("act"),
        probabilities=None if agent.probabilities is None else call_inner("probabilities"),
    )


class Counted(NamedTuple):
    """The state of a run with its iteration count."""

    inner: Any  # the state of the agent
    count: Counter  # iterations done  # pyright: ignore[reportIncompatibleMethodOverride]
    version: Any  # iterations done by learners, modulo 2**32, uint32 []; () if nothing acts


@fragment(role="learner", name="count")
def _next_version(count: Counter, acting_version: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the next version of the parameters, and the age of the acting parameters."""
    return count.low + 1, parameter_age(count, acting_version)


def counted(agent: Agent, iterations: int | None = None) -> Agent:
    """Counts the iterations of an agent and passes the count to it: `iteration(state) -> (state, metrics)`, ready to compile.

    The count does not depend on fragments, so every placement counts independently, without communication.

    Args:
      agent: the agent.
      iterations: iterations of the whole run, for schedules; None if unknown.

    Returns:
      The agent, with the state `Counted`. Its metrics include the age of the acting parameters, `parameter_age`.
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
