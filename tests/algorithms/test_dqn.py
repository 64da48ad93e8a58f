"""DQN and Ape-X DQN against a plain Python loop that spells out the order of events; their networks, options and errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, counters, envs
from msrl_jax.algorithms import C51, DQN, QR, Double, PerEnv, counted
from msrl_jax.envs import Box, Discrete
from msrl_jax.loops.replay_buffers import n_step_buffer
from msrl_jax.networks.q_network import q_network
from msrl_jax.networks.torso import make_torso
from tests.support import off_policy as reference
from tests.support.distributional import V_MAX, V_MIN, N, plain_projection
from tests.support.off_policy import plain_q
from tests.support.random_walk import RandomWalk

T, E, K, B = 4, 8, 3, 16
SMALL = {
    "num_envs": E,
    "unroll_length": T,
    "num_updates": K,
    "batch_size": B,
    "hidden_sizes": (8, 6),
    "replay.capacity": 320,
    "replay.learning_starts": 64,
    "learning_rate": 0.01,
}
PLAIN = {"exploration.steps": 128, "target_period": 4, "tau": 1.0, "returns.huber_delta": 1.0}
APEX = {"returns.huber_delta": 0.5, "actor_period": 2, "target_period": 1, "tau": 0.1}
TOTAL = {"dqn": None, "apex_dqn": 13}  # iterations of the run


def wide(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def plain_act(params, obs, keys, steps, config):
    """Chance or the largest value, environment by environment."""
    values = plain_q(wide(params), np.asarray(obs, np.float64), config.dueling, np)
    actions = []
    for i, key in enumerate(keys):
        if isinstance(config.exploration, PerEnv):
            epsilon = config.exploration.base ** (1 + 7 * i / (E - 1))
        else:
            final = config.exploration.final
            epsilon = max(final, 1 - (1 - final) * steps / config.exploration.steps)
        whether, which = jax.random.split(key)
        by_chance = jax.random.uniform(whether) < (1 if steps < config.replay.learning_starts else epsilon)
        actions.append(jax.random.randint(which, (), 0, 3) if by_chance else values[i].argmax())
    return np.array(actions, np.int32)


def plain_update(learner, batch, weight, count, config, total):
    """One step of Adam and of the target network; the errors that priorities follow from."""
    params, target_params, (mean, square, done) = learner
    e = jax.tree.map(np.asarray, batch)
    next_target = plain_q(wide(target_params), e.next_obs, config.dueling, np)
    chooser = plain_q(wide(params), e.next_obs, config.dueling, np) if config.target == Double() else next_target
    target = e.reward + e.discount * next_target[np.arange(B), chooser.argmax(-1)]

    gradient, error = plain_slope(params, e.obs, e.action, target, weight, config)
    gradient = wide(gradient)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * min(1.0, config.max_grad_norm / norm), gradient)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g**2, square, gradient)
    done += 1
    left = 1 if total is None else 1 - count // K / total
    params = jax.tree.map(
        lambda p, m, s: np.float32(
            p - config.learning_rate * left * (m / (1 - 0.9**done)) / (np.sqrt(s / (1 - 0.999**done)) + config.adam_epsilon)
        ),
        params,
        mean,
        square,
    )
    if (count + 1) % config.target_period == 0:
        target_params = jax.tree.map(lambda t, p: np.float32((1 - config.tau) * t + config.tau * p), target_params, params)
    return (params, target_params, (mean, square, done)), np.asarray(error)


@jax.jit
@functools.partial(jax.grad, has_aux=True)
def plain_slope(params, obs, action, target, weight, config):
    d, error = config.returns.huber_delta, target - plain_q(params, obs, config.dueling, jnp)[np.arange(B), action]
    return (weight * jnp.where(abs(error) < d, error**2 / 2, d * (abs(error) - d / 2))).mean(), error


def plain_loop(agent, config, buffer, state, iterations, staleness, total):
    """The work of actors, buffer and learner, in order. Yields the learner of every iteration."""
    step, insert, rewrite, sample = (jax.jit(f) for f in (agent.env.step, buffer.insert, buffer.update, buffer.sample))
    zeros = jax.tree.map(lambda x: np.zeros(x.shape), state.params)
    learner = (state.params, state.target_params, (zeros, zeros, 0))
    acting, history, ages = (state.params, 0), None, []
    history = [acting] * (staleness + 1)
    env_state, obs, keys, held, replay_key, pending = (
        state.env_state,
        state.obs,
        state.actor_keys,
        state.replay,
        state.replay_key,
        [],
    )
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
        if (i + 1) * T * E >= config.replay.learning_starts:
            for k, (experience, indices, probability, _) in enumerate(samples):
                weight = np.ones(B)
                if config.replay.priorities:
                    beta = config.replay.priorities.beta
                    beta = beta + (1 - beta) * i / total
                    p = np.asarray(probability, np.float64)
                    weight = (p.min() / p) ** beta
                learner, error = plain_update(learner, experience, weight, i * K + k, config, total)
                pending.append((indices, error))
        if (i + 1) % config.actor_period == 0:
            acting = (learner[0], i + 1)
        history = [*history[1:], acting]
    return learner, held, obs, ages


@pytest.mark.parametrize(
    ("name", "options", "staleness"),
    [("dqn", PLAIN, 0), *(pytest.param("apex_dqn", APEX, delay, marks=pytest.mark.slow) for delay in (0, 2))],
    ids=["dqn", "apex", "stale-apex"],
)
def test_training_equals_a_plain_loop(name, options, staleness):
    """Act with the parameters there are, tell the buffer of past errors, insert, draw, learn; then the actors refresh."""
    config = algorithms.make(name, SMALL | options)
    agent, buffer = counted(config.build(RandomWalk()), TOTAL[name]), n_step_buffer(RandomWalk(), config)
    state = jax.jit(agent.init)(jax.random.key(0))
    policy = msrl.policies.SingleLearnerCoarse(actors=2, staleness=staleness)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[:3])
    after, metrics = program.run(state, 8, chunk=1)
    state, after = state.inner, program.unwrap(after).inner
    (params, target_params, _), held, obs, ages = plain_loop(agent, config, buffer, state, 8, staleness, TOTAL[name])
    np.testing.assert_allclose(after.obs, obs, rtol=1e-5, atol=1e-6)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, after.params, params)
    jax.tree.map(close, after.target_params, target_params)
    jax.tree.map(close, after.replay, held)
    np.testing.assert_array_equal(metrics["parameter_age"], ages)
    assert max(ages) == staleness + config.actor_period - 1
    assert metrics["loss"].count[0] == 0 and metrics["loss"].count[-1] == K
    moved = [np.abs(np.asarray(a - b)).max() for a, b in zip(*map(jax.tree.leaves, (after.params, state.params)), strict=True)]
    assert min(moved) > 1e-3


@pytest.mark.parametrize(("obs_shape", "hidden_sizes"), [((5,), (8,)), ((6, 6, 2), (8, 6))], ids=["vector", "image"])
def test_advantages_of_a_dueling_network_are_relative(obs_shape, hidden_sizes):
    """The mean over the actions equals the output of the value stream, for any constant added to all advantages."""
    config = DQN(hidden_sizes=hidden_sizes, activation="relu")
    network = q_network(make_torso(Box(0.0, 1.0, obs_shape), config), Discrete(4), dueling=True, num_outputs=3)
    obs = jnp.ones((2, *obs_shape))
    params = network.init(jax.random.key(0), obs)
    outputs = network.apply(params, obs)
    assert outputs.shape == (2, 4, 3)
    head = params["params"]["advantage_head"]
    shifted = {"params": params["params"] | {"advantage_head": head | {"bias": head["bias"] + jnp.tile(jnp.arange(3.0), 4)}}}
    np.testing.assert_allclose(network.apply(shifted, obs), outputs, atol=1e-6)
    raised = {"params": params["params"] | {"value_head": params["params"]["value_head"] | {"bias": jnp.arange(3.0)}}}
    np.testing.assert_allclose(network.apply(raised, obs), outputs + jnp.arange(3.0), atol=1e-6)


def plain_distribution_loss(params, batch, weight, best, next_target, distribution):
    """Losses and errors of what is predicted for the actions taken, given the target network's outputs."""
    rows = np.arange(len(best))
    taken = plain_q(params, batch.obs, False, jnp).reshape(len(best), 3, N)[rows, batch.action]
    if distribution == "c51":
        following = zip(next_target[rows, best], batch.reward, batch.discount, strict=True)
        masses = np.stack([plain_projection(*row) for row in following])
        known = np.where(masses > 0, masses * np.log(np.maximum(masses, 1e-30)), 0).sum(-1)
        losses = known - (masses * (taken - jnp.log(jnp.exp(taken).sum(-1, keepdims=True)))).sum(-1)
        return (weight * losses).mean(), losses
    target = batch.reward[:, None] + batch.discount[:, None] * next_target[rows, best]
    error = target[:, None] - taken[:, :, None]
    below = jnp.abs((np.arange(N) + 0.5)[:, None] / N - (error < 0))
    losses = below * jnp.where(abs(error) < 1, error**2 / 2, abs(error) - 0.5)
    return (weight * losses.mean(2).sum(1)).mean(), target.mean(-1) - taken.mean(-1)


