"""The functions that the loops of the actor-critic algorithms share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.agents.agent import split_keys
from msrl_jax.fragments.counters import counter
from msrl_jax.fragments.progress import parameter_age, parameter_version
from msrl_jax.kernels.time import truncated_values
from msrl_jax.loops.trajectory import next_values
from msrl_jax.networks.unrolls import flatten, unflatten

T, E = 3, 4


def test_rows_of_an_environment_stay_together():
    x = jnp.arange(T * E * 2).reshape(T, E, 2)
    flat = flatten(x)
    for e in range(E):
        np.testing.assert_array_equal(flat[e * T : (e + 1) * T], x[:, e])
    np.testing.assert_array_equal(unflatten(flat, T), x)


def test_true_successors_are_the_next_observations_unless_an_episode_was_cut():
    value = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    bootstrap_value = -value
    truncated = jnp.array([[False, True], [False, False], [True, False]])
    got = next_values(value, jnp.array([7.0, 8.0]), bootstrap_value, truncated)
    np.testing.assert_array_equal(got, [[3.0, -2.0], [5.0, 6.0], [-5.0, 8.0]])


@pytest.mark.parametrize("and_last", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
def test_values_of_truncated_steps_are_those_of_all_steps_and_a_cpu_computes_no_others(share, and_last):
    rng, calls = np.random.default_rng(0), []
    obs, memory = rng.random((9, E, 2, 3), np.float32), rng.random((9, E, 2), np.float32)
    truncated = rng.random((9, E)) < share

    def value(_, final):
        jax.debug.callback(lambda: calls.append(1))
        obs, (memory,) = final
        return jnp.tanh(obs).sum(-1) * memory  # [E, 2]

    got = jax.jit(lambda *final: truncated_values(value, None, final, truncated, and_last=and_last))(obs, (memory,))
    jax.effects_barrier()
    needed = truncated | and_last & (np.arange(9) == 8)[:, None]
    assert got.shape == (9, E, 2) and len(calls) == needed.sum(0).max()
    np.testing.assert_allclose(got[needed], (np.tanh(obs).sum(-1) * memory)[needed], rtol=1e-6)


def test_values_of_truncated_steps_of_several_members_and_of_images(monkeypatch):
    rng = np.random.default_rng(0)
    images, truncated = rng.integers(0, 255, (2, T, E, 5, 5, 1), np.uint8), rng.random((2, T, E)) < 0.5

    def value(_, images):
        return images.astype(jnp.float32).mean((1, 2, 3))

    got = jax.jit(jax.vmap(lambda x, truncated: truncated_values(value, None, x, truncated)))(images, truncated)
    np.testing.assert_allclose(got[truncated], images.mean((3, 4, 5))[truncated], rtol=1e-6)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args))  # as on other devices
    np.testing.assert_allclose(truncated_values(value, None, images[0], truncated[0]), images[0].mean((2, 3, 4)), rtol=1e-6)


def test_keys_of_a_step_do_not_depend_on_the_number_of_environments():
    keys = jax.random.split(jax.random.key(0), E)
    after, steps = split_keys(keys, T)
    assert after.shape == (E,) and steps.shape == (T, E)
    fewer, fewer_steps = split_keys(keys[:2], T)
    assert bool((fewer == after[:2]).all()) and bool((fewer_steps == steps[:, :2]).all())
    assert len(np.unique(jax.random.key_data(jnp.concatenate([after[None], steps])).reshape(-1, 2), axis=0)) == (T + 1) * E


@pytest.mark.parametrize("iterations", [5, 2**31, 2**32 + 1])
def test_the_age_of_parameters_is_right_where_counters_would_wrap(iterations):
    version = parameter_version(counter(iterations - 3).low)
    assert parameter_age(counter(iterations), version) == 3.0
    assert version.dtype == jnp.uint32
