"""What all off-policy algorithms rely on: errors reach their windows, and the ratio of updates to steps is the declared one."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import counters, envs, replay
from msrl_jax.agents.agent import split_keys
from msrl_jax.agents.optimizers import make_optimizer
from msrl_jax.algorithms import Progress
from msrl_jax.loops import normalized
from msrl_jax.loops import off_policy as loop
from tests.support.off_policy import counting

E, T, K, B, CAPACITY, ALPHA, EPSILON, LEARNING_STARTS = 8, 3, 2, 16, 96, 0.6, 1e-6, 72


@pytest.fixture(scope="module")
def agent():
    """Q-learning with a linear function, from prioritized replay in 4 shards."""
    venv = envs.EpisodeStatistics(envs.vectorize(envs.make("CartPole-v1"), E))
    item = replay.Transition(jnp.zeros(4), jnp.int32(0), jnp.float32(0), jnp.bool_(0), jnp.bool_(0), jnp.zeros(4))
    buffer = replay.prioritized(
        item,
        capacity=CAPACITY,
        num_envs=E,
        unroll_length=T,
        batch_size=B,
        discount=0.9,
        shards=4,
        min_size=LEARNING_STARTS,
        alpha=ALPHA,
        epsilon=EPSILON,
        beta=0.5,
    )
    optimizer = make_optimizer(types.SimpleNamespace(optimizer="adam", max_grad_norm=10.0), epsilon=1e-8)
    config = types.SimpleNamespace(num_envs=E, unroll_length=T, num_updates=K)

    def gradients(params, target, e):
        def loss(params):
            q = jnp.take_along_axis(e.obs @ params, e.action[:, None], 1)[:, 0]
            error = e.reward + e.discount * (e.next_obs @ target).max(1) - q
            return (error**2).mean(), error

        return jax.grad(loss, has_aux=True)(params)

    def update(learner, batch):
        grads, error = gradients(learner.params, learner.target_params, batch.experience)
        rate = jnp.float32(1e-2)
        params, opt_state = loop.apply_if(batch.ready, optimizer, learner.params, learner.opt_state, grads, rate)
        stats = {"update": counters.to_float(batch.update)}
        return learner._replace(params=params, opt_state=opt_state), error, stats

    def iteration(state, progress):
        def step(before, keys):
            env_state, obs = before
            noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
            action = jnp.argmax(obs @ state.params + noise, 1).astype(jnp.int32)
            env_state, t = venv.step(env_state, action)
            return (env_state, t.obs), replay.Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs)

        actor_keys, keys = split_keys(state.actor_keys, T)
        (env_state, obs), items = jax.lax.scan(step, (state.env_state, state.obs), keys)
        held = buffer.insert(buffer.update(state.replay, state.pending.indices, state.pending.td_error), items)
        replay_key, sample, ready, _ = loop.draw(buffer, held, state.replay_key, (), progress, K)
        learner, key, pending, metrics = loop.learn_from(sample, ready, update, state.learner, state.key, progress)
        after = loop.OffPolicyState(*learner, key, (), actor_keys, held, replay_key, pending, env_state=env_state, obs=obs)
        return after, metrics

    def init(key):
        env_key, params_key, *keys = jax.random.split(key, 5)
        env_state, obs = venv.reset(env_key)
        params = jax.random.normal(params_key, (4, 2))
        begun = loop.initial_state(config, buffer, loop.Learner(params, params, optimizer.init(params)), *keys)
        return begun._replace(env_state=env_state, obs=obs)

    return types.SimpleNamespace(init=init, iteration=iteration)


@pytest.fixture(scope="module")
def states(agent):
    """The states before and after each of 10 iterations, and the metrics."""
    iterate, state = counting(agent), jax.jit(agent.init)(jax.random.key(0))
    found, metrics = [state], []
    for i in range(10):
        state, measured = iterate(state, i)
        found.append(state)
        metrics.append(jax.device_get(measured))
    return found, metrics


def test_errors_reach_their_own_windows(states):
    rows, per_shard, checked = CAPACITY // E, E // 4, 0
    for before, after in zip(states[0][3:-1], states[0][4:], strict=True):
        steps, owners = np.asarray(before.pending.indices.step), np.asarray(before.pending.indices.env)
        errors = np.asarray(before.pending.td_error, np.float64)
        leaves = np.asarray(after.replay.priorities.tree[0])
        for step, env in set(zip(steps.ravel().tolist(), owners.ravel().tolist(), strict=True)):
            if int(after.replay.added) - step > rows:
                continue  # overwritten by now
            same = (steps == step) & (owners == env)
            last = same.any(1).nonzero()[0].max()  # the last batch that it was in counts, and there the largest error
            expected = (np.abs(errors[last][same[last]]).max() + EPSILON) ** ALPHA
            found = leaves[env // per_shard, step % rows * per_shard + env % per_shard]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            checked += 1
    assert checked > 50


def test_the_ratio_of_updates_to_steps_is_met_exactly(states):
    """Once LEARNING_STARTS steps are held there are K updates for every T * E steps, and none before that."""
    steps = np.arange(11) * T * E
    updates = [int(state.opt_state[1][0].count) for state in states[0]]
    np.testing.assert_array_equal(updates, K * np.maximum(steps - LEARNING_STARTS + T * E, 0) // (T * E))
    counts = [float(m["update"].count) for m in states[1]]
    np.testing.assert_array_equal(counts, np.diff(updates))
    # Updates are counted from the first iteration on, whether they are made or not.
    numbers = [float(m["update"].total) for m in states[1][3:]]
    np.testing.assert_array_equal(numbers, [sum(K * i + k for k in range(K)) for i in range(3, 10)])


def test_errors_of_windows_with_absent_steps_do_not_reach_the_priorities():
    """Half of the environments answer no step; whatever the rule makes of their windows is no error."""
    item = replay.Transition(*[jnp.zeros(())] * 3, *[jnp.bool_(0)] * 2, jnp.zeros(()), valid=jnp.bool_(0))
    buffer = replay.prioritized(item, capacity=CAPACITY, num_envs=E, unroll_length=T, batch_size=B, discount=0.9, beta=0.5)
    items = jax.tree.map(lambda x: jnp.zeros((T, E), x.dtype), item)._replace(
        valid=jnp.broadcast_to(jnp.arange(E) % 2 > 0, (T, E))
    )

    def update(learner, batch):
        return learner, jnp.where(batch.weight > 0, 2.0, 1e6), {}

    @jax.jit
    def iterate(held, key):
        progress = Progress(counters.counter())
        key, sample, ready, _ = loop.draw(buffer, buffer.insert(held, items), key, (), progress, K)
        _, _, pending, _ = loop.learn_from(sample, ready, update, (), key, progress, may_be_invalid=buffer.may_be_invalid)
        return buffer.update(buffer.insert(held, items), pending.indices, pending.td_error), pending

    held, pending = iterate(buffer.init(), jax.random.key(0))
    is_absent = np.asarray(pending.indices.env) % 2 == 0
    assert 0 < is_absent.sum() < is_absent.size
    np.testing.assert_array_equal(pending.td_error, np.where(is_absent, 0.0, 2.0))
    assert np.asarray(held.priorities.largest).max() < 3


def test_no_update_and_no_pending_error_before_learning_starts(states):
    first, second = states[0][0], states[0][2]
    np.testing.assert_array_equal(first.params, second.params)
    assert np.isnan(second.pending.td_error).all() and np.isfinite(states[0][3].pending.td_error).all()


@pytest.mark.parametrize("ready", [True, False])
def test_a_batch_counts_for_the_statistics_only_once_the_buffer_is_ready(ready):
    obs = np.random.default_rng(0).normal(3, 2, (6, 4)).astype(np.float32)
    step = replay.NStep(obs, jnp.zeros(6, int), jnp.zeros(6), jnp.zeros(6), obs + 1)
    before = normalized.initial_statistics(obs, normalize=True)
    after, seen = normalized.update_statistics(before, loop.Batch(step, None, None, None, jnp.bool_(ready)))
    mean, std = (obs.mean(0), obs.std(0)) if ready else (0, 1)
    np.testing.assert_allclose([after.mean, after.var], [np.broadcast_to(x, 4) for x in (mean, np.square(std))], rtol=1e-5)
    np.testing.assert_allclose(seen.obs, (obs - mean) / std, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(seen.next_obs, (obs + 1 - mean) / std, rtol=1e-4, atol=1e-5)
