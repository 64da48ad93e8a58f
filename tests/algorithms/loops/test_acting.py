"""The functions that the loops of the actor-critic algorithms share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.algorithms.loops.acting import flatten, next_values, parameter_age, parameter_version, split_keys, unflatten
from msrl_jax.counters import counter

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


@pytest.mark.parametrize("wrong", range(4))
def test_values_of_other_shapes_are_refused(wrong):
    arguments = [jnp.zeros((T, E)), jnp.zeros(E), jnp.zeros((T, E)), jnp.zeros((T, E), bool)]
    arguments[wrong] = arguments[wrong][..., :1]  # it would broadcast
    with pytest.raises(AssertionError, match="shape"):
        next_values(*arguments)


def test_keys_of_a_step_do_not_depend_on_the_number_of_environments():
    keys = jax.random.split(jax.random.key(0), E)
    after, steps = split_keys(keys, T)
    assert after.shape == (E,) and steps.shape == (T, E)
    fewer, fewer_steps = split_keys(keys[:2], T)
    assert bool((fewer == after[:2]).all()) and bool((fewer_steps == steps[:, :2]).all())
    assert len(np.unique(jax.random.key_data(jnp.concatenate([after[None], steps])).reshape(-1, 2), axis=0)) == (T + 1) * E


@pytest.mark.parametrize("iterations", [5, 2**31, 2**32 + 1])
def test_the_age_of_parameters_is_right_where_counters_would_wrap(iterations):
    version = parameter_version(counter(iterations - 3))
    assert parameter_age(counter(iterations), version) == 3.0
    assert version.dtype == jnp.uint32