@pytest.mark.long
@pytest.mark.parametrize("distribution", ["c51", pytest.param("qr", marks=pytest.mark.slow)])
def test_an_update_of_distributions_equals_an_independent_implementation(distribution):
    """The online network's means choose the action; its distribution is the target network's."""
    returns = {"c51": C51(V_MIN, V_MAX, N), "qr": QR(N)}[distribution]
    moving = {"target": "double", "tau": 0.1, "target_period": 1, "replay.n_step": 2, "num_updates": 1, "learning_rate": 0.03}
    moving |= {"replay.priorities": "prioritized:1.0,0.5"}
    agent, config = reference.build("dqn", RandomWalk(), returns=returns, **moving)
    iterate = reference.counting(agent)
    state = reference.start(agent, 8, iterate)
    state = state._replace(target_params=jax.tree.map(jnp.negative, state.params))  # it would choose otherwise
    after, _ = iterate(state, 8)
    batch, _ = reference.drawn(RandomWalk(), config, state, after)
    drawn = reference.sampler(RandomWalk(), config)(after.replay, jax.random.split(state.replay_key, 2)[1])
    weight = (drawn.probability.min() / drawn.probability) ** 0.5
    assert (batch.discount == 0).any() and (batch.discount > 0).any() and weight.min() < 0.9 * weight.max()
    online, target = (
        plain_q(wide(params), batch.next_obs, False, np).reshape(-1, 3, N) for params in (state.params, state.target_params)
    )
    values, others = online.mean(-1), target.mean(-1)
    if distribution == "c51":
        online, target = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (online, target))
        values, others = (x @ np.linspace(V_MIN, V_MAX, N) for x in (online, target))
    assert (values.argmax(-1) != others.argmax(-1)).any()
    loss = lambda params: plain_distribution_loss(params, batch, weight, values.argmax(-1), target, distribution)
    gradient, error = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    reference.assert_close(after.params, reference.adam(state.params, state.opt_state, gradient, config))
    np.testing.assert_allclose(after.pending.td_error[0], error, rtol=1e-4, atol=1e-5)


