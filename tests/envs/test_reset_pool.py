"""`ResetPool`: whose first states copies get, in turns, written out; how much is computed; and the same run on more devices."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.envs.reset_pool import _SPARE
from tests.support.compiled import exchanges
from tests.support.leaving import Leaving

E, T = 8, 40


@dataclasses.dataclass(frozen=True)
class Dice:
    """Episodes begin with the least of seven numbers, and end by chance, some of them by truncation."""

    observation_space = envs.Box(0, 1, (1,))
    action_space = envs.Discrete(2)

    def reset(self, key):
        first = jnp.sort(jax.random.uniform(key, (7,)))[0]
        return first, first[None]

    def step(self, key, state, action):
        draw = jax.random.uniform(key, (2,))
        return state, draw[:1], state, draw[1] < 0.3, draw[1] > 0.8


def played(venv, key=0):
    """All time steps under random actions, and the last state."""

    def step(state, key):
        return venv.step(state, jax.random.randint(key, (venv.num_envs,), 0, 2))

    state, obs = venv.reset(jax.random.key(key))
    state, steps = jax.lax.scan(step, state, jax.random.split(jax.random.key(key + 1), T))
    return obs, steps, state


def test_with_a_ratio_of_one_the_run_is_the_one_without_a_pool():
    plain, pool = (jax.jit(lambda env=env: played(envs.vectorize(env, E)))() for env in (Dice(), envs.ResetPool(Dice(), 1)))
    chex.assert_trees_all_equal(plain, pool)
    assert plain[2].spares == ()


@pytest.mark.parametrize("ratio", [11, *(pytest.param(ratio, marks=pytest.mark.slow) for ratio in (2, 4, 8, 24))])
def test_copies_begin_with_their_spares_which_are_renewed_in_turns(ratio):
    env, group = Dice(), math.gcd(ratio, E)
    venv = envs.vectorize(envs.ResetPool(env, ratio), E)
    assert isinstance(venv, envs.Vectorized) and venv.ratio == ratio
    first, steps, state = jax.jit(lambda: played(venv))()
    reset, step = jax.jit(env.reset), jax.jit(env.step)
    starts = repeats = 0
    for i, copy_key in enumerate(jax.random.split(jax.random.key(0), E)):
        key, reset_key = jax.random.split(copy_key)
        inner, obs = reset(reset_key)
        spare, used = reset(jax.random.fold_in(copy_key, _SPARE)), False
        np.testing.assert_array_equal(obs, first[i])
        for t in range(T):
            key, step_key = jax.random.split(key)
            step_key, reset_key = jax.random.split(step_key)
            inner, obs, reward, terminated, truncated = step(step_key, inner, 0)
            np.testing.assert_array_equal(obs, steps.final_obs[t, i])
            np.testing.assert_array_equal(reward, steps.reward[t, i])
            if t % ratio == i % group * (ratio // group):
                spare, used = reset(reset_key), False
            if terminated or truncated:
                starts, repeats, used, (inner, obs) = starts + 1, repeats + used, True, spare
            np.testing.assert_array_equal(obs, steps.obs[t, i])
            np.testing.assert_array_equal(terminated, steps.terminated[t, i])
    emptied, metrics = venv.pop_episodes(state)
    mean = metrics["repeated_starts"]
    assert starts > 50 and repeats > 0 and (float(mean.total), float(mean.count)) == (repeats, starts)
    assert float(venv.pop_episodes(emptied)[1]["repeated_starts"].count) == 0


def sorted_shapes(jaxpr):
    """The shapes of what is sorted, which only resets do."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sort":
            yield eqn.invars[0].aval.shape
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from sorted_shapes(inner.jaxpr)


@pytest.mark.parametrize(("ratio", "num_envs", "resets"), [(1, 8, 8), (4, 8, 2), (16, 8, 1), (4, 6, 3), (16, 7, 7)])
def test_a_step_computes_one_reset_for_each_group(ratio, num_envs, resets):
    venv = envs.vectorize(envs.ResetPool(Dice(), ratio), num_envs)
    state, _ = jax.eval_shape(venv.reset, jax.random.key(0))
    jaxpr = jax.make_jaxpr(venv.step)(state, jnp.zeros(num_envs, jnp.int32)).jaxpr
    assert list(sorted_shapes(jaxpr)) == [(resets, 7)]


@pytest.mark.slow
def test_groups_on_devices_of_their_own_need_no_communication():
    venv = envs.vectorize(envs.ResetPool(Dice(), 2), 16)
    mesh = jax.make_mesh((8,), ("env",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("env"))
    state, _ = venv.reset(jax.random.key(0))
    action = jnp.zeros(16, jnp.int32)
    alone = jax.jit(venv.step)(state, action)
    step = jax.jit(venv.step, in_shardings=split, out_shardings=split)
    args = jax.device_put((state, action), split)
    assert not exchanges(step.lower(*args).compile())
    chex.assert_trees_all_close(step(*args)[1], alone[1], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ratio", [4, 48])
def test_training_is_the_same_under_another_policy_and_reports_repeated_starts(ratio):
    env = envs.TimeLimit(envs.ResetPool(Dice(), ratio), 9)
    small = {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (4,), "total_steps": 512, "progress": False}
    one, other = (
        msrl.train("ppo", env, policy=policy, **small) for policy in ("GPUOnly:num_devices=1", "MultiLearner:num_devices=4")
    )
    chex.assert_trees_all_close(one.state.params, other.state.params, rtol=1e-4, atol=1e-6)
    shares = np.asarray(one.history["repeated_starts"])
    assert np.all((shares > 0) & (shares < 1))


def test_what_cannot_be_pooled_is_refused():
    with pytest.raises(ValueError, match="ResetPool of Dice: ratio=0: use an integer of at least 1"):
        envs.ResetPool(Dice(), 0)
    with pytest.raises(TypeError, match="ResetPool needs a single-agent environment, and Leaving has several"):
        envs.ResetPool(Leaving())
