"""Runs a training iteration under every policy, on several numbers of devices, and compares with plain `jax.jit`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import msrl_jax as msrl
from msrl_jax import policies
from tests.support.compare import assert_close, run_plain

ENVS = 8


class Where(NamedTuple):
    """A policy on the first `devices` devices."""

    policy: Any
    devices: int

    def __str__(self):
        return f"{type(self.policy).__name__}-{self.devices}"


def _on(devices: int) -> list[Where]:
    parts = 2 if devices == 4 else 1
    chosen = (
        policies.GPUOnly(),
        policies.MultiLearner(),
        policies.SingleLearnerCoarse(learners=parts),
        policies.SingleLearnerFine(learners=parts),
        policies.Environments(),
        policies.Central(shards=parts),
    )
    return [Where(policy, devices) for policy in chosen]


EVERYWHERE = [*_on(1), *_on(2), *_on(4)]
SEVERAL = [w for w in EVERYWHERE if w.devices == 4]


class Case(NamedTuple):
    """A training iteration.

    Attributes:
      iteration: the iteration.
      init: makes its state.
      axes: logical axes of the state.
      iterations: how many to run.
    """

    iteration: Callable
    init: Callable
    axes: Any = None
    iterations: int = 2


@functools.cache
def reference(case: Callable[[], Case]):
    """The state and the metrics of a case under plain `jax.jit`."""
    iteration, init, _, iterations = case()
    return run_plain(iteration, init(), iterations)


def assert_same_run(case: Callable[[], Case], where: Where, **run: Any) -> msrl.Program:
    """Asserts that the program of a policy gives the state and the metrics that plain `jax.jit` gives."""
    iteration, init, axes, iterations = case()
    state = init()
    program = msrl.compile(iteration, state, policy=where.policy, axes=axes, devices=jax.devices()[: where.devices])
    found = program.run(state, iterations, **run)
    assert_close(found, reference(case), rtol=2e-5, atol=2e-5)
    return program
