"""Evolution strategies: one iteration against an independent float64 implementation, what crosses, and what is learned."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import msrl_jax as msrl
from msrl_jax import counters
from msrl_jax.algorithms import ES
from msrl_jax.algorithms.es import centered_ranks, first_episode_return
from tests.support.agents import make_counted, make_still
from tests.support.compiled import collectives
from tests.support.random_walk import RandomWalk

T, E = 8, 16
SMALL = {"num_envs": E, "unroll_length": T, "hidden_sizes": (8, 6)}


def build(env, **overrides):
    return make_still("es", env, **SMALL | overrides)


def start(agent, iterations=1):
    state = jax.jit(agent.init)(jax.random.key(0))
    for _ in range(iterations):
        state, _ = jax.jit(agent.iteration)(state)
    return state


def num_params(agent):
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(agent.init, jax.random.key(0)).params))


def plain_action(params, obs, continuous):
    """The action of one member written out: the largest of three scores, or two numbers in [-0.5, 0.5] x [0, 1]."""
    x = obs
    for layer in ("Dense_0", "Dense_1"):
        x = np.tanh(x @ params["actor_torso"][layer]["kernel"] + params["actor_torso"][layer]["bias"])
    outputs = x @ params["actor_head"]["kernel"] + params["actor_head"]["bias"]
    return np.clip(outputs, -1, 1) * 0.5 + np.float64([0, 0.5]) if continuous else np.argmax(outputs)


def plain_iteration(agent, config, state):
    """Every member by itself, in float64: its noise, its episode, its rank, and its part of the gradient."""
    continuous = agent.env.action_space.shape != ()
    center = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    leaves, tree = jax.tree.flatten(center)
    seeds = jax.vmap(jax.random.split)(state.actor_keys)[:, 1]
    members, noises = [], []
    for i in range(E):
        noise = np.asarray(jax.random.normal(seeds[i - i % 2], (sum(x.size for x in leaves),)), np.float64)
        noise = noise if i % 2 == 0 else -noise
        parts = np.split(noise, np.cumsum([x.size for x in leaves])[:-1])
        noises.append(jax.tree.unflatten(tree, [n.reshape(x.shape) for n, x in zip(parts, leaves, strict=True)]))
        members.append(jax.tree.map(lambda p, n: p + config.noise_scale * n, center, noises[-1]))

    # Episodes that ended with the last iteration have been followed by new ones; the others are given up.
    fresh = agent.env.reset(jax.random.split(state.env_key)[1])
    keep = lambda old, new: np.array([a if end else b for a, b, end in zip(old, new, ~np.asarray(state.midway), strict=True)])
    numbers = lambda x: np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
    merged = jax.tree.map(lambda a, b: keep(numbers(a), numbers(b)), (state.env_state, state.obs), fresh)
    wrapped = lambda x, like: jax.random.wrap_key_data(x) if jnp.issubdtype(like.dtype, jax.dtypes.prng_key) else x
    env_state, obs = jax.tree.map(wrapped, merged, fresh)
    step, fitness, running = jax.jit(agent.env.step), np.zeros(E), np.ones(E, bool)
    for _ in range(T):
        action = np.stack([plain_action(m, np.asarray(o, np.float64), continuous) for m, o in zip(members, obs, strict=True)])
        env_state, t = step(env_state, jnp.asarray(action.astype(np.float32 if continuous else np.int32)))
        fitness, obs = fitness + np.where(running, t.reward, 0), t.obs
        running &= ~(np.asarray(t.terminated) | np.asarray(t.truncated))

    gradient = jax.tree.map(np.zeros_like, center)
    for i in range(E):
        rank = np.mean([(fitness[j] < fitness[i]) + 0.5 * (fitness[j] == fitness[i]) for j in range(E) if j != i])
        gradient = jax.tree.map(lambda g, n, u=rank - 0.5: g + u * n / (E * config.noise_scale), gradient, noises[i])
    tx = optax.chain(optax.add_decayed_weights(config.weight_decay), optax.adam(config.learning_rate))
    updates, _ = tx.update(jax.tree.map(lambda g: jnp.float32(-g), gradient), state.opt_state[:2], state.params)
    return fitness, gradient, optax.apply_updates(state.params, updates)


@pytest.mark.parametrize("continuous", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["discrete", "continuous"])
def test_one_iteration_equals_a_loop_over_members_in_float64(continuous):
    """The second one of four, in which the learning rate has fallen by a quarter."""
    agent = make_counted("es", RandomWalk(continuous), 4, **SMALL, noise_scale=0.3, anneal_learning_rate=True)
    begun = start(agent)
    state = begun.inner
    assert 0 < np.sum(state.midway) < E, "some episodes are to be given up, others have just begun"
    config = ES(**SMALL, noise_scale=0.3, learning_rate=0.75 * ES().learning_rate)
    fitness, gradient, params = plain_iteration(agent, config, state)
    assert len(np.unique(fitness)) == E
    after, metrics = jax.jit(agent.iteration)(begun)
    after = after.inner
    np.testing.assert_allclose(metrics["fitness"], fitness.mean(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(metrics["fitness_max"], fitness.max(), rtol=1e-5)
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), after.params, params)


def test_ranks_are_centered_and_equal_returns_share_theirs():
    np.testing.assert_allclose(centered_ranks(jnp.array([3.0, -10.0, 500.0, 7.0, 4.0])), [-0.25, -0.5, 0.5, 0.25, 0])
    np.testing.assert_allclose(centered_ranks(jnp.array([1.0, 1.0, 0.0, 9.0])), [0, 0, -0.5, 0.5])
    np.testing.assert_allclose(centered_ranks(jnp.full(6, 2.0)), np.zeros(6), atol=1e-7)
    np.testing.assert_allclose(centered_ranks(jnp.array([jnp.nan, -jnp.inf, 5.0])), [-0.25, -0.25, 0.5])


def test_only_the_first_episode_counts():
    reward = jnp.array([[1.0, 1, 1], [2, 2, 2], [4, 4, jnp.nan]])
    ended = jnp.array([[False, False, True], [False, True, False], [False, True, False]])
    np.testing.assert_allclose(first_episode_return(reward, ended), [7.0, 3.0, 1.0])


def test_devices_exchange_one_gradient_and_the_returns():
    """Compiled on eight devices: the gradient is summed at once; of the population, only the returns go round."""
    agent = build(RandomWalk(), unroll_length=4 * T)
    found = collectives(agent)
    *scalars, returns, (name, gradient) = found
    assert all(name == "all-reduce" for name, _ in scalars) and sum(size for _, size in scalars) <= 5
    assert returns == ("all-gather", E)
    assert name == "all-reduce" and num_params(agent) <= gradient <= num_params(agent) + 5


@pytest.mark.long
def test_noise_belongs_to_the_parameters_that_it_was_added_to():
    """Stale actors' returns belong to their own seeds and center; the step that follows is taken from the newest center."""
    agent = build(RandomWalk(), weight_decay=0.0)
    state = start(agent, 0)
    policy = msrl.policies.SingleLearnerCoarse(actors=2, staleness=1)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes)
    after, _ = program.run(state, 4)
    iterate, behind = jax.jit(agent.iteration), state.params
    for _ in range(4):
        acted, _ = iterate(state._replace(params=behind))
        params = jax.tree.map(lambda new, old, p: p + (new - old), acted.params, behind, state.params)
        behind, state = state.params, acted._replace(params=params)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, program.unwrap(after).params, state.params)


def test_statistics_of_observations_outlive_the_episodes():
    agent = build(RandomWalk(), normalize_observations=True)
    state = start(agent, 3)
    assert counters.to_int(state.env_state.running.count) == E + 3 * T * E
    after, metrics = jax.jit(agent.iteration)(state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.params, metrics)))
    assert 1 <= metrics["episode_length"].mean() <= 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_envs": 7}, r"ES.num_envs=7 cannot be split into pairs of members; use num_envs=8"),
        ({"noise_scale": 0.0}, r"ES.noise_scale=0.0: use a finite number above 0"),
        ({"weight_decay": -0.1}, r"ES.weight_decay=-0.1: use a finite number at least 0"),
        ({"activation": "tahn"}, r"ES.activation='tahn': use 'tanh'"),
    ],
)
def test_bad_options_are_refused_before_anything_compiles(options, message):
    with pytest.raises(ValueError, match=message):
        build(RandomWalk(), **options)
