"""Actor-critic networks: supported spaces, and initial values."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.algorithms import PPO
from msrl_jax.envs import Box, Dict, Discrete, MultiDiscrete
from msrl_jax.envs.actions import action_transform
from msrl_jax.networks.layers import ACTIVATIONS
from msrl_jax.networks.policy_and_value import policy_and_value
from msrl_jax.networks.torso import make_torso

CONFIG = PPO(hidden_sizes=(8, 6))
FLAT = PPO(hidden_sizes=(8, 6), network="mlp")
VECTOR = Box(-1.0, 1.0, (5,))


@pytest.mark.parametrize("shared_torso", [False, True])
def test_policy_and_value_are_the_parts_of_the_whole(shared_torso):
    network = policy_and_value(make_torso(VECTOR, CONFIG), Discrete(3), shared_torso=shared_torso)
    obs = jax.random.normal(jax.random.key(1), (4, 5))
    params = network.init(jax.random.key(0), obs)
    policy, value = network.apply(params, obs)
    np.testing.assert_array_equal(policy.logits, network.policy(params, obs).logits)
    np.testing.assert_array_equal(value, network.value(params, obs))
    assert policy.logits.shape == (4, 3) and value.shape == (4,)
    torsos = [name for name in params["params"] if "torso" in name]
    assert len(torsos) == (1 if shared_torso else 2)


def test_layers_start_orthogonal_and_the_policy_almost_uniform():
    network = policy_and_value(make_torso(VECTOR, CONFIG), Discrete(3))
    params = network.init(jax.random.key(0), jnp.zeros((1, 5)))["params"]
    kernel = np.asarray(params["actor_torso"]["Dense_0"]["kernel"])
    np.testing.assert_allclose(kernel @ kernel.T, 2 * np.eye(5), atol=1e-5)
    head = np.asarray(params["actor_head"]["kernel"])
    np.testing.assert_allclose(head.T @ head, 1e-4 * np.eye(3), atol=1e-9)


@pytest.mark.parametrize("batch_shape", [(), (2,), (3, 2)])
def test_images_are_convolved_by_default(batch_shape):
    network = policy_and_value(make_torso(Box(0.0, 1.0, (10, 10, 4)), CONFIG), Discrete(6))
    obs = jnp.ones((*batch_shape, 10, 10, 4), bool)
    params = network.init(jax.random.key(0), obs)
    assert params["params"]["critic_torso"]["Conv_0"]["kernel"].shape == (3, 3, 4, 16)
    assert params["params"]["critic_torso"]["Dense_0"]["kernel"].shape == (8 * 8 * 16, 8)
    assert network.value(params, obs).shape == batch_shape


@pytest.mark.long
def test_large_images_pass_through_three_convolutions():
    network = policy_and_value(make_torso(Box(0, 255, (84, 84, 4), np.uint8), CONFIG), Discrete(6))
    obs = np.random.default_rng(0).integers(0, 256, (2, 84, 84, 4), np.uint8)
    params = network.init(jax.random.key(0), obs)
    torso = params["params"]["actor_torso"]
    assert [torso[f"Conv_{i}"]["kernel"].shape for i in range(3)] == [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64)]
    assert torso["Dense_0"]["kernel"].shape == (7 * 7 * 64, 8)
    floats = policy_and_value(make_torso(Box(0.0, 1.0, (84, 84, 4)), CONFIG), Discrete(6))
    np.testing.assert_array_equal(network.value(params, obs), floats.value(params, obs.astype(np.float32) / 255))


def test_images_may_be_flattened_instead():
    network = policy_and_value(make_torso(Box(0.0, 1.0, (10, 10, 4)), FLAT), Discrete(6))
    params = network.init(jax.random.key(0), jnp.zeros((1, 10, 10, 4)))
    assert params["params"]["actor_torso"]["Dense_0"]["kernel"].shape == (400, 8)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "network", "error", "remedy"),
    [
        (Dict({"a": VECTOR}), Discrete(2), "cnn", ValueError, r"got Dict.*use network='mlp'"),
        (VECTOR, Dict({"a": VECTOR}), "auto", TypeError, "Discrete space or a Box of floats"),
        (VECTOR, MultiDiscrete([2, 1025]), "auto", ValueError, r"an integer of 1,025 values, .* at most 1,024; give its"),
        (VECTOR, Box(2**31, 2**31 + 1, (), "uint32"), "auto", ValueError, "exceed int32; wrap the environment"),
        (VECTOR, Discrete(2), "cnn", ValueError, "network='mlp'"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(observation_space, action_space, network, error, remedy):
    with pytest.raises(error, match=remedy):
        policy_and_value(make_torso(observation_space, PPO(hidden_sizes=(8, 6), network=network)), action_space)


def test_actions_are_stretched_to_their_bounds_and_clipped():
    transform = action_transform(Box(np.float32([-2, 0]), np.float32([2, 10]), (2,)))
    actions = jnp.array([[0.0, 0.0], [1.0, 1.0], [-1.0, -1.0], [0.5, 0.5], [7.0, -7.0]])
    want = [[0.0, 5.0], [2.0, 10.0], [-2.0, 0.0], [1.0, 7.5], [2.0, 0.0]]
    np.testing.assert_allclose(transform(actions), want)


def test_actions_without_bounds_pass_and_half_bounds_only_clip():
    transform = action_transform(Box(np.float32([[-np.inf, -0.5]]), np.float32([[np.inf, np.inf]]), (1, 2)))
    np.testing.assert_allclose(transform(jnp.array([[30.0, 30.0], [-30.0, -30.0]])), [[[30.0, 30.0]], [[-30.0, -0.5]]])


def test_every_activation_of_a_config_is_there():
    assert set(ACTIVATIONS) == set(typing.get_args(typing.get_type_hints(PPO)["activation"]))
