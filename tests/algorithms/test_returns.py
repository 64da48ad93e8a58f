"""Advantages against loops in float64, and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax.algorithms.returns import gae

jitted_gae = jax.jit(gae, static_argnames=("discount", "gae_lambda"))


def advantages_of_episodes(reward, value, next_value, terminated, truncated, discount, gae_lambda):
    """Cuts one environment's unroll into episodes and sums the discounted errors of each forwards (eq. 16)."""
    T = len(reward)
    ends = [t for t in range(T) if terminated[t] or truncated[t] or t == T - 1]
    advantage, start = np.zeros(T), 0
    for end in ends:
        for t in range(start, end + 1):
            for k in range(t, end + 1):
                future = 0.0 if terminated[k] else next_value[k]
                delta = reward[k] + discount * future - value[k]
                advantage[t] += (discount * gae_lambda) ** (k - t) * delta
        start = end + 1
    return advantage


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.9, 0.99, 1.0]), st.sampled_from([0.0, 0.8, 0.95, 1.0]))
def test_advantages_equal_float64_sums_wherever_episodes_end(seed, discount, gae_lambda):
    rng = np.random.default_rng(seed)
    T, E = 13, 3
    reward, value, next_value = rng.normal(size=(3, T, E)).astype(np.float32)
    terminated, truncated = rng.random((2, T, E)) < rng.random((2, 1, E))
    got = jitted_gae(reward, value, next_value, terminated, truncated, discount=discount, gae_lambda=gae_lambda)
    columns = [x.astype(np.float64).T for x in (reward, value, next_value)] + [terminated.T, truncated.T]
    want = [advantages_of_episodes(*column, discount, gae_lambda) for column in zip(*columns, strict=True)]
    np.testing.assert_allclose(got, np.stack(want, 1), rtol=1e-5, atol=1e-5)


def test_by_hand():
    """Two episodes: one is cut off after two steps, where the future is worth 8; the other terminates."""
    # Backwards with discount 1/2 and lambda 1/2: 1 + 0 - 2 = -1, then 1 + 2/2 - 4 - 1/4 = -2.25 for the second episode;
    # 1 + 8/2 - 2 = 3, then 1 + 2/2 - 4 + 3/4 = -1.25 for the first.
    value = jnp.array([4.0, 2.0, 4.0, 2.0])
    got = gae(
        jnp.ones(4), value, jnp.array([2.0, 8.0, 2.0, 100.0]), jnp.array([False, False, False, True]),
        jnp.array([False, True, False, False]), discount=0.5, gae_lambda=0.5,
    )  # fmt: skip
    np.testing.assert_allclose(got, [-1.25, 3.0, -2.25, -1.0])


def test_the_value_after_a_terminal_state_does_not_matter_even_if_it_is_nan():
    ones = jnp.ones(1)
    got = gae(ones, ones, jnp.full(1, jnp.nan), ones == 1, ones == 1, discount=0.9, gae_lambda=0.9)
    np.testing.assert_allclose(got, [0.0])
