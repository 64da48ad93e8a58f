"""Prioritized sampling: sum trees, frequencies, weights and updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from msrl_jax import replay
from msrl_jax.replay import sum_tree
from tests.support.history import EXAMPLE, compiled, steps

ALPHA, EPSILON = 0.7, 0.01
NUM_LEAVES = 1000
write, draw = jax.jit(sum_tree.write), jax.jit(sum_tree.draw, static_argnums=2)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**32 - 1), writes=st.integers(1, 12))
def test_sums_are_those_of_the_leaves(seed, writes):
    rng = np.random.default_rng(seed)
    tree, leaves = sum_tree.init(NUM_LEAVES), np.zeros(NUM_LEAVES)
    for _ in range(writes):
        first = np.where(rng.random(6) < 0.2, sum_tree.NOWHERE, rng.choice(NUM_LEAVES // 40, 6, replace=False) * 40)
        values = np.where(rng.random((6, 40)) < 0.3, 0, 10 ** rng.uniform(-6, 6, (6, 40))).astype(np.float32)
        tree = write(tree, jnp.asarray(first, jnp.int32), values)
        for begin, run in zip(first, values, strict=True):
            leaves[begin : begin + 40] = run[: len(leaves[begin : begin + 40])]
    expected = leaves
    for level in tree:
        np.testing.assert_allclose(level[: len(expected)], expected, rtol=1e-5)
        expected = np.pad(expected, (0, -len(expected) % sum_tree.BRANCHES)).reshape(-1, sum_tree.BRANCHES).sum(1)
    np.testing.assert_allclose(sum_tree.total(tree), leaves.sum(), rtol=1e-5)
    if leaves.any():
        drawn, value = draw(tree, jax.random.key(seed), 64)
        np.testing.assert_array_equal(value, leaves[drawn].astype(np.float32))
        assert (np.asarray(value) > 0).all()


def frequencies(tree, leaves, draws):
    """How often each leaf is drawn, one at a time: draws of one call are not independent."""
    found = jax.jit(lambda tree, keys: jax.vmap(lambda key: sum_tree.draw(tree, key, 1)[0][0])(keys))
    counts = np.bincount(found(tree, jax.random.split(jax.random.key(1), draws)), minlength=leaves.size)
    return counts, draws * leaves.astype(np.float64) / leaves.sum(dtype=np.float64)


def test_leaves_are_drawn_in_proportion():
    # False alarm rate 1e-3, were the seed not fixed.
    leaves = np.random.default_rng(0).gamma(0.5, size=300).astype(np.float32)
    leaves[::7] = 0
    tree = write(sum_tree.init(300), jnp.zeros(1, jnp.int32), leaves[None])
    counts, expected = frequencies(tree, leaves, 100_000)
    assert not counts[leaves == 0].any()
    rare = expected < 10
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    assert stats.chisquare(counts, expected).pvalue > 1e-3


def test_small_leaves_keep_their_share_beside_large_ones():
    # In float32 the sum is a multiple of 4: without new low-order bits, a target would reach every fourth leaf of 1 only.
    leaves = np.ones(2**12, np.float32)
    leaves[:16] = 2.0**22
    tree = write(sum_tree.init(leaves.size), jnp.zeros(1, jnp.int32), leaves[None])
    drawn, value = draw(tree, jax.random.key(0), 2**20)
    counts = np.bincount(np.asarray(drawn)[np.asarray(value) == 1] % 4, minlength=4)
    assert stats.chisquare(counts).pvalue > 1e-3 and stats.binomtest(counts.sum(), 2**20, 2**12 / leaves.sum()).pvalue > 1e-3


@pytest.fixture(scope="module")
def functions():
    return compiled(
        replay.prioritized(
            EXAMPLE,
            capacity=4 * 12,
            num_envs=4,
            unroll_length=3,
            batch_size=16,
            length=2,
            shards=2,
            alpha=ALPHA,
            epsilon=EPSILON,
        )
    )


def after(functions, insertions):
    state, rng = functions.buffer.init(), np.random.default_rng(0)
    for i in range(insertions):
        state = functions.insert(state, steps(rng, 3, 4, 3 * i))
    return state


def indices(pairs):
    return replay.Indices(*(jnp.array(x, jnp.int32) for x in zip(*pairs, strict=True)))


def priority(functions, state):
    """(step, environment) -> probability, of every window that can be drawn."""
    leaves = np.asarray(state.priorities.tree[0], np.float64)[:, : 12 * 2].reshape(2, 12, 2)
    return {(row, g * 2 + e): leaves[g, row, e] for g, row, e in zip(*np.nonzero(leaves), strict=True)}


def test_priorities_follow_td_errors_of_either_sign(functions):
    state = after(functions, 2)  # steps 0 to 5, windows that start at 0 to 4
    before = priority(functions, state)
    assert before == {(step, env): 1 for step in range(5) for env in range(4)}
    # One update has 8 windows of each shard; a pair may occur twice in it, with the same error.
    chosen = [(step, env) for env in (0, 1) for step in range(4)] + [(step, env) for env in (2, 3) for step in range(4)]
    chosen[1] = chosen[0]
    errors = np.linspace(-3, 2, 16).astype(np.float32)  # the shards have different largest ones
    errors[1] = errors[0]
    state = functions.update(state, indices(chosen), errors)
    expected = {**before, **{at: (abs(e) + EPSILON) ** ALPHA for at, e in zip(chosen, errors.astype(float), strict=True)}}
    got = priority(functions, state)
    assert got.keys() == expected.keys()
    np.testing.assert_allclose([got[at] for at in expected], list(expected.values()), rtol=1e-5)
    # New windows get the largest priority so far of their shard.
    state = functions.insert(state, steps(np.random.default_rng(0), 3, 4, 6))
    new = priority(functions, state)
    largest = [(error + EPSILON) ** ALPHA for error in (3, 3, 2, 2)]
    np.testing.assert_allclose([[new[step, env] for env in range(4)] for step in (5, 6, 7)], [largest] * 3, rtol=1e-5)
    # Draws have the probabilities that the sample states, and those follow the priorities of each shard.
    batch = functions.sample(state, jax.random.key(3))
    total = [sum(p for (_, env), p in new.items() if env // 2 == g) for g in (0, 1)]
    for step, env, probability in zip(*map(np.asarray, (*batch.indices, batch.probability)), strict=True):
        np.testing.assert_allclose(probability, new[step, env] / (2 * total[env // 2]), rtol=1e-5)


def test_invalid_updates_are_ignored(functions):
    state = after(functions, 6)  # steps 6 to 17 are held
    before = jax.tree.map(np.asarray, state.priorities)
    overwritten = [(5, 0), (0, 1)] * 4
    incomplete = [(17, 2), (18, 3)] * 4  # the window of step 17 wants step 18
    after_ = functions.update(state, indices(overwritten + incomplete), jnp.full(16, 9.0))
    jax.tree.map(np.testing.assert_array_equal, after_.priorities, before)
    held = [(9, 0), (10, 1)] * 4 + [(9, 2), (10, 3)] * 4
    edges = [(6, 0), (16, 1)] * 4 + [(6, 2), (16, 3)] * 4  # the oldest and the newest window
    told, untold = priority(functions, functions.update(state, indices(edges), jnp.full(16, 9.0))), priority(functions, state)
    assert {at for at in told if told[at] != untold[at]} == {(step % 12, env) for step, env in edges}
    for bad in (np.nan, np.inf, -np.inf):
        after_ = functions.update(state, indices(held), jnp.full(16, bad))
        jax.tree.map(np.testing.assert_array_equal, after_.priorities, before)


def test_frequencies_follow_priorities(functions):
    # Over both shards and through the whole buffer. A stratified batch varies less than independent draws do, so the
    # statistic is too small rather than too large: the false alarm rate is below 1e-3, were the seeds not fixed.
    state = after(functions, 7)
    rng = np.random.default_rng(5)
    for step in range(9, 20):
        chosen = [(step, env) for env in (0, 1) for _ in range(4)] + [(step, env) for env in (2, 3) for _ in range(4)]
        state = functions.update(state, indices(chosen), np.repeat(rng.gamma(0.5, size=4), 4).astype(np.float32))
    expected = priority(functions, state)
    assert len(expected) == 44
    total = [sum(p for (_, env), p in expected.items() if env // 2 == g) for g in (0, 1)]
    draws = jax.jit(lambda keys: jax.vmap(lambda key: functions.buffer.sample(state, key).indices)(keys))
    at = draws(jax.random.split(jax.random.key(0), 2000))
    counts = np.zeros((12, 4))
    np.add.at(counts, (np.asarray(at.step) % 12, np.asarray(at.env)), 1)
    wanted = [2000 * 8 * p / total[env // 2] for (_, env), p in expected.items()]
    found = [counts[at] for at in expected]
    assert sum(found) == 2000 * 16
    assert stats.chisquare(found, wanted, ddof=1).pvalue > 1e-3  # two sums are fixed


def test_importance_weights():
    probability = np.array([0.1, 0.4, 0.2, 0.3], np.float32)
    full = (4 * probability.astype(np.float64)) ** -1.0
    np.testing.assert_allclose(replay.importance_weights(probability, 1.0), full / full.max(), rtol=1e-6)
    half = (4 * probability.astype(np.float64)) ** -0.5
    np.testing.assert_allclose(replay.importance_weights(probability, 0.5), half / half.max(), rtol=1e-6)
    np.testing.assert_array_equal(replay.importance_weights(probability, 0.0), np.ones(4))


def test_negative_priorities_are_refused():
    with pytest.raises(ValueError, match=r"a priority is -1.0; priorities must be finite and not negative"):
        sum_tree.write(sum_tree.init(4), jnp.zeros(1, jnp.int32), jnp.array([[1.0, -1.0]]))
    with pytest.raises(ValueError, match=r"epsilon=0 never draws"):
        replay.prioritized(EXAMPLE, capacity=8, num_envs=1, unroll_length=1, batch_size=1, epsilon=0)
    with pytest.raises(ValueError, match=r"alpha=-0.5: use a finite number of at least 0"):
        replay.prioritized(EXAMPLE, capacity=8, num_envs=1, unroll_length=1, batch_size=1, alpha=-0.5)


def test_batches_are_updated_one_after_another(functions):
    state = after(functions, 4)
    batches = [functions.sample(state, jax.random.key(seed)).indices for seed in range(3)]
    errors = np.random.default_rng(1).normal(size=(3, 16)).astype(np.float32)
    together = functions.update(state, jax.tree.map(lambda *x: jnp.stack(x), *batches), errors)
    for at, error in zip(batches, errors, strict=True):
        state = functions.update(state, at, error)
    jax.tree.map(np.testing.assert_array_equal, together, state)
    # Of two different errors of one window, the larger counts, on all devices.
    twice = jax.tree.map(lambda x: jnp.repeat(x[::2], 2), batches[0])
    error = np.tile([0.5, -7.0], 8).astype(np.float32)
    one, other = functions.update(state, twice, error), functions.update(state, twice, error.reshape(8, 2)[:, ::-1].ravel())
    jax.tree.map(np.testing.assert_array_equal, one, other)
    np.testing.assert_allclose(one.priorities.largest, (7 + EPSILON) ** ALPHA, rtol=1e-5)


@pytest.mark.parametrize("shape", [(8,), (32,), (16, 2)])
def test_parts_of_batches_are_refused(functions, shape):
    nowhere = replay.Indices(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError, match=r"of whole batches, \[\.\.\., 16\], but got"):
        functions.buffer.update(functions.buffer.init(), nowhere, jnp.zeros(shape))


def test_an_empty_buffer_raises_or_gives_finite_numbers(functions):
    with pytest.raises(ValueError, match=r"the buffer holds 0 steps of each environment, but a window is length=2 steps long"):
        functions.buffer.sample(functions.buffer.init(), jax.random.key(0))
    batch = functions.sample(functions.buffer.init(), jax.random.key(0))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(batch))
    assert np.isfinite(replay.importance_weights(batch.probability, 0.5)).all()


def test_rounding_never_draws_a_leaf_of_zero(monkeypatch):
    # The largest random number below 1 puts the last target at the end of the sum; only zeros follow.
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, *_: jnp.full(shape, np.nextafter(np.float32(1), 0)))
    leaves = np.zeros((1, 100), np.float32)
    leaves[0, 3:41] = 0.1
    tree = sum_tree.write(sum_tree.init(100), jnp.zeros(1, jnp.int32), leaves)
    drawn, value = sum_tree.draw(tree, jax.random.key(0), 256)
    np.testing.assert_array_equal(value, np.float32(0.1))
    assert int(drawn[-1]) == 40


def test_the_exponent_of_weights_rises_with_the_fraction_of_the_run():
    buffer = compiled(
        replay.prioritized(EXAMPLE, capacity=4 * 12, num_envs=4, unroll_length=3, batch_size=16, shards=2, beta=0.4)
    )
    state, rng = buffer.buffer.init(), np.random.default_rng(0)
    for i in range(3):
        state = buffer.insert(state, steps(rng, 3, 4, 3 * i))
    at = buffer.sample(state, jax.random.key(1), (), 0.0).indices
    state = buffer.update(state, at, jnp.linspace(0.1, 3.0, 16))
    for fraction in (0.0, 0.25, 1.0):
        batch = buffer.sample(state, jax.random.key(0), (), fraction)
        probability = np.asarray(batch.probability, np.float64)
        assert probability.min() < 0.8 * probability.max()
        np.testing.assert_allclose(batch.weight, (probability.min() / probability) ** (0.4 + 0.6 * fraction), rtol=1e-5)


def test_weights_are_1_without_an_exponent(functions):
    batch = functions.sample(after(functions, 3), jax.random.key(0))
    np.testing.assert_array_equal(batch.weight, np.ones(16))


def test_weights_are_relative_to_the_largest_of_all_shards():
    buffer = compiled(
        replay.prioritized(EXAMPLE, capacity=4 * 12, num_envs=4, unroll_length=3, batch_size=16, shards=2, beta=0.5)
    )
    state = buffer.insert(buffer.buffer.init(), steps(np.random.default_rng(0), 3, 4, 0))
    at = buffer.sample(state, jax.random.key(1)).indices
    state = buffer.update(state, at, jnp.where(at.env < 2, 0.01, jnp.linspace(1.0, 3.0, 16)))  # one shard knows nothing else
    batch = buffer.sample(state, jax.random.key(0))
    expected = np.asarray(batch.probability, np.float64) ** -0.5
    np.testing.assert_allclose(batch.weight, expected / expected.max(), rtol=1e-5)
    largest = np.asarray(batch.weight).reshape(2, 8).max(1)
    assert sorted(largest)[0] < 0.99 < sorted(largest)[1] == 1
