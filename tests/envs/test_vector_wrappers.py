"""Episode statistics and normalization, against NumPy in float64, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax import counters, envs
from msrl_jax.envs import running
from tests.support.compiled import exchanges
from tests.support.corridor import Corridor

NUM_ENVS, NUM_STEPS = 16, 80
KEY = jax.random.key(5)


class Drifting:
    """A random walk far from zero in one element and constant in another, with episodes of random length."""

    observation_space = envs.Box(-np.inf, np.inf, (3,))
    action_space = envs.Discrete(2)

    def reset(self, key):
        obs = jnp.stack([1000 + jax.random.normal(key), jnp.float32(3), jax.random.uniform(key)])
        return obs, obs

    def step(self, key, state, action):
        walk, end, cut = jax.random.split(key, 3)
        obs = state + jnp.array([1.0, 0, 0.1]) * jax.random.normal(walk, (3,))
        reward = obs[2] * (2.0 * action - 0.5)
        return obs, obs, reward, jax.random.bernoulli(end, 0.1), jax.random.bernoulli(cut, 0.05)


def actions_of(venv, num_steps=NUM_STEPS):
    return jax.random.bernoulli(jax.random.key(9), 0.5, (num_steps, venv.num_envs)).astype(jnp.int32)


def play(venv):
    """The first observations, the final state and all steps."""
    run = jax.jit(lambda key, actions: (lambda s, o: (o, *jax.lax.scan(venv.step, s, actions)))(*venv.reset(key)))
    return run(KEY, actions_of(venv))


@pytest.fixture(scope="module")
def raw():
    """The unwrapped trajectory, in float64."""
    first, _, steps = play(envs.vectorize(Drifting(), NUM_ENVS))
    numpy = jax.tree.map(lambda x: np.asarray(x, np.float64), (first, steps))
    done = np.asarray(steps.terminated | steps.truncated)
    assert done.sum() > 20
    return *numpy, done


def test_episode_statistics_equal_a_plain_loop(raw):
    _, steps, done = raw
    venv = envs.EpisodeStatistics(envs.vectorize(Drifting(), NUM_ENVS))
    _, state, wrapped = play(venv)
    np.testing.assert_array_equal(wrapped.reward, steps.reward)
    returns, lengths, running_return, running_length = [], [], np.zeros(NUM_ENVS), np.zeros(NUM_ENVS)
    for t in range(NUM_STEPS):
        running_return += steps.reward[t]
        running_length += 1
        returns.extend(running_return[done[t]])
        lengths.extend(running_length[done[t]])
        running_return[done[t]] = running_length[done[t]] = 0
    state, metrics = venv.pop_episodes(state)
    assert set(metrics) == {"episode_return", "episode_length"}
    assert metrics["episode_return"].count == metrics["episode_length"].count == len(returns)
    np.testing.assert_allclose(metrics["episode_return"].total, np.sum(returns), rtol=1e-5)
    np.testing.assert_array_equal(metrics["episode_length"].total, np.sum(lengths))

    # Draining again gives nothing, and has not touched the episodes that are under way.
    state, metrics = venv.pop_episodes(state)
    assert metrics["episode_return"].count == metrics["episode_return"].total == 0
    np.testing.assert_allclose(state.episodes.episode_return, running_return, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(state.episodes.episode_length, running_length)


def test_observations_are_normalized_by_the_mean_and_variance_of_all_so_far(raw):
    first, steps, _ = raw
    venv = envs.NormalizeObservation(envs.vectorize(Drifting(), NUM_ENVS))
    first_normalized, state, normalized = play(venv)
    seen = np.concatenate([first[None], steps.obs])  # [1 + T, E, 3]

    def expected(obs, num_batches):
        mean, var = seen[:num_batches].mean((0, 1)), seen[:num_batches].var((0, 1))
        return np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)

    close = {"rtol": 2e-3, "atol": 2e-3}  # observations near 1000 with deviation 1 carry 6e-5 in float32
    np.testing.assert_allclose(first_normalized, expected(first, 1), **close)
    for t in range(NUM_STEPS):
        np.testing.assert_allclose(normalized.obs[t], expected(steps.obs[t], t + 2), **close)
        np.testing.assert_allclose(normalized.final_obs[t], expected(steps.final_obs[t], t + 2), **close)
    stats, inner = venv.statistics(state)
    assert inner == () and counters.to_int(stats.count) == seen[..., 0].size
    np.testing.assert_allclose(stats.mean, seen.mean((0, 1)), rtol=1e-6)
    np.testing.assert_allclose(stats.var, seen.var((0, 1)), rtol=1e-4, atol=1e-6)
    assert venv.observation_space == envs.Box(-10, 10, (3,))


def test_rewards_are_scaled_by_the_deviation_of_the_discounted_return(raw):
    _, steps, done = raw
    discount = 0.9
    venv = envs.NormalizeReward(envs.vectorize(Drifting(), NUM_ENVS), discount=discount)
    _, state, scaled = play(venv)
    discounted, seen = np.zeros(NUM_ENVS), []
    for t in range(NUM_STEPS):
        discounted = discount * discounted + steps.reward[t]
        seen.append(discounted.copy())
        expected = np.clip(steps.reward[t] / np.sqrt(np.var(seen) + 1e-8), -10, 10)
        np.testing.assert_allclose(scaled.reward[t], expected, rtol=1e-4, atol=1e-5)
        discounted[done[t]] = 0
    stats, _ = venv.statistics(state)
    np.testing.assert_allclose(stats.var, np.var(seen), rtol=1e-4)
    np.testing.assert_allclose(state.discounted_return, discounted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(scaled.obs, steps.obs.astype(np.float32))


def test_normalized_values_are_clipped():
    venv = envs.NormalizeReward(envs.NormalizeObservation(envs.vectorize(Drifting(), 4), clip=0.5), 0.9, clip=0.25)
    first, _, steps = play(venv)
    for x in (first, steps.obs, steps.final_obs):
        assert np.max(np.abs(x)) == 0.5
    assert np.max(np.abs(steps.reward)) == 0.25


def test_merging_batches_far_from_zero_is_accurate():
    batches = 1e4 + np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    batches[25:] += 500
    stats = running.batch_statistics(jnp.asarray(batches[0]))
    for batch in batches[1:]:
        stats = running.update(stats, jnp.asarray(batch))
    exact = np.asarray(batches, np.float64)
    np.testing.assert_allclose(stats.mean, exact.mean(), rtol=1e-6)
    np.testing.assert_allclose(stats.var, exact.var(), rtol=1e-4)


def test_frozen_statistics_are_used_and_not_updated():
    def wrap(frozen):
        venv = envs.NormalizeObservation(envs.vectorize(Drifting(), NUM_ENVS), frozen=frozen)
        return envs.NormalizeReward(venv, 0.9, frozen=frozen)

    trained, frozen = wrap(False), wrap(True)
    _, state, _ = play(trained)
    stats = trained.statistics(state)
    raw_venv = envs.vectorize(Drifting(), NUM_ENVS)
    raw_state, raw_obs = raw_venv.reset(jax.random.key(1))
    state, obs = frozen.reset(jax.random.key(1))
    np.testing.assert_array_equal(obs, raw_obs)  # nothing to normalize by yet
    state = frozen.with_statistics(state, stats)
    (reward_stats, (obs_stats, _)) = stats

    def normalized(obs):
        return np.clip((np.asarray(obs) - obs_stats.mean) / np.sqrt(obs_stats.var + 1e-8), -10, 10)

    np.testing.assert_allclose(frozen.observe(state, obs), normalized(raw_obs), rtol=1e-5)
    raw_next, next_ = jax.jit(raw_venv.step), jax.jit(frozen.step)
    for action in actions_of(frozen, 5):
        raw_state, raw_step = raw_next(raw_state, action)
        state, step = next_(state, action)
        np.testing.assert_allclose(step.obs, normalized(raw_step.obs), rtol=1e-5)
        np.testing.assert_allclose(step.final_obs, normalized(raw_step.final_obs), rtol=1e-5)
        np.testing.assert_allclose(step.reward, raw_step.reward / np.sqrt(reward_stats.var + 1e-8), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, frozen.statistics(state), stats)


def test_observe_normalizes_any_leading_shape_without_counting():
    venv = envs.EpisodeStatistics(envs.NormalizeObservation(envs.vectorize(Drifting(), NUM_ENVS)))
    state, obs = venv.reset(KEY)
    raw_obs = envs.vectorize(Drifting(), NUM_ENVS).reset(KEY)[1]
    np.testing.assert_allclose(venv.observe(state, raw_obs), obs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(venv.observe(state, raw_obs[0]), obs[0], rtol=1e-5, atol=1e-5)
    deep = jnp.broadcast_to(raw_obs, (2, 5, *raw_obs.shape))
    np.testing.assert_allclose(venv.observe(state, deep)[1, 4], obs, rtol=1e-5, atol=1e-5)


def full_stack(num_envs=NUM_ENVS):
    env = envs.FrameStack(envs.FlattenObservation(envs.TimeLimit(Drifting(), 12)), 2)
    venv = envs.NormalizeObservation(envs.EpisodeStatistics(envs.vectorize(env, num_envs)))
    return envs.NormalizeReward(venv, discount=0.99)


@pytest.mark.long
def test_wrappers_compose():
    venv = full_stack()
    first, state, steps = play(venv)
    assert venv.num_envs == NUM_ENVS and venv.name == "Drifting" and venv.action_space == envs.Discrete(2)
    assert first.shape == steps.obs.shape[1:] == (NUM_ENVS, *venv.observation_space.shape) == (NUM_ENVS, 6)
    # The episode statistics inside the normalizers see raw rewards.
    plain = envs.EpisodeStatistics(envs.vectorize(envs.TimeLimit(Drifting(), 12), NUM_ENVS))
    _, plain_state, _ = play(plain)
    state, metrics = venv.pop_episodes(state)
    _, expected = plain.pop_episodes(plain_state)
    assert metrics["episode_return"].count > 20
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics, expected)
    other, _ = venv.reset(jax.random.key(2))
    moved = venv.with_statistics(other, venv.statistics(state))
    jax.tree.map(np.testing.assert_array_equal, venv.statistics(moved), venv.statistics(state))
    keys = [jax.random.key_data(jax.tree.leaves(s)[0]) for s in (moved, other)]
    np.testing.assert_array_equal(*keys)
    assert venv.pop_episodes(state)[1]["episode_return"].count == 0


def test_statistics_are_the_same_on_one_and_on_eight_devices():
    venv = full_stack(64)
    mesh = Mesh(np.array(jax.devices()[:8]), ("env",))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), venv.axes, is_leaf=lambda x: isinstance(x, P))
    state, _ = jax.jit(venv.reset)(KEY)
    actions = actions_of(venv, 40)

    def run(state, actions):
        state, _ = jax.lax.scan(venv.step, state, actions)
        return venv.pop_episodes(state)

    one = jax.jit(run)(state, actions)
    by_env = NamedSharding(mesh, P(None, "env"))
    split = jax.jit(run, in_shardings=(shardings, by_env), out_shardings=(shardings, None))
    eight = split(jax.device_put(state, shardings), jax.device_put(actions, by_env))
    close = {"rtol": 1e-4, "atol": 1e-5}
    (state_1, metrics_1), (state_8, metrics_8) = one, eight
    stats = venv.statistics(state_1), venv.statistics(state_8)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **close), *stats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics_1, metrics_8)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(stats[1]))


def collectives(venv):
    """The kinds of collective operations in one step on eight devices."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("env",))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), venv.axes, is_leaf=lambda x: isinstance(x, P))
    state, _ = jax.eval_shape(venv.reset, KEY)
    action = jax.ShapeDtypeStruct((venv.num_envs,), jnp.int32)
    by_env = NamedSharding(mesh, P("env"))
    step = jax.jit(venv.step, in_shardings=(shardings, by_env), out_shardings=(shardings, by_env))
    return {made.kind.removesuffix("-start") for made in exchanges(step.lower(state, action).compile())}


def test_only_normalization_communicates_and_only_by_all_reduce():
    venv = envs.EpisodeStatistics(envs.vectorize(Corridor(), 64))
    assert collectives(venv) == set()
    assert collectives(envs.NormalizeObservation(venv)) == {"all-reduce"}
    assert collectives(envs.NormalizeReward(venv, 0.99)) == {"all-reduce"}
    assert collectives(envs.NormalizeReward(envs.NormalizeObservation(venv, frozen=True), 0.99, frozen=True)) == set()
