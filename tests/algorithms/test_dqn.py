"""DQN and Ape-X DQN against a plain Python loop that spells out the order of events; their networks, options and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.algorithms.dqn import ApexDQNConfig, DQNConfig, make_buffer
from msrl_jax.algorithms.q_network import q_network
from msrl_jax.envs import Box, Discrete

from .random_walk import RandomWalk

T, E, K, B = 4, 8, 3, 16
SMALL = {
    "num_envs": E, "unroll_length": T, "num_updates": K, "batch_size": B, "hidden_sizes": (8, 6), "capacity": 320,
    "learning_starts": 64, "learning_rate": 0.01, "exploration_steps": 128,
}  # fmt: skip
PLAIN = {"target_period": 4, "tau": 1.0, "huber_delta": 1.0}
APEX = {"huber_delta": 0.5, "actor_period": 2, "total_steps": 400, "target_period": 1, "tau": 0.1}


def wide(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def plain_q(params, obs, dueling, xp):
    """The network written out."""
    p = params["params"]
    layer = lambda p, x: x @ p["kernel"] + p["bias"]  # noqa: E731
    relu = lambda p, x: xp.maximum(layer(p, x), 0)  # noqa: E731
    x = relu(p["torso"]["Dense_0"], obs)
    if not dueling:
        return layer(p["head"], relu(p["torso"]["Dense_1"], x))
    value = layer(p["value_head"], relu(p["value_stream"], x))
    advantage = layer(p["advantage_head"], relu(p["advantage_stream"], x))
    return value + advantage - advantage.mean(-1, keepdims=True)


def plain_act(params, obs, keys, steps, config):
    """Chance or the largest value, environment by environment."""
    values = plain_q(wide(params), np.asarray(obs, np.float64), config.dueling, np)
    actions = []
    for i, key in enumerate(keys):
        if config.exploration == "per_env":
            epsilon = config.base_epsilon ** (1 + 7 * i / (E - 1))
        else:
            epsilon = max(config.final_epsilon, 1 - (1 - config.final_epsilon) * steps / config.exploration_steps)
        whether, which = jax.random.split(key)
        by_chance = jax.random.uniform(whether) < (1 if steps < config.learning_starts else epsilon)
        actions.append(jax.random.randint(which, (), 0, 3) if by_chance else values[i].argmax())
    return np.array(actions, np.int32)


def plain_update(learner, batch, weight, count, config):
    """One step of Adam and of the target network; the errors that priorities follow from."""
    params, target_params, (mean, square, done) = learner
    e = jax.tree.map(np.asarray, batch)
    next_target = plain_q(wide(target_params), e.next_obs, config.dueling, np)
    chooser = plain_q(wide(params), e.next_obs, config.dueling, np) if config.double else next_target
    target = e.reward + e.discount * next_target[np.arange(B), chooser.argmax(-1)]

    d = config.huber_delta

    def loss(params):
        error = target - plain_q(params, e.obs, config.dueling, jnp)[np.arange(B), e.action]
        return (weight * jnp.where(abs(error) < d, error**2 / 2, d * (abs(error) - d / 2))).mean(), error

    gradient, error = jax.grad(loss, has_aux=True)(params)
    gradient = wide(gradient)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * min(1.0, config.max_grad_norm / norm), gradient)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, square, gradient)
    done += 1
    params = jax.tree.map(
        lambda p, m, s: np.float32(
            p - config.learning_rate * (m / (1 - 0.9**done)) / (np.sqrt(s / (1 - 0.999**done)) + config.adam_epsilon)
        ),
        params, mean, square,
    )  # fmt: skip
    if (count + 1) % config.target_period == 0:
        target_params = jax.tree.map(lambda t, p: np.float32((1 - config.tau) * t + config.tau * p), target_params, params)
    return (params, target_params, (mean, square, done)), np.asarray(error)


def plain_loop(agent, config, buffer, state, iterations, staleness):
    """What the actors do, what the buffer does and what the learner does, in their order. Yields every iteration's learner."""
    step, insert, rewrite, sample = (jax.jit(f) for f in (agent.env.step, buffer.insert, buffer.update, buffer.sample))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape), state.params)
    learner = (state.params, state.target_params, (zeros, zeros, 0))
    acting, history, ages = (state.params, 0), None, []
    history = [acting] * (staleness + 1)
    env_state, obs, keys, held, replay_key, pending = (
        state.env_state, state.obs, state.actor_keys, state.replay, state.replay_key, [],
    )  # fmt: skip
    for i in range(iterations):
        params, taken_at = history[0]
        ages.append(i - taken_at)
        split, rows = jax.vmap(lambda k: jax.random.split(k, T + 1))(keys), []
        for t in range(T):
            action = plain_act(params, obs, split[:, t + 1], (i * T + t) * E, config)
            env_state, seen = step(env_state, jnp.asarray(action))
            rows.append((obs, action, seen.reward, seen.terminated, seen.truncated, seen.final_obs))
            obs = seen.obs
        keys = split[:, 0]
        for indices, error in pending:
            held = rewrite(held, indices, error)
        held = insert(held, msrl.replay.Transition(*(jnp.stack(x) for x in zip(*rows, strict=True))))
        replay_key, *draws = jax.random.split(replay_key, K + 1)
        samples, pending = [sample(held, key) for key in draws], []
        if (i + 1) * T * E >= config.learning_starts:
            for k, (experience, indices, probability) in enumerate(samples):
                weight = np.ones(B)
                if config.prioritised:
                    beta = config.beta + (1 - config.beta) * min(1, i * T * E / config.total_steps)
                    p = np.asarray(probability, np.float64)
                    weight = (p.min() / p) ** beta
                learner, error = plain_update(learner, experience, weight, i * K + k, config)
                pending.append((indices, error))
        if (i + 1) % config.actor_period == 0:
            acting = (learner[0], i + 1)
        history = [*history[1:], acting]
    return learner, held, obs, ages


@pytest.mark.parametrize(
    ("name", "options", "staleness"),
    [("dqn", PLAIN, 0), ("apex_dqn", APEX, 0), ("apex_dqn", APEX, 2)],
    ids=["dqn", "apex", "stale-apex"],
)
def test_training_equals_a_plain_loop(name, options, staleness):
    """Act with the parameters there are, tell the buffer of past errors, insert, draw, learn; then the actors refresh."""
    algorithm = algorithms.get(name)
    config = algorithm.config(**SMALL | options)
    agent, buffer = algorithm.build(RandomWalk(), config), make_buffer(RandomWalk(), config)
    state = jax.jit(agent.init)(jax.random.key(0))
    policy = msrl.policies.SingleLearnerCoarse(actors=2, staleness=staleness)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[:3])
    after, metrics = program.run(state, 8, chunk=1)
    after = program.unwrap(after)
    (params, target_params, _), held, obs, ages = plain_loop(agent, config, buffer, state, 8, staleness)
    np.testing.assert_allclose(after.obs, obs, rtol=1e-5, atol=1e-6)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, after.params, params)
    jax.tree.map(close, after.target_params, target_params)
    jax.tree.map(close, after.replay, held)
    np.testing.assert_array_equal(metrics["parameter_age"], ages)
    assert max(ages) == staleness + config.actor_period - 1
    assert metrics["loss"].count[0] == 0 and metrics["loss"].count[-1] == K
    moved = [np.abs(np.asarray(a - b)).max() for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True)]
    assert min(moved) > 1e-3
