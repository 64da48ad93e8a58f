"""The gymnax adapter: every environment against gymnax's own step, parameters, and what it refuses."""

import functools
import urllib.error

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments.classic_control.cartpole import CartPole
from gymnax.utils import load_mnist

from msrl_jax import envs
from msrl_jax.envs.suites.gymnax_env import GymnaxEnvironment

NUM_STEPS, NUM_ENVS = 600, 2
COUNTERS = ("total_bad_episodes", "denoised_return")  # DeepSea carries them across resets; nothing depends on them


def check_against_gymnax(name, **arguments):
    """Rolls out, and lets gymnax's own autoreset step redo every single step from the same states."""
    theirs, params = gymnax.make(name, **arguments)
    limit = type(params.max_steps_in_episode)(min(params.max_steps_in_episode, 150))
    params = params.replace(max_steps_in_episode=limit)
    env = envs.make(name, max_steps_in_episode=limit, **arguments)
    venv = envs.vectorize(env, NUM_ENVS)

    def redo(state, action):
        key = jax.random.split(state.key)[1]
        return theirs.step(key, state.env_state, action, params)

    def step(state, key):
        action = jax.vmap(env.action_space.sample)(jax.random.split(key, NUM_ENVS))
        next_state, time_step = venv.step(state, action)
        return next_state, (next_state.env_state, time_step, jax.vmap(redo)(state, action))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
    def run(key):
        state, obs = venv.reset(key)
        _, record = jax.lax.scan(step, state, jax.random.split(key, NUM_STEPS))
        return obs, record

    first, (our_state, time_step, reference) = run(jax.random.key(1))
    obs, env_state, reward, terminated, truncated, info = reference

    assert np.any(time_step.terminated | time_step.truncated)
    np.testing.assert_array_equal(time_step.terminated, terminated)
    np.testing.assert_array_equal(time_step.truncated, truncated)
    close = {"rtol": 1e-5, "atol": 1e-6}  # XLA fuses the two, and so rounds them, each in its way
    np.testing.assert_allclose(time_step.reward, reward, **close)
    np.testing.assert_allclose(time_step.obs, obs, **close)
    np.testing.assert_allclose(time_step.final_obs, info["final_observation"], **close)
    for (path, ours), want in zip(jax.tree_util.tree_leaves_with_path(our_state), jax.tree.leaves(env_state), strict=True):
        if path[0].name not in COUNTERS:
            np.testing.assert_allclose(ours, want, **close, err_msg=str(path))

    space = env.observation_space
    assert first.shape == (NUM_ENVS, *space.shape) and first.dtype == time_step.obs.dtype == space.dtype
    assert time_step.reward.dtype == jnp.float32
    return env, time_step


SLOW = ("Freeway-MinAtar", "Seaquest-MinAtar")  # they compile for 20 s each
EVERY = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in gymnax.registered_envs
    if name != "MNISTBandit-bsuite"
]


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_environment_steps_as_gymnax_does(name):
    check_against_gymnax(name)


@pytest.mark.parametrize(
    ("name", "arguments", "shape", "limit"),
    [
        ("DeepSea-bsuite", {"size": 5}, (5, 5), 5),
        ("FrozenLake-misc", {"map_name": "8x8", "is_slippery": False}, (), 200),
        ("Pong-misc", {"width": 20, "max_steps_in_episode": 9}, (30, 20, 3), 9),
    ],
)
def test_constructor_arguments_reach_gymnax_and_the_defaults_follow_them(name, arguments, shape, limit):
    env = envs.make(name, **arguments)
    _, obs = jax.eval_shape(env.reset, jax.random.key(0))
    assert env.observation_space.shape == obs.shape == shape and env.params.max_steps_in_episode == limit


def test_an_environment_with_constructor_arguments_steps_as_gymnax_does():
    env, _ = check_against_gymnax("FourRooms-misc", use_visual_obs=True)
    assert env.observation_space.shape == (13, 13, 2)


def test_states_can_be_carried_without_vectorize():
    env = envs.make("CartPole-v1")
    key = jax.random.key(0)
    state, obs = jax.eval_shape(env.reset, key)
    next_state, next_obs, reward, *flags = jax.eval_shape(env.step, key, state, 1)
    leaves = jax.tree.leaves((state, obs, next_state, next_obs, reward, flags))
    assert not any(leaf.weak_type for leaf in leaves)
    assert jax.tree.structure(state) == jax.tree.structure(next_state)


def test_params_change_the_dynamics():
    venv = envs.vectorize(envs.make("Pendulum-v1", max_steps_in_episode=7), 1)
    state, _ = venv.reset(jax.random.key(0))
    _, steps = jax.lax.scan(venv.step, state, jnp.zeros((21, 1, 1)))
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated), [6, 13, 20])
    assert envs.make("CartPole-v1", gravity=1).params.gravity == 1.0
    assert isinstance(envs.make("CartPole-v1", gravity=1).params.gravity, float)


def test_spaces_equal_gymnax():
    env = envs.make("CartPole-v1")
    assert env.action_space == envs.Discrete(2)
    np.testing.assert_allclose(env.observation_space.high, [4.8, np.inf, 2 * 12 * np.pi / 180, np.inf], rtol=1e-6)
    np.testing.assert_array_equal(env.observation_space.low, -env.observation_space.high)
    assert envs.make("Pendulum-v1").action_space == envs.Box(-2, 2, (1,))
    assert envs.make("FrozenLake-misc").observation_space == envs.Discrete(16)
    assert envs.make("Catch-bsuite").observation_space.dtype == np.float32  # gymnax declares int32 and emits float32


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_steps": 10}, r"no parameter 'max_steps' \(did you mean 'max_steps_in_episode'\?\); .*gravity"),
        ({"xyzzy": 10}, r"no parameter 'xyzzy'; it has .*max_steps_in_episode"),
        ({"max_steps_in_episode": 10.5}, r"max_steps_in_episode=10.5 does not fit; its default is 500 \(int\)"),
        ({"gravity": "high"}, r"gravity='high' does not fit; its default is 9.8 \(float\)"),
        ({"gravity": float("inf")}, r"gravity=inf does not fit"),
        ({"gravity": True}, r"gravity=True does not fit"),
    ],
)
def test_wrong_parameters_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        envs.make("CartPole-v1", **params)


@pytest.mark.parametrize(
    ("size", "message"),
    [("20", "size='20' does not fit; its default is 8"), (-1, r"cannot be made with \{'size': -1\}: Only non-negative")],
)
def test_wrong_arguments_of_a_constructor_are_named(size, message):
    with pytest.raises(ValueError, match=f"^DeepSea-bsuite:? {message}"):
        envs.make("DeepSea-bsuite", size=size)


def test_a_gymnax_environment_with_its_own_step_is_refused():
    class Odd(CartPole):
        def step(self, key, state, action, params=None):
            return super().step(key, state, 1 - action, params)

    with pytest.raises(ValueError, match="Odd overrides gymnax's step, which is not called here"):
        GymnaxEnvironment(Odd())


def test_without_its_data_the_mnist_bandit_says_what_to_do(monkeypatch):
    def offline(*_):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(load_mnist, "_download", offline)
    with pytest.raises(RuntimeError, match=r"MNISTBandit-bsuite could not load .*no network.* into /tmp/mnist"):
        envs.make("MNISTBandit-bsuite")
