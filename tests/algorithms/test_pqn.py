"""PQN: an iteration against an independent implementation, its epsilon, and what it refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from msrl_jax import algorithms, envs
from msrl_jax.algorithms import GRU, PQN, Annealed
from tests.support.off_policy import adam, assert_close, counting, start, wide
from tests.support.random_walk import RandomWalk
from tests.support.recurrent import plain_core

T, E, EPOCHS, MINIBATCHES, DONE = 8, 8, 2, 4, 5
CONFIG = PQN(
    num_envs=E,
    unroll_length=T,
    num_epochs=EPOCHS,
    num_minibatches=MINIBATCHES,
    hidden_sizes=(8, 6),
    learning_rate=0.01,
    exploration=Annealed(16 * T * E, 0.02),
    max_grad_norm=0.5,
    q_lambda=0.7,
    discount=0.9,
)


def plain_q(params, x, xp):
    """Two dense layers, each normalized, and a head: the values of three actions."""
    p = params["params"]
    for i in range(2):
        layer, norm = p["torso"][f"Dense_{i}"], p["torso"][f"LayerNorm_{i}"]
        x = x @ layer["kernel"] + layer["bias"]
        centered = x - x.mean(-1, keepdims=True)
        deviation = xp.sqrt((centered**2).mean(-1, keepdims=True) + 1e-6)
        x = xp.maximum(centered / deviation * norm["scale"] + norm["bias"], 0)
    return x @ p["head"]["kernel"] + p["head"]["bias"]


def plain_rollout(agent, state, steps):
    """Chance or the largest value, step by step. `[T, E]` each: obs, action, reward, terminated, truncated, last obs."""
    params, step = wide(state.params), jax.jit(agent.env.step)
    keys = jax.vmap(lambda k: jax.random.split(k, T + 1))(state.actor_keys)[:, 1:]
    env_state, obs, rows = state.env_state, state.obs, []
    for t in range(T):
        greedy = plain_q(params, np.asarray(obs, np.float64), np).argmax(-1)
        epsilon = 1 - 0.98 * min((steps + t * E) / CONFIG.exploration.steps, 1)
        whether, which = (jax.vmap(jax.random.split)(keys[:, t])[:, i] for i in range(2))
        by_chance = np.array([jax.random.uniform(k) < epsilon for k in whether])
        action = np.where(by_chance, [jax.random.randint(k, (), 0, 3) for k in which], greedy).astype(np.int32)
        env_state, seen = step(env_state, jnp.asarray(action))
        rows.append((obs, action, seen.reward, seen.terminated, seen.truncated, seen.final_obs))
        obs = seen.obs
    return obs, [np.stack(column) for column in zip(*rows, strict=True)]


def plain_targets(reward, terminated, truncated, successor):
    """Algorithm 1 of the paper, from the last step to the first: `r + discount * (lambda * target + (1 - lambda) * max Q)`."""
    targets = np.zeros((T, E))
    for t, e in np.ndindex(T, E):
        t = T - 1 - t
        cut = t == T - 1 or truncated[t, e]
        later = successor[t, e] if cut else 0.7 * targets[t + 1, e] + 0.3 * successor[t, e]
        targets[t, e] = reward[t, e] + (0 if terminated[t, e] else 0.9 * later)
    return targets


@pytest.mark.long
def test_an_iteration_equals_an_independent_implementation():
    agent = CONFIG.build(RandomWalk())
    iterate = counting(agent)
    state = start(agent, DONE, iterate)
    last_obs, (obs, action, reward, terminated, truncated, final_obs) = plain_rollout(agent, state, DONE * T * E)
    assert terminated.any() and (truncated & ~terminated).any()
    after, metrics = iterate(state, DONE)
    np.testing.assert_allclose(after.obs, last_obs, rtol=1e-5, atol=1e-6)
    successor = plain_q(wide(state.params), final_obs.astype(np.float64), np).max(-1)
    target = plain_targets(reward, terminated, truncated, successor)

    def loss(params, times):
        rows, columns = np.ix_(times, np.arange(E))
        taken = plain_q(params, obs[times], jnp)[np.arange(len(times))[:, None], columns, action[times]]
        return ((taken - np.float32(target[rows, columns])) ** 2).mean() / 2

    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01, eps=CONFIG.adam_epsilon))
    params, losses = state.params, []
    # Adam's moments are those of the run so far.
    opt_state = state.opt_state[:2]
    for key in jax.random.split(state.key, EPOCHS + 1)[1:]:
        for times in np.asarray(jax.random.permutation(key, T)).reshape(MINIBATCHES, -1):
            value, gradient = jax.value_and_grad(loss)(params, times)
            updates, opt_state = optimizer.update(gradient, opt_state)
            params = optax.apply_updates(params, updates)
            losses.append(value)
    assert_close(after.params, params)
    np.testing.assert_allclose(metrics["loss"], np.mean(losses), rtol=1e-4)


H = 5


def plain_recurrent_q(params, obs, begins, carry, xp):
    """A dense layer, a GRU and a head, along an unroll: the values of three actions, and the carries after every step."""
    layer, head = params["torso"]["params"]["Dense_0"], params["heads"]["params"]["head"]
    features = xp.maximum(obs @ layer["kernel"] + layer["bias"], 0)
    outputs, carries = plain_core("gru", params["core"], features, begins, carry, xp)
    return outputs @ head["kernel"] + head["bias"], carries


@pytest.mark.long
def test_an_iteration_with_a_core_equals_a_loop_along_unrolls():
    """Values depend on the episode so far, and the gradient flows back to the first step of the unroll."""
    config = dataclasses.replace(CONFIG, num_epochs=1, num_minibatches=1, hidden_sizes=(6,), layer_norm=False, core=GRU(H))
    agent = algorithms.build(config, RandomWalk())
    iterate = counting(agent)
    state = start(agent, DONE, iterate)
    # Parameters far from those at the start, so that much depends on the carry.
    keys = iter(jax.random.split(jax.random.key(1), 64))
    state = state._replace(params=jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), state.params))
    after, metrics = iterate(state, DONE)

    params, step, never = wide(state.params), jax.jit(agent.env.step), np.zeros((1, E), bool)
    step_keys = jax.vmap(lambda k: jax.random.split(k, T + 1))(state.actor_keys)[:, 1:]
    env_state, obs, carry, rows = state.env_state, state.obs, wide(state.carry), []
    for t in range(T):
        values, carries = plain_recurrent_q(params, np.asarray(obs, np.float64)[None], never, carry, np)
        epsilon = 1 - 0.98 * min((DONE * T * E + t * E) / config.exploration.steps, 1)
        whether, which = (jax.vmap(jax.random.split)(step_keys[:, t])[:, i] for i in range(2))
        by_chance = np.array([jax.random.uniform(k) < epsilon for k in whether])
        action = np.where(by_chance, [jax.random.randint(k, (), 0, 3) for k in which], values[0].argmax(-1)).astype(np.int32)
        env_state, seen = step(env_state, jnp.asarray(action))
        carry = tuple(x[0] for x in carries)
        later = plain_recurrent_q(params, np.asarray(seen.final_obs, np.float64)[None], never, carry, np)[0][0].max(-1)
        rows.append((obs, action, seen.reward, seen.terminated, seen.truncated, later))
        ended = np.asarray(seen.terminated | seen.truncated)
        obs, carry = seen.obs, tuple(np.where(ended[:, None], 0, x) for x in carry)
    obs, action, reward, terminated, truncated, successor = (np.stack(column) for column in zip(*rows, strict=True))
    assert terminated.any() and (truncated & ~terminated).any()
    assert_close(after.carry, carry)
    target = plain_targets(reward, terminated, truncated, successor)
    begins = np.concatenate([never, (terminated | truncated)[:-1]])

    def loss(params):
        values, _ = plain_recurrent_q(params, obs, begins, state.carry, jnp)
        taken = jnp.take_along_axis(values, action[..., None], -1)[..., 0]
        return ((taken - np.float32(target)) ** 2).mean() / 2

    value, gradient = jax.jit(jax.value_and_grad(loss))(state.params)
    assert_close(after.params, adam(state.params, state.opt_state, gradient, config))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-4)


def test_groups_of_time_steps_and_finitely_many_actions_are_asked_for():
    with pytest.raises(ValueError, match=r"PQN\.unroll_length=10 cannot be split into num_minibatches=4 groups of time steps"):
        PQN(unroll_length=10, num_minibatches=4)
    with pytest.raises(ValueError, match=r"PQN\.num_envs=10 cannot be split into num_minibatches=4 groups of whole sequences"):
        PQN(num_envs=10, num_minibatches=4, core="gru")
    with pytest.raises(TypeError, match=r"PQN values each of a finite number of actions, got Box\("):
        PQN().build(envs.make("Pendulum-v1"))
