"""Agents for tests, made from the names of algorithms."""

import dataclasses

from msrl_jax import algorithms
from msrl_jax.algorithms import Progress, counted
from msrl_jax.configs.replacing import with_values
from msrl_jax.fragments.counters import counter


def still(agent):
    """The agent with `iteration(state)` at the start of a run, for what does not depend on the progress; its state is plain."""
    start = Progress(counter())
    return dataclasses.replace(agent, iteration=lambda state: agent.iteration(state, start))


def make_still(name, env, **fields):
    return still(algorithms.build(with_values(algorithms.get(name)(), fields), env))


def make_counted(name, env, iterations=None, **fields):
    return counted(algorithms.build(with_values(algorithms.get(name)(), fields), env), iterations)
