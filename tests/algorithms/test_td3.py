"""TD3 and DDPG: updates against implementations written out here, what devices exchange, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.algorithms import C51
from tests.support.distributional import V_MAX, V_MIN, N, plain_projection
from tests.support.off_policy import B, adam, assert_close, build, counting, drawn, one, plain_mlp, start, wide
from tests.support.random_walk import RandomWalk


def plain_target(state, batch, noise, num_critics):
    action = np.tanh(plain_mlp(state.target_params["actor"], batch.next_obs))
    action = np.clip(action + np.clip(noise, -0.3, 0.3), -1, 1)
    inputs = np.concatenate([batch.next_obs, action], -1)
    q = np.stack([plain_mlp(one(state.target_params["critic"], i), inputs)[:, 0] for i in range(num_critics)])
    return batch.reward + batch.discount * q.min(0)


@jax.jit
@jax.value_and_grad
def critic_slope(critic, inputs, target):
    q = [plain_mlp(one(critic, i), inputs)[:, 0] for i in range(len(jax.tree.leaves(critic)[0]))]
    return sum(((x - target) ** 2).mean() / 2 for x in q)


@jax.jit
@jax.grad
def actor_slope(actor, critic, obs):
    action = jnp.tanh(plain_mlp(actor, obs))
    return -plain_mlp(one(critic, 0), jnp.concatenate([obs, action], -1)).mean()


@pytest.mark.parametrize("name", ["td3", pytest.param("ddpg", marks=pytest.mark.slow)])
@pytest.mark.long
def test_updates_equal_an_independent_implementation(name):
    """The actor and the targets of TD3 move in every third update: in the first one of these two."""
    options = {"policy_noise": 0.4, "noise_clip": 0.3, "policy_period": 3} if name == "td3" else {"max_grad_norm": 0.2}
    agent, config = build(name, RandomWalk(True), num_updates=1, anneal_learning_rate=True, **options)
    iterate = counting(agent, 20)
    state = start(agent, 6, iterate)
    for done in (6, 7):
        after, metrics = iterate(state, done)
        compare_update(name, config, state, after, metrics, 1 - done / 20, moves=name == "ddpg" or done == 6)
        state = after


def compare_update(name, config, state, after, metrics, left, moves):
    batch, key = drawn(RandomWalk(True), config, state, after)
    num_critics, noise = 1, 0.0
    if name == "td3":
        num_critics, noise = 2, 0.4 * np.stack([jax.random.normal(k, (2,)) for k in jax.random.split(key, B)])
    target = plain_target(state, batch, noise, num_critics)
    value, gradient = critic_slope(state.params["critic"], np.concatenate([batch.obs, batch.action], -1), target)
    np.testing.assert_allclose(metrics["critic_loss"].total, value, rtol=1e-4)
    assert_close(after.params["critic"], adam(state.params["critic"], state.opt_state["critic"], gradient, config, left))
    if not moves:
        for a, b in zip(
            *(jax.tree.leaves((s.params["actor"], s.opt_state["actor"], s.target_params)) for s in (state, after)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        return
    gradient = actor_slope(state.params["actor"], state.params["critic"], batch.obs)
    assert_close(after.params["actor"], adam(state.params["actor"], state.opt_state["actor"], gradient, config, left))
    moved = jax.tree.map(lambda old, new: 0.995 * old + 0.005 * new, wide(state.target_params), wide(after.params))
    assert_close(after.target_params, moved)


@pytest.mark.slow
def test_an_update_with_probabilities_of_atoms_equals_an_independent_implementation():
    """As FastTD3: the target is that of the critic with the lower mean; the actor climbs the first critic's mean."""
    env, atoms = RandomWalk(True), np.linspace(V_MIN, V_MAX, N)
    agent, config = build("td3", env, returns=C51(V_MIN, V_MAX, N), num_updates=1, policy_noise=0.0, policy_period=1)
    iterate = counting(agent)
    state = start(agent, 6, iterate)
    after, metrics = iterate(state, 6)
    batch, _ = drawn(env, config, state, after)
    masses = lambda critic, *inputs: jax.nn.softmax(plain_mlp(critic, jnp.concatenate(inputs, -1)))
    next_action = jnp.tanh(plain_mlp(state.target_params["actor"], batch.next_obs))
    both = np.stack([masses(one(state.target_params["critic"], i), batch.next_obs, next_action) for i in range(2)])
    lowest = (both @ atoms).argmin(0)
    assert 0 < lowest.sum() < B
    target = np.stack([plain_projection(both[lowest[b], b], batch.reward[b], batch.discount[b]) for b in range(B)])
    known = np.where(target > 0, target * np.log(np.maximum(target, 1e-300)), 0).sum(-1).mean()

    def critic_loss(critic):
        found = [jnp.log(masses(one(critic, i), batch.obs, batch.action)) for i in range(2)]
        return sum(known - (target * x).sum(-1).mean() for x in found)

    def actor_loss(actor):
        action = jnp.tanh(plain_mlp(actor, batch.obs))
        return -(masses(one(state.params["critic"], 0), batch.obs, action) @ atoms).mean()

    for name, loss in {"critic": critic_loss, "actor": actor_loss}.items():
        value, gradient = jax.jit(jax.value_and_grad(loss))(state.params[name])
        np.testing.assert_allclose(metrics[f"{name}_loss"].total, value, rtol=1e-4, atol=1e-5)
        assert_close(after.params[name], adam(state.params[name], state.opt_state[name], gradient, config))


@pytest.mark.long
def test_exploration_adds_noise_of_the_declared_deviation():
    agent, _ = build("td3", RandomWalk(True), exploration_noise=0.2, max_exploration_noise=0.5)
    deviation = np.linspace(0.2, 0.5, 16)[:, None]
    iterate = counting(agent)
    state = start(agent, 2, iterate)  # random until then
    after, _ = iterate(state, 2)
    batch = np.asarray(after.replay.items[0])[:, 8:12], np.asarray(after.replay.items[1])[:, 8:12]
    obs, action = (np.moveaxis(x, 1, 0).reshape(4, 16, -1) for x in batch)
    keys = jax.vmap(lambda key: jax.random.split(key, 5), out_axes=1)(state.actor_keys)[1:]
    noise = jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))(keys)
    want = np.clip(np.tanh(plain_mlp(state.params["actor"], obs)) + deviation * noise, -1, 1)
    np.testing.assert_allclose(action, want, rtol=1e-4, atol=1e-5)
    greedy = agent.act(after, obs[0], None, ())[0]
    np.testing.assert_array_equal(agent.act(after, obs[0], jax.random.key(0), ())[0], greedy)
