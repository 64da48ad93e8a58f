"""Functions from agent to agent: they compose with transformations of one's own, whose states are kept like the algorithm's."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from msrl_jax.agents.agent import Agent, innermost
from msrl_jax.agents.transformations import counted, wrapped
from msrl_jax.run.experiment.members import learned_fields, with_learned_fields
from msrl_jax.run.experiment.skip_nonfinite import skip_nonfinite


class Own(NamedTuple):
    params: Any
    steps: Any
    env_state: Any


class Summed(NamedTuple):
    inner: Any
    total: Any


def climbing(bad):
    """An agent whose parameter rises by 1 in every iteration, but is nan after the `bad`-th."""

    def iteration(state, progress):
        params = jnp.where(state.steps == bad, jnp.nan, state.params + 1)
        return Own(params, state.steps + 1, ()), {}

    return Agent(
        init=lambda key: Own(jnp.zeros(()), jnp.int32(0), ()),
        iteration=iteration,
        act=lambda state, obs, key, carry: (state.params, carry),
        axes=Own(P(), P(), ()),
        steps_per_iteration=1,
        updates_per_iteration=1,
        env=None,
        unit="updates",
    )  # type: ignore[arg-type]


def summed(agent):
    """The agent with the sum of its parameters over all iterations, which acts by it."""

    def iteration(state, progress):
        inner, metrics = agent.iteration(state.inner, progress)
        return Summed(inner, state.total + inner.params), metrics

    def init(key):
        return Summed(agent.init(key), jnp.zeros(()))

    return wrapped(agent, init=init, iteration=iteration, axes=Summed(agent.axes, P()))


@pytest.mark.parametrize("bad", [0, 2])
def test_a_skipped_update_changes_no_state_of_a_transformation(bad):
    agent = counted(skip_nonfinite(summed(climbing(bad))))
    state, metrics = jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.iteration(s), state, length=5))(
        agent.init(jax.random.key(0))
    )
    params = total = 0
    for i in range(5):
        params, total = (params, total) if i == bad else (params + 1, total + params + 1)
    own = innermost(state)
    assert (float(own.params), float(state.inner.total), int(own.steps)) == (params, total, 5)
    np.testing.assert_array_equal(metrics["skipped_updates"], np.arange(5) == bad)


def test_what_is_learned_is_found_in_every_state_and_put_back():
    agent = summed(summed(climbing(-1)))
    state = agent.init(jax.random.key(0))
    found = learned_fields(agent, state)
    assert list(found) == [(0, "total"), (1, "total"), (2, "params")]
    new = with_learned_fields(state, dict(zip(found, (1.0, 2.0, 3.0), strict=True)))
    assert (new.total, new.inner.total, new.inner.inner.params, int(new.inner.inner.steps)) == (1.0, 2.0, 3.0, 0)
