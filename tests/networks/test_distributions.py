"""Distributions against float64 NumPy and against their own samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.envs import Box
from msrl_jax.networks.continuous_policies import TanhNormal
from msrl_jax.networks.distributions import Categorical, Normal
from msrl_jax.networks.policy_heads import discrete_policy

RNG = np.random.default_rng(0)
LOGITS = 2 * RNG.normal(size=(7, 4)).astype(np.float32)
LOC, LOG_SCALE = RNG.normal(size=(2, 7, 3)).astype(np.float32)


def probabilities(logits):
    weights = np.exp(logits.astype(np.float64))
    return weights / weights.sum(-1, keepdims=True)


def test_categorical_equals_float64_formulas():
    policy, p = Categorical(jnp.asarray(LOGITS)), probabilities(LOGITS)
    for action in range(4):
        got = policy.log_prob(jnp.full(7, action))
        np.testing.assert_allclose(got, np.log(p[:, action]), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(policy.entropy(), -(p * np.log(p)).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(), p.argmax(-1))
    assert policy.mode().dtype == jnp.int32


def test_normal_equals_float64_formulas():
    policy, loc, scale = Normal(jnp.asarray(LOC), jnp.asarray(LOG_SCALE)), LOC, np.exp(LOG_SCALE.astype(np.float64))
    action = RNG.normal(size=(7, 3)).astype(np.float32)
    density = np.exp(-0.5 * ((action - loc) / scale) ** 2) / (scale * np.sqrt(2 * np.pi))
    np.testing.assert_allclose(policy.log_prob(action), np.log(density).sum(-1), rtol=1e-4)
    np.testing.assert_allclose(policy.entropy(), np.log(scale * np.sqrt(2 * np.pi * np.e)).sum(-1), rtol=1e-4)
    np.testing.assert_array_equal(policy.mode(), loc)


def test_categorical_samples_have_the_probabilities_of_the_logits():
    keys = jax.random.split(jax.random.key(0), (20_000, 7))
    samples = Categorical(jnp.broadcast_to(LOGITS, (20_000, 7, 4))).sample(keys)
    frequencies = np.stack([(np.asarray(samples) == a).mean(0) for a in range(4)], -1)
    p = probabilities(LOGITS)
    assert (np.abs(frequencies - p) < 5 * np.sqrt(p * (1 - p) / 20_000)).all()
    assert samples.dtype == jnp.int32


def test_an_offset_of_all_logits_changes_no_sample():
    """Although the exponential of all of them is 0 or infinite in float32."""
    logits = jnp.float32([0, 1, -2, 3]) + jnp.float32([[0], [-1e4], [1e4]])
    keys = jax.random.split(jax.random.key(0), 99)
    drawn = jax.jit(jax.vmap(lambda key: Categorical(logits).sample(jnp.stack([key] * 3))))(keys)
    np.testing.assert_array_equal(drawn, jnp.broadcast_to(drawn[:, :1], (99, 3)))
    assert len(np.unique(drawn)) > 2


def test_normal_samples_have_mean_and_scale():
    keys = jax.random.split(jax.random.key(0), (20_000, 7))
    tile = lambda x: jnp.broadcast_to(x, (20_000, 7, 3))
    z = (np.asarray(Normal(tile(LOC), tile(LOG_SCALE)).sample(keys)) - LOC) / np.exp(LOG_SCALE)
    np.testing.assert_allclose(z.mean(0), np.zeros((7, 3)), atol=5 / np.sqrt(20_000))
    np.testing.assert_allclose(z.std(0), np.ones((7, 3)), atol=5 / np.sqrt(40_000))
    np.testing.assert_allclose(np.corrcoef(z.reshape(20_000, 21).T), np.eye(21), atol=6 / np.sqrt(20_000))


def test_forbidden_actions_are_never_drawn_and_keep_results_finite():
    logits = jnp.array([-jnp.inf, 0.0, -jnp.inf, 1.0, -jnp.inf])
    keys = jax.random.split(jax.random.key(1), 5000)
    drawn = Categorical(jnp.broadcast_to(logits, (5000, 5))).sample(keys)
    assert set(np.unique(drawn)) == {1, 3}
    p = probabilities(np.array([0.0, 1.0]))
    np.testing.assert_allclose(Categorical(logits).entropy(), -(p * np.log(p)).sum(), rtol=1e-5)
    gradient = jax.grad(lambda x: Categorical(x).entropy())(logits)
    assert np.isfinite(gradient).all()


def mostly_illegal(actions, rows):
    """Logits of which one action in a hundred and fifty is legal, and neither the first nor the last one is."""
    rng = np.random.default_rng(actions)
    legal = rng.random((rows, actions)) < 1 / 150
    legal[:, actions // 2], legal[:, [0, -1]] = True, False
    return np.where(legal, rng.normal(size=legal.shape), -np.inf).astype(np.float32)


@pytest.mark.parametrize("actions", [4, 300, 2187, 4672])
def test_no_uniform_number_draws_an_illegal_action(actions, monkeypatch):
    """At each step of the cumulative distribution and beside it, where sums that should be equal differ by rounding."""
    logits = mostly_illegal(actions, rows=2)
    ends = np.asarray(jax.jit(lambda x: jnp.cumsum(jnp.exp(x - x.max(-1, keepdims=True)), -1))(logits))
    steps = ends / ends[:, -1:]
    beside = [np.nextafter(steps, np.float32(to)) for to in (0, 2)]
    uniform = np.concatenate([0 * ends[:, :1], steps, *beside], 1)
    uniform = np.minimum(uniform, np.nextafter(np.float32(1), np.float32(0)))
    monkeypatch.setattr(jax.random, "uniform", lambda key, *_: jnp.asarray(uniform))
    drawn = np.asarray(jax.jit(lambda logits: Categorical(logits[:, None]).sample(jax.random.key(0)))(logits))
    assert np.isfinite(np.take_along_axis(logits, drawn, 1)).all()
    np.testing.assert_array_equal(drawn[:, 0], np.isfinite(logits).argmax(1))  # at 0, the first legal one


def test_extreme_uniform_numbers_stay_in_range(monkeypatch):
    largest = np.nextafter(np.float32(1), np.float32(0))
    for number, want in ((0.0, 0), (largest, 2)):
        monkeypatch.setattr(jax.random, "uniform", lambda key, *_, number=number: jnp.float32(number))
        assert Categorical(jnp.array([0.3, 0.1, -8.0, -jnp.inf])).sample(jax.random.key(0)) == want


SIZES = (3, 1, 4)
PADDED = np.where(np.arange(4) < np.array(SIZES)[:, None], 2 * RNG.normal(size=(7, 3, 4)).astype(np.float32), -np.inf)


def test_each_integer_has_the_next_outputs():
    space = Box(np.array([0, -1, 5]), np.array([1, 2, 7]), (3,), jnp.int32)  # of 2, 4 and 3 values
    logits = discrete_policy(space, jnp.arange(9.0)[None], None).logits
    inf = np.inf
    np.testing.assert_array_equal(logits[0], [[0, 1, -inf, -inf], [2, 3, 4, 5], [6, 7, 8, -inf]])


def test_several_integers_equal_float64_formulas():
    """Over all combinations of the values that the integers have."""
    policy, p = Categorical(jnp.asarray(PADDED), several=True), probabilities(PADDED)
    all_actions = np.stack(np.meshgrid(*map(np.arange, SIZES), indexing="ij"), -1).reshape(-1, 3)
    joint = np.stack([p[:, range(3), a].prod(-1) for a in all_actions], -1)
    got = np.stack([policy.log_prob(jnp.broadcast_to(a, (7, 3))) for a in all_actions], -1)
    np.testing.assert_allclose(got, np.log(joint), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(policy.entropy(), -(joint * np.log(joint)).sum(-1), rtol=1e-5)
    np.testing.assert_array_equal(policy.mode(), all_actions[joint.argmax(-1)])
    np.testing.assert_allclose(policy.probabilities(), p, rtol=1e-5)
    assert policy.mode().dtype == jnp.int32


def test_gradients_of_several_integers_are_finite_and_nothing_flows_to_values_that_they_lack():
    """Against central differences in float64."""
    weight, action = RNG.normal(size=7), jnp.zeros((7, 3), jnp.int32)
    lacks = np.isneginf(PADDED)

    def loss(logits):
        policy = Categorical(logits, several=True)
        return jnp.sum(weight * (policy.log_prob(action) + policy.entropy()))

    def exact(logits):
        p = probabilities(logits)
        log_p = np.log(np.where(lacks, 1, p))
        return np.sum(weight * (log_p[..., 0].sum(-1) - (p * log_p).sum((-1, -2))))

    got = np.asarray(jax.grad(loss)(jnp.asarray(PADDED)))
    assert np.isfinite(got).all() and (got[lacks] == 0).all()
    for index in np.argwhere(~lacks)[::5]:
        step = np.zeros(PADDED.shape)
        step[tuple(index)] = 1e-5
        want = (exact(PADDED + step) - exact(PADDED - step)) / 2e-5
        np.testing.assert_allclose(got[tuple(index)], want, rtol=1e-3, atol=1e-4)


def test_samples_of_several_integers_are_independent_with_the_probabilities_of_the_logits():
    keys = jax.random.split(jax.random.key(0), (20_000, 7))
    drawn = np.asarray(Categorical(jnp.broadcast_to(PADDED, (20_000, 7, 3, 4)), several=True).sample(keys))
    assert drawn.dtype == np.int32 and (drawn < SIZES).all()
    p = probabilities(PADDED)
    joint = p[:, 0, :, None] * p[:, 2, None, :]
    frequencies = np.stack([[((drawn[..., 0] == i) & (drawn[..., 2] == j)).mean(0) for j in range(4)] for i in range(4)])
    assert (np.abs(np.moveaxis(frequencies, -1, 0) - joint) < 5 * np.sqrt(joint * (1 - joint) / 20_000) + 1e-9).all()


def exact_tanh_normal(loc, scale, points=200_001):
    """Unsquashed points, weights that integrate over them, and the log-density of each squashed point, in float64."""
    z = np.linspace(-12, 12, points)
    unsquashed = loc + scale * z
    log_density = -0.5 * z**2 - np.log(scale * np.sqrt(2 * np.pi))
    slope = np.log(4) - 2 * np.logaddexp(unsquashed, -unsquashed)
    return unsquashed, np.exp(log_density) * scale * (z[1] - z[0]), log_density - slope


@pytest.mark.parametrize(("loc", "scale"), [(0.0, 1e-3), (-0.7, 0.3), (4.0, 1.0), (0.0, 3.0), (-0.7, 7.4)])
def test_tanh_normal_equals_numerical_integration(loc, scale):
    policy = TanhNormal(Normal(jnp.float32([loc]), jnp.log(jnp.float32([scale]))))
    unsquashed, weight, log_density = exact_tanh_normal(loc, scale)
    np.testing.assert_allclose(weight.sum(), 1.0, rtol=1e-9)
    np.testing.assert_allclose(policy.entropy(), -(weight * log_density).sum(), rtol=1e-4, atol=2e-4)
    # The density of the squashed variable itself has mass 1: the exact one, and so that of `log_prob`.
    inside = np.abs(unsquashed) < 4
    got = jax.vmap(policy.log_prob)(jnp.tanh(jnp.float32(unsquashed[inside][::500]))[:, None])
    if scale > 0.01:  # elsewhere the density changes within the rounding of an action
        np.testing.assert_allclose(got, log_density[inside][::500], rtol=2e-3, atol=2e-3)


def test_tanh_normal_log_probabilities_survive_saturation():
    loc = np.float32([[-40.0, 9.0], [0.1, 30.0], [0.0, 0.0]])
    policy = TanhNormal(Normal(jnp.asarray(loc), jnp.full((3, 2), -1.0)))
    keys = jax.random.split(jax.random.key(0), 3)
    action, log_prob = policy.sample_and_log_prob(keys)
    np.testing.assert_array_equal(action, policy.sample(keys))
    u = np.asarray(policy.base.sample(keys), np.float64)
    density = -0.5 * ((u - loc) * np.exp(1)) ** 2 + 1 - 0.5 * np.log(2 * np.pi)
    want = (density - (np.log(4) - 2 * np.logaddexp(u, -u))).sum(-1)
    np.testing.assert_allclose(log_prob, want, rtol=1e-5)
    assert (np.abs(action[:2]).max(-1) == 1).all() and np.isfinite(policy.log_prob(action)).all()
    gradient = jax.grad(lambda base: TanhNormal(base).sample_and_log_prob(keys)[1].sum())(policy.base)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    # d log_prob / d loc = 2 tanh(u) of a reparameterized sample, whose density itself moves along.
    np.testing.assert_allclose(gradient.loc, 2 * np.tanh(u), rtol=1e-5, atol=1e-5)


TANH_NORMAL = TanhNormal(Normal(jnp.asarray(LOC), jnp.asarray(LOG_SCALE)))


ALL = {
    "categorical": Categorical(jnp.asarray(LOGITS)),
    "integers": Categorical(jnp.asarray(PADDED), several=True),
    "normal": TANH_NORMAL.base,
    "tanh": TANH_NORMAL,
}


@pytest.mark.parametrize("policy", list(ALL.values()), ids=list(ALL))
def test_a_sample_does_not_depend_on_its_batch(policy):
    keys = jax.random.split(jax.random.key(2), 7)
    part = jax.tree.map(lambda x: x[2:4], policy)
    np.testing.assert_array_equal(policy.sample(keys)[2:4], part.sample(keys[2:4]))


def test_the_greedy_action_of_a_squashed_normal_is_its_squashed_mean():
    policy = TanhNormal(Normal(jnp.asarray(3 * LOC), jnp.asarray(LOG_SCALE)))
    np.testing.assert_allclose(policy.mode(), np.tanh(3 * LOC.astype(np.float64)), rtol=1e-5)
