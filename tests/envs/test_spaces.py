"""Spaces: sampling, membership, equality."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs import spaces
from msrl_jax.envs.actions import action_transform, policy_actions

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
    limit = 0.99 * np.finfo(np.float32).max
    x = np.asarray(samples(envs.Box(-limit, limit, ())))
    assert np.all(np.isfinite(x)) and x.max() > limit / 2


@pytest.mark.parametrize(
    ("dtype", "largest"),
    [("float32", np.finfo(np.float32).max), ("float64", np.finfo(np.float32).max), ("float16", 65504), ("float32", 1e300)],
)
def test_the_largest_float_is_no_bound(dtype, largest):
    assert envs.Box(-largest, largest, (2,), dtype) == envs.Box(-np.inf, np.inf, (2,), dtype)
    one_sided = envs.Box([-largest, 0], [1, largest], (2,), dtype)
    assert one_sided == envs.Box([-np.inf, 0], [1, np.inf], (2,), dtype)


def test_integer_boxes_include_both_bounds():
    x = samples(envs.Box(250, 255, (2,), jnp.uint8))
    assert x.dtype == jnp.uint8 and set(np.unique(x)) == {250, 251, 252, 253, 254, 255}


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint32"])
def test_all_values_of_integers_and_bools_are_equally_likely(dtype):
    least, most = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    x = samples(envs.Box(least, most, (40,), dtype))
    assert x.dtype == dtype
    x = (np.asarray(x).astype(np.float64) - least) / (most - least)
    assert x.min() < 0.01 and x.max() > 0.99
    sixteenths = np.bincount(np.minimum((16 * x).astype(int).ravel(), 15), minlength=16) / x.size
    want = [0.5, *[0] * 14, 0.5] if dtype == "bool" else np.full(16, 1 / 16)
    np.testing.assert_allclose(sixteenths, want, atol=5 * np.sqrt(0.25 / x.size))


@pytest.mark.parametrize("space", [envs.Discrete(256, np.uint8), envs.Discrete(128, np.int8), envs.Discrete(5, start=-2)])
def test_discrete_samples_all_that_its_dtype_holds(space):
    x = np.asarray(jax.vmap(lambda key: jax.vmap(space.sample)(jax.random.split(key, 10)))(KEYS))
    assert x.dtype == space.dtype and set(np.unique(x)) == set(range(space.start, space.start + space.n))


@pytest.mark.parametrize("space", [envs.Discrete(3, np.int64), envs.Box(0, 5, (2,), np.int64), envs.Box(-1, 1, (), np.float64)])
def test_spaces_of_64_bits_have_values_of_32_where_jax_has_no_more(space):
    x = space.sample(KEYS[0])
    assert x.dtype.itemsize == 4 and action_transform(space)(jnp.zeros_like(x)).dtype == x.dtype


def test_integers_that_start_elsewhere_are_counted_from_their_start():
    space = envs.Discrete(3, start=10)
    assert space != envs.Discrete(3) and repr(space) == "Discrete(3, start=10)"
    assert [bool(space.contains(x)) for x in (9, 10, 12, 13)] == [False, True, True, False]
    nested = envs.Dict({"a": space, "b": envs.Tuple((envs.Discrete(2, np.int8, start=-128),))})
    flat = spaces.flatten(nested, {"a": jnp.array([10, 12]), "b": (jnp.array([-127, -128], jnp.int8),)})
    assert flat.tolist() == [[1, 0, 0, 0, 1], [0, 0, 1, 1, 0]] and spaces.flat_space(nested).shape == (5,)
    counted = jnp.array([0, 2])
    assert action_transform(space)(counted).tolist() == [10, 12]
    assert policy_actions(space, np.array([10, 12])).tolist() == [0, 2]


@pytest.mark.parametrize(
    ("space", "inside", "outside"),
    [
        (envs.Discrete(3), [0, 2], [-1, 3, 1.0, [1]]),
        (envs.Discrete(1000, start=-5), [np.int8(3), np.int8(-5), np.uint8(255)], [np.int8(-6), np.uint32(2**32 - 1)]),
        (envs.Discrete(9, start=300), [np.int16(308)], [np.uint8(44), np.int8(127)]),
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
    assert repr(envs.Tuple((envs.Discrete(2), image))) == ("Tuple(spaces=(Discrete(2), Box(0, 255, (84, 84, 4), uint8)))")
    assert repr(envs.Box(-np.inf, [1, 2], (2,))) == "Box(-inf, [1. 2.], (2,), float32)"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: envs.Discrete(0), "Discrete: n=0: use an integer of at least 1"),
        (lambda: envs.Discrete(4, jnp.uint32, start=3_000_000_000), "start=3000000000: use an integer of at most 2147483644"),
        (lambda: envs.Discrete(2, jnp.float32), "is not an integer dtype"),
        (lambda: envs.MultiDiscrete([2, 3], [1, 1]), "is not an integer dtype; use int32; other lower bounds need a Box"),
        (lambda: envs.Box(0, 1, (2,), None), "Box: dtype=None is not a numeric dtype"),
        (lambda: envs.Box(0, 1, 3), r"Box: shape=3 is not a shape; use a tuple of integers, such as \(3,\)"),
        (lambda: envs.Discrete(200, jnp.int8), r"the value 199 of Discrete\(200\) does not fit int8, which holds -128 to 127"),
        (lambda: envs.MultiDiscrete([2, 300], jnp.uint8), "Box: high=299 does not fit uint8, which holds 0 to 255"),
        (lambda: envs.Box(0, np.inf, (2,), jnp.int32), "Box: high=inf does not fit int32"),
        (lambda: envs.Box(np.nan, 2, (2,)), "Box: low is nan"),
        (lambda: envs.Box(0, "two", (2,)), "Box: high='two'; use a number"),
        (lambda: envs.Box(0, [1, 1, 1], (2,)), r"high of shape \(3,\) does not broadcast to shape=\(2,\)"),
        (lambda: envs.Box([0, 2], 1, (2,)), r"low=2.0 is above high=1.0 at index \(1,\)"),
    ],
)
def test_impossible_spaces_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_compound_spaces_say_what_they_are_made_of():
    with pytest.raises(TypeError, match="pass one tuple of spaces"):
        envs.Tuple(envs.Discrete(2))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pass one dict of spaces by name"):
        envs.Dict([("a", envs.Discrete(2))])  # type: ignore[arg-type]