def test_what_a_codec_cannot_hold_is_counted():
    agent = counted(algorithms.make(DQN, SMALL | {"replay.storage": "uint8", "num_updates": 1}).build(RandomWalk()))
    lost = jax.jit(lambda key: agent.iteration(agent.init(key))[1]["replay_lost"])  # XLA drops all the rest
    assert lost(jax.random.key(0)) == T * E  # positions are no whole numbers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 100_000}, r"fewer than batch_size=100000; use a capacity of at least 100032, or smaller batches"),
        ({"replay.learning_starts": 100}, r"learning_starts=100: a batch of 128 .* needs 128 steps"),
        ({"replay.learning_starts": 60_000}, r"learning_starts=60000: .* the buffer holds 19968; use a number between these"),
        ({"replay.capacity": 10**9, "replay.storage": "bfloat16"}, r"takes [0-9,]+ bytes, but .* use capacity=\d+ or less"),
        ({"replay.shards": 3}, "shards=3 does not divide both num_envs=16 and batch_size=128"),
    ],
)
def test_a_buffer_that_does_not_fit_is_refused_before_anything_compiles(options, message):
    with pytest.raises(ValueError, match=message) as error:
        algorithms.make(DQN, options).build(envs.make("CartPole-v1"))
    assert "\n" not in str(error.value)


def test_continuous_actions_are_refused_with_a_remedy():
    with pytest.raises(TypeError, match=r"DQN values each of a finite number of actions, got Box\(.* use .*ppo") as error:
        DQN().build(envs.make("Pendulum-v1"))
    one, several = re.findall(r"use (.*) \(of several agents: (.*)\)$", str(error.value))[0]
    for name in [*one.split(", "), *several.split(", ")]:
        assert "bounded" in algorithms.get(name).actions
    with pytest.raises(ValueError, match=r"ApexDQN has no field 'core'; pqn, r2d2 have it"):
        algorithms.make("apex_dqn", {"core": "gru"})


@pytest.fixture(scope="module")
def periodic():
    """An agent whose target and whose actors follow every third update, and a state that is about to learn."""
    agent = algorithms.make(DQN, SMALL | {"num_updates": 1, "target_period": 3, "tau": 1.0, "actor_period": 3}).build(
        RandomWalk()
    )
    iterate = reference.counting(agent)
    return iterate, reference.start(agent, 3, iterate)


@pytest.mark.parametrize("done", [0, 2, 2**24, 2**31, 2**32 - 1, 10**13])
def test_periods_are_kept_where_counters_would_wrap(periodic, done):
    iterate, state = periodic
    taken_at = counters.counter(max(done - 2, 0))
    state = state._replace(acting_params=(state.acting_params[0], taken_at))
    after, metrics = iterate(state, done)
    assert metrics["parameter_age"] == min(done, 2)
    same = lambda a, b: all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
    assert not same(after.params, state.params)
    due = (done + 1) % 3 == 0
    assert same(after.target_params, after.params if due else state.target_params)
    assert same(after.acting_params[0], after.params if due else state.acting_params[0])
    assert counters.to_int(after.acting_params[1]) == (done + 1 if due else max(done - 2, 0))


def test_as_many_random_steps_as_a_batch_needs():
    """What `learning_starts=None` promises."""
    assert n_step_buffer(RandomWalk(), algorithms.make(DQN, SMALL | {"replay.learning_starts": None})).min_size == T * E
