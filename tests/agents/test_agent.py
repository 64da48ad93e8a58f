"""Agents do what their attributes declare; learning rates against exact fractions, and steps of descent."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.agents.agent import annealed, innermost
from msrl_jax.algorithms import Progress
from msrl_jax.configs.names import all_fields
from msrl_jax.fragments.counters import counter
from tests.support.agents import make_still
from tests.support.many_agents import Homes
from tests.support.slow import mostly_slow
from tests.support.transitions import noise


def environment(name):
    return msrl.envs.make("Pendulum-v1" if name in ("ddpg", "td3") else "CartPole-v1")


@pytest.mark.slow
@pytest.mark.parametrize("name", msrl.algorithms.names())
def test_an_iteration_makes_the_declared_number_of_updates(name):
    algorithm = msrl.algorithms.get(name)
    fields = all_fields(algorithm)
    options = {"optimizer": "adam"} if "optimizer" in fields else {}  # it counts its updates
    if "replay.learning_starts" in fields:
        # The first iteration learns.
        options = {"num_envs": 16, "unroll_length": 4, "batch_size": 16, "replay.learning_starts": 64}
    if "trace_length" in fields and "hindsight" not in fields:  # which learns from windows without a core
        options |= {"burn_in": 0, "trace_length": 2, "replay.n_step": 1}
    if name == "muzero":
        options |= {"model_steps": 1, "replay.n_step": 1}
    env = Homes(num_agents=2) if algorithm.multi_agent else environment(name)
    if name == "alphazero":
        env = msrl.envs.make("pgx:tic_tac_toe")
    if algorithm.offline:
        options = {"data": noise(env)}
    if name == "teams":
        options = {"teams": {"walker": "ippo"}}
    agent = make_still(name, env, **options)
    # XLA drops all that the count does not need.
    optimizers = lambda state: state.teams if hasattr(state, "teams") else innermost(state).opt_state
    # Agents with networks of their own have one count each.
    found = lambda state: [count.max() for _, count in optax.tree.get_all_with_path(optimizers(state), "count")]
    counts = jax.jit(lambda key: found(agent.iteration(agent.with_data(agent.init(key)))[0]))
    assert max(counts(jax.random.key(0))) == agent.updates_per_iteration


def shapes_and_axes(name, size):
    """Shape and logical axes of every leaf of a state, where environments, shards and batches are multiples of a size."""
    fields = all_fields(msrl.algorithms.get(name)())
    wanted = {
        "num_envs": size,
        "unroll_length": 4,
        "batch_size": 4 * size,
        "replay.capacity": 64 * size,
        "replay.learning_starts": 64 * size,
        "replay.shards": size,
        "shards": size,
        "num_updates": 3,
        "hidden_sizes": (5,),
        "core.size": 6,
        "actor_period": 2,
        "replay.priorities": "prioritized",
    }
    options = {field: value for field, value in wanted.items() if field in fields}
    if "trace_length" in fields and "hindsight" not in fields:  # which learns from windows without a core
        options |= {"burn_in": 0, "trace_length": 2, "replay.n_step": 1}
    env = environment(name)
    if name in ("bc", "cql", "iql", "dqn", "sac"):
        options |= {"data": noise(env, rows=640 * size)}
    agent = make_still(name, env, **options)
    state = agent.with_data(jax.eval_shape(agent.init, jax.random.key(0)))
    is_spec = lambda x: isinstance(x, P)
    axes = jax.tree.map(lambda spec, part: jax.tree.map(lambda _: spec, part), agent.axes, state, is_leaf=is_spec)
    leaves, specs = jax.tree.leaves_with_path(state), jax.tree.leaves(axes, is_leaf=is_spec)
    return [(jax.tree_util.keystr(path), x.shape, tuple(spec)) for (path, x), spec in zip(leaves, specs, strict=True)]


@pytest.mark.parametrize("name", mostly_slow(["dqn", "r2d2", "muzero", "sac", "td3", "iql"], "dqn", "r2d2", "iql"))
def test_logical_axes_are_of_the_dimensions_that_grow(name):
    """A dimension that grows with environments and shards has a logical axis, and no other has one."""
    few, many = (shapes_and_axes(name, size) for size in (4, 8))
    for (path, small, axes), (_, large, _) in zip(few, many, strict=True):
        grows = [a != b for a, b in zip(small, large, strict=True)]
        named = [axis is not None for axis in axes] + [False] * (len(small) - len(axes))
        assert grows == named, path
    kinds = {axis for _, _, axes in few for axis in axes if axis}
    assert kinds == ({"shard"} if name == "iql" else {"env", "shard"})


@pytest.mark.parametrize("iteration", [0, 2**24 + 1, 2**31, 2**32 + 7, 10**10])
def test_the_learning_rate_falls_linearly_over_a_run_of_many_iterations(iteration):
    iterations = 5 * 10**9
    want = float(Fraction(3, 10**4) * max(Fraction(iterations - iteration, iterations), 0))
    got = jax.jit(lambda count: annealed(3e-4, Progress(count, iterations), True))(counter(iteration))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=3e-4 * 2**-22)
    assert got.dtype == jnp.float32 and not got.weak_type


@pytest.mark.parametrize(("total", "falls"), [(100, False), (None, True)])
def test_the_learning_rate_stays_without_annealing_or_a_length_of_the_run(total, falls):
    rate = annealed(0.5, Progress(counter(50), total), falls)
    assert rate == 0.5 and rate.dtype == jnp.float32 and not rate.weak_type
