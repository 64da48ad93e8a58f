"""Mixers: QMIX's is monotonic and equals NumPy in float64, VDN's is the sum."""

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.networks.mixers import monotonic_mixer, sum_mixer
from tests.support.mixers import plain_monotonic

AGENTS, STATE = 3, 5
MIXER = monotonic_mixer(AGENTS, STATE, mixing_size=4, hyper_size=6)


def inputs(seed):
    keys = jax.random.split(jax.random.key(seed), 3)
    return MIXER.init(keys[0]), jax.random.normal(keys[1], (7, AGENTS)), jax.random.normal(keys[2], (7, STATE))


def test_a_joint_value_never_falls_when_one_value_rises():
    """Of 300 networks, for every agent and rises from 0 to 10."""

    @jax.jit
    @jax.vmap
    def both(seed, agent, rise):
        params, values, state = inputs(seed)
        return MIXER.apply(params, values, state), MIXER.apply(params, values.at[:, agent].add(rise), state)

    before, after = both(jnp.arange(300), jnp.arange(300) % AGENTS, jnp.linspace(0.0, 10.0, 300))
    assert bool((after >= before - 1e-5 * jnp.abs(before)).all()) and bool((after > before + 0.1).any())


def test_the_monotonic_mixer_equals_numpy():
    params, values, state = inputs(0)
    want = plain_monotonic(params, values, state, mixing_size=4)
    np.testing.assert_allclose(MIXER.apply(params, values, state), want, rtol=1e-5, atol=1e-5)


def test_the_sum_has_no_parameters():
    mixer = sum_mixer()
    assert mixer.init(jax.random.key(0)) == {}
    np.testing.assert_array_equal(mixer.apply({}, jnp.array([[1.0, 2.0, 4.0]]), jnp.zeros((1, 0))), [7.0])
