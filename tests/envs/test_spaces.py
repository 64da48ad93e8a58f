"""Spaces: sampling, membership, equality."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs import spaces

KEYS = jax.random.split(jax.random.key(0), 2000)


def samples(space):
    return jax.jit(jax.vmap(space.sample))(KEYS)


def test_discrete_samples_every_value():
    x = samples(envs.Discrete(3))
    assert x.dtype == jnp.int32 and set(np.unique(x)) == {0, 1, 2}


def test_box_samples_each_element_within_its_own_bounds():
    x = np.asarray(samples(envs.Box([0, -5, -np.inf, 2, -np.inf], [1, 5, np.inf, np.inf, -3], (5,))))
    assert x.dtype == np.float32
    np.testing.assert_allclose(x.mean(0), [0.5, 0, 0, 3, -4], atol=0.25)  # exponential tails have mean 1
    np.testing.assert_allclose(x.std(0), [1 / 12**0.5, 10 / 12**0.5, 1, 1, 1], rtol=0.1)
    assert x[:, 0].min() >= 0 and x[:, 0].max() <= 1 and x[:, 3].min() >= 2 and x[:, 4].max() <= -3


def test_box_samples_the_widest_bounds_without_overflow():
    limit = np.finfo(np.float32).max
    x = np.asarray(samples(envs.Box(-limit, limit, ())))
    assert np.all(np.isfinite(x)) and x.max() > limit / 2


def test_integer_boxes_include_both_bounds():
    x = samples(envs.Box(250, 255, (2,), jnp.uint8))
    assert x.dtype == jnp.uint8 and set(np.unique(x)) == {250, 251, 252, 253, 254, 255}


@pytest.mark.parametrize(
    ("space", "inside", "outside"),
    [
        (envs.Discrete(3), [0, 2], [-1, 3, 1.0, [1]]),
        (envs.Box(0, [1, 2], (2,)), [[1, 2], [0.5, 0]], [[2, 2], [1, -1], [1], [np.nan, 0]]),
        (envs.Tuple((envs.Discrete(2), envs.Box(0, 1, ()))), [(1, 0.5)], [(1, 2), (2, 0.5), (1,), [1, 0.5]]),
        (envs.Dict({"a": envs.Discrete(2), "b": envs.Discrete(3)}), [{"b": 2, "a": 1}], [{"a": 2, "b": 1}, {"a": 1}]),
    ],
)
def test_contains(space, inside, outside):
    assert all(space.contains(x) for x in inside)
    assert not any(space.contains(x) for x in outside)


@pytest.mark.parametrize(
    "space",
    [
        envs.Discrete(4),
        envs.Box(-1, 1, (2, 3)),
        envs.Tuple((envs.Discrete(2), envs.Box(0, 1, (3,)))),
        envs.Dict({"b": envs.Discrete(2), "a": envs.Tuple((envs.Box(0, 255, (2,), jnp.uint8),))}),
    ],
)
def test_samples_are_contained_and_flatten_into_the_flat_space(space):
    x = space.sample(KEYS[0])
    assert space.contains(x)
    flat = spaces.flatten(space, x)
    assert flat.dtype == jnp.float32 and spaces.flat_space(space).contains(flat)
    matches = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, x, spaces.struct(space))
    assert all(jax.tree.leaves(matches))


def test_spaces_are_equal_by_value_and_can_be_keys():
    assert envs.Box(0, 1, (2,)) == envs.Box([0, 0], np.ones(2), (2,)) != envs.Box(0, 2, (2,))
    assert envs.Box(0, 1, (2,)) != envs.Box(0, 1, (2,), jnp.int32) and envs.Box(0, 1, (2,)) != envs.Box(0, 1, (1, 2))
    assert len({envs.Dict({"a": envs.Box(0, 1, ())}), envs.Dict({"a": envs.Box(0, 1, ())}), envs.Discrete(2)}) == 2


def test_spaces_print_briefly():
    image = envs.Box(0, 255, (84, 84, 4), jnp.uint8)
    assert repr(envs.Tuple((envs.Discrete(2), image))) == (
        "Tuple(spaces=(Discrete(2), Box(0, 255, (84, 84, 4), uint8)))"
    )
    assert repr(envs.Box(-np.inf, [1, 2], (2,))) == "Box(-inf, [1. 2.], (2,), float32)"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: envs.Discrete(0), "n must be at least 1"),
        (lambda: envs.Discrete(2, jnp.float32), "is no integer dtype"),
        (lambda: envs.Box(0, [1, 1, 1], (2,)), r"high of shape \(3,\) does not broadcast to shape=\(2,\)"),
        (lambda: envs.Box([0, 2], 1, (2,)), r"low=2.0 is above high=1.0 at index \(1,\)"),
    ],
)
def test_impossible_spaces_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()
