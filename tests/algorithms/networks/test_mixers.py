"""Mixers: QMIX's is monotonic and equals NumPy in float64, VDN's is the sum."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax.algorithms.qmix import monotonic_mixer, sum_mixer

AGENTS, STATE = 3, 5
MIXER = monotonic_mixer(AGENTS, STATE, mixing_size=4, hyper_size=6)


def inputs(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    return MIXER.init(keys[0]), jax.random.normal(keys[1], (7, AGENTS)), jax.random.normal(keys[2], (7, STATE))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**16), agent=st.integers(0, AGENTS - 1), rise=st.floats(0, 10, width=32))
def test_a_joint_value_never_falls_when_one_value_rises(seed, agent, rise):
    params, values, state = inputs(seed)
    before = MIXER.apply(params, values, state)
    after = MIXER.apply(params, values.at[:, agent].add(rise), state)
    assert bool((after >= before - 1e-5 * jnp.abs(before)).all())


def plain_monotonic(params, values, state, mixing_size):
    """QMIX's mixer (arXiv 1803.11485, section 4.1) of values `[B, A]` and states `[B, S]`, in float64."""
    layers = [(np.float64(p["kernel"]), np.float64(p["bias"])) for _, p in sorted(params["params"].items(), key=_number)]
    q, s = np.float64(values), np.float64(state)

    def hyper(first, second):
        return np.maximum(s @ layers[first][0] + layers[first][1], 0) @ layers[second][0] + layers[second][1]

    # In the order of the calls; the output layer of a hypernetwork is made before its hidden layer.
    weights = np.abs(hyper(1, 0)).reshape(*q.shape, mixing_size)
    hidden = np.einsum("ba,bam->bm", q, weights) + s @ layers[2][0] + layers[2][1]
    hidden = np.where(hidden > 0, hidden, np.expm1(hidden))
    return (hidden * np.abs(hyper(4, 3))).sum(-1) + hyper(6, 5)[:, 0]


def test_the_monotonic_mixer_equals_numpy():
    params, values, state = inputs(0)
    want = plain_monotonic(params, values, state, mixing_size=4)
    np.testing.assert_allclose(MIXER.apply(params, values, state), want, rtol=1e-5, atol=1e-5)


def _number(item):
    return int(item[0].rpartition("_")[2])


def test_the_sum_has_no_parameters():
    mixer = sum_mixer()
    assert mixer.init(jax.random.key(0)) == {}
    np.testing.assert_array_equal(mixer.apply({}, jnp.array([[1.0, 2.0, 4.0]]), jnp.zeros((1, 0))), [7.0])
