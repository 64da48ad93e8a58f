"""What all off-policy algorithms rely on: errors reach their windows, and the ratio of updates to steps is the declared one."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import counters, envs, replay
from msrl_jax.algorithms import Progress
from msrl_jax.algorithms.loops import off_policy
from msrl_jax.algorithms.optimizers import make_optimizer
from tests.support.off_policy import counting

E, T, K, B, CAPACITY, ALPHA, EPSILON, LEARNING_STARTS = 8, 3, 2, 16, 96, 0.6, 1e-6, 72


@pytest.fixture(scope="module")
def agent():
    """Q-learning with a linear function, from prioritized replay in 4 shards."""
    venv = envs.EpisodeStatistics(envs.vectorize(envs.make("CartPole-v1"), E))
    item = replay.Transition(jnp.zeros(4), jnp.int32(0), jnp.float32(0), jnp.bool_(0), jnp.bool_(0), jnp.zeros(4))
    buffer = replay.prioritized(
        item, capacity=CAPACITY, num_envs=E, unroll_length=T, batch_size=B, discount=0.9, shards=4, min_size=LEARNING_STARTS,
        alpha=ALPHA, epsilon=EPSILON, beta=0.5,
    )  # fmt: skip
    optimizer = make_optimizer(types.SimpleNamespace(optimizer="adam", max_grad_norm=10.0), epsilon=1e-8)
    apply_update = off_policy.updater(optimizer)

    def explore(params, obs, keys, steps, carry):
        noise = jax.vmap(lambda key: jax.random.normal(key, (2,)))(keys)
        return jnp.argmax(obs @ params + noise, 1).astype(jnp.int32), carry

    @msrl.fragment(role="learner")
    def gradients(params, target, e):
        def loss(params):
            q = jnp.take_along_axis(e.obs @ params, e.action[:, None], 1)[:, 0]
            error = e.reward + e.discount * (e.next_obs @ target).max(1) - q
            return (error**2).mean(), error

        return jax.grad(loss, has_aux=True)(params)

    def update(learner, batch, progress):
        grads, error = gradients(learner.params, learner.target_params, batch.experience)
        params, opt_state = apply_update(learner.params, learner.opt_state, grads, jnp.float32(1e-2), batch.ready)
        stats = {"update": counters.to_float(batch.update)}
        return off_policy.Learner(params, learner.target_params, opt_state), error, stats

    def init(key, obs):
        params = jax.random.normal(key, (4, 2))
        return off_policy.Learner(params, params, optimizer.init(params))

    def choose_action(params, obs, key, carry):
        return (obs @ params).argmax(1), carry

    rule = off_policy.Rule(init, update, choose_action)
    config = types.SimpleNamespace(unroll_length=T, num_updates=K)
    return off_policy.off_policy_agent(config, venv, buffer, rule, explore)


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


def test_the_ratio_of_updates_to_steps_is_met_exactly(agent, states):
    """Once LEARNING_STARTS steps are held there are K updates for every T * E steps, and none before that."""
    steps = np.arange(11) * T * E
    updates = [int(state.opt_state[1][0].count) for state in states[0]]
    np.testing.assert_array_equal(updates, K * np.maximum(steps - LEARNING_STARTS + T * E, 0) // (T * E))
    assert agent.steps_per_iteration == T * E and agent.updates_per_iteration == K
    counts = [float(m["update"].count) for m in states[1]]
    np.testing.assert_array_equal(counts, np.diff(updates))
    # Updates are counted from the first iteration on, whether they are made or not.
    numbers = [float(m["update"].total) for m in states[1][3:]]
    np.testing.assert_array_equal(numbers, [sum(K * i + k for k in range(K)) for i in range(3, 10)])


def test_errors_of_windows_with_absent_steps_do_not_reach_the_priorities():
    """Half of the environments answer no step; whatever the rule makes of their windows is no error."""
    item = replay.Transition(*[jnp.zeros(())] * 3, *[jnp.bool_(0)] * 2, jnp.zeros(()), present=jnp.bool_(0))
    buffer = replay.prioritized(item, capacity=CAPACITY, num_envs=E, unroll_length=T, batch_size=B, discount=0.9, beta=0.5)
    learner = off_policy.Learner(jnp.zeros(()), (), ())

    def update(learner, batch, progress):
        return learner, jnp.where(batch.weight > 0, 2.0, 1e6), {}

    rule = off_policy.Rule(lambda key, obs: learner, update, lambda *_: None)
    config = types.SimpleNamespace(unroll_length=T, num_updates=K)
    replaying = off_policy.replaying(config, buffer, rule, E)
    state = replaying.init(*jax.random.split(jax.random.key(0), 4), jnp.zeros(E))
    items = jax.tree.map(lambda x: jnp.zeros((T, E), x.dtype), item)._replace(
        present=jnp.broadcast_to(jnp.arange(E) % 2 > 0, (T, E))
    )
    for i in range(2):
        state, _ = jax.jit(replaying.finish)(state, items, Progress(counters.counter(i)))
        is_absent = np.asarray(state.pending.indices.env) % 2 == 0
        assert 0 < is_absent.sum() < is_absent.size
        np.testing.assert_array_equal(state.pending.td_error, np.where(is_absent, 0.0, 2.0))
    assert np.asarray(state.replay.priorities.largest).max() < 3


def test_no_update_and_no_pending_error_before_learning_starts(states):
    first, second = states[0][0], states[0][2]
    np.testing.assert_array_equal(first.params, second.params)
    assert np.isnan(second.pending.td_error).all() and np.isfinite(states[0][3].pending.td_error).all()
