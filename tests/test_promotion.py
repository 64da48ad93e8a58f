"""Parts that people call on their own promote no dtypes implicitly: they trace under JAX's strict promotion."""

import jax
import jax.numpy as jnp
import pytest

from msrl_jax import algorithms, envs
from msrl_jax.losses.quantiles import quantile_huber_loss
from msrl_jax.replay import buffers, sum_tree
from tests.support.corridor import Corridor

FLAGS = jnp.zeros((3, 2), bool)


def statistics():
    """A step of environments, with the statistics of their episodes."""
    venv = envs.EpisodeStatistics(envs.vectorize(Corridor(), 2))
    state, _ = venv.reset(jax.random.key(0))
    return venv.pop_episodes(venv.step(state, jnp.zeros(2, jnp.int32))[0])


def unrolled(core):
    """What a core computes in three steps of two environments."""
    core = core.make(3)
    params, carry = core.init(jax.random.key(0), 3), core.initial_carry((2,))
    return core.unroll(params, jnp.zeros((3, 2, 3)), FLAGS, carry)


def implicit_quantiles():
    """The parameters of such a network."""
    with jax.numpy_dtype_promotion("standard"):  # building an agent is refused otherwise
        agent = algorithms.build(algorithms.DQN(returns="iqn", num_envs=2, hidden_sizes=(4,)), Corridor())
    return agent.init(jax.random.key(0))


PARTS = {
    "quantiles": lambda: quantile_huber_loss(jnp.zeros(4), jnp.zeros(3)),
    "sums of rewards": lambda: buffers.fold(jnp.zeros((3, 2)), FLAGS, FLAGS, 0.9),
    "sum tree": lambda: sum_tree.draw(sum_tree.init(64), jax.random.key(0), 8),
    "statistics": statistics,
    "lru": lambda: unrolled(algorithms.LRU(4)),
    "implicit quantiles": implicit_quantiles,
}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_no_dtype_is_promoted_implicitly(part):
    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(part)
