"""Environments with a privileged state: what is seen of them, through wrappers, and in words what does not fit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs.masks import MaskedObservation
from msrl_jax.envs.privileged import PrivilegedObservation, actor_obs, with_privileged, with_privileged_of
from msrl_jax.envs.suites.brax_env import limited
from tests.support.privileged import Seen, Unseen, cartpole


def test_only_those_who_ask_for_it_see_it():
    env, both = cartpole(), with_privileged(cartpole())
    _, plain = envs.vectorize(env, 3).reset(jax.random.key(0))
    venv = envs.vectorize(both, 3)
    state, obs = venv.reset(jax.random.key(0))
    assert plain.shape == (3, 2) and isinstance(obs, PrivilegedObservation)
    np.testing.assert_array_equal(obs.obs, plain)
    np.testing.assert_array_equal(obs.privileged_state[:, :2], plain)
    _, t = venv.step(state, jnp.zeros(3, jnp.int32))
    np.testing.assert_array_equal(t.final_obs.obs, t.final_obs.privileged_state[:, :2])
    assert with_privileged(Unseen()) == Unseen() and with_privileged(both) is both
    assert with_privileged(envs.Unprivileged(env)).observation_space == env.observation_space


def test_the_two_parts_of_observations_with_and_without_masks():
    obs, state, mask = jnp.ones(2), jnp.zeros(3), jnp.array([True, False])
    both = PrivilegedObservation(obs, state)
    masked = MaskedObservation(both, mask)
    assert actor_obs(both) is obs
    assert actor_obs(masked) == (obs, mask) and actor_obs(obs) is obs
    assert with_privileged_of(masked, 5) == ((5, state), mask) and with_privileged_of(obs, 5) == 5


def test_wrappers_keep_it():
    wrapped = with_privileged(envs.FrameStack(envs.TimeLimit(envs.FlattenObservation(Seen()), 5), 2))
    _, obs = wrapped.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs.obs, [1, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(obs.privileged_state["obs"], [1, 0, 0])
    assert abs(obs.privileged_state["sign"]) == 1


@pytest.mark.long
def test_both_parts_are_normalized_each_by_its_own_statistics():
    venv = envs.NormalizeObservation(envs.vectorize(with_privileged(cartpole()), 64))
    state, obs = venv.reset(jax.random.key(0))
    for part in obs:
        np.testing.assert_allclose(part.mean(0), 0, atol=1e-5)
        np.testing.assert_allclose(part.std(0), 1, rtol=1e-3)
    assert jax.tree.map(jnp.shape, venv.observation_space.sample(jax.random.key(0))) == ((2,), (4,))
    raw = jnp.ones((5, 2))
    both = PrivilegedObservation(raw, jnp.ones((5, 4)))
    np.testing.assert_array_equal(venv.observe(state, raw), venv.observe(state, both).obs)


def test_parameters_that_are_drawn_can_be_seen():
    @dataclasses.dataclass(frozen=True)
    class Heavy(Unseen):
        mass: float = 1.0
        default_params = property(lambda self: {"mass": self.mass})

        def with_params(self, params):
            return dataclasses.replace(self, **params)

        def step(self, key, state, action):
            state, obs, reward, terminated, truncated = super().step(key, state, action)
            return state, obs, reward * self.mass, terminated, truncated

        def privileged_state(self, state):
            return jnp.stack([state.sign, jnp.float32(self.mass)])

    venv = envs.vectorize(with_privileged(envs.RandomizeParams(Heavy(), {"mass": envs.uniform(1, 2)})), 8)
    state, obs = venv.reset(jax.random.key(0))
    _, t = venv.step(state, jnp.zeros(8, jnp.int32))
    assert len(np.unique(obs.privileged_state[:, 1])) == 8
    np.testing.assert_allclose(t.reward, obs.privileged_state.prod(1), rtol=1e-6)


class Playground:
    """An environment with the states of MuJoCo Playground, which walks along a line."""

    action_size = 1

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class State:
        data: jax.Array
        obs: dict
        reward: jax.Array
        done: jax.Array
        metrics: dict

    def _state(self, x, reward):
        obs = {"state": x[None] + 1, "privileged_state": jnp.stack([x, -x])}
        return self.State(x, obs, reward, jnp.float32(0), {"reward/walk": reward})

    def reset(self, key):
        return self._state(jax.random.uniform(key), jnp.float32(0))

    def step(self, state, action):
        return self._state(state.data + action[0], action[0])


def test_playground_tells_actors_one_part_of_its_observations_and_critics_the_other():
    env = limited(Playground(), "playground:Line", 10, 2)
    assert env.observation_space.shape == (1,)
    both = with_privileged(env)
    state, _ = both.reset(jax.random.key(0))
    _, obs, reward, *_ = both.step(jax.random.key(1), state, jnp.array([0.5]))
    x = state.env_state.data + 1
    np.testing.assert_allclose(obs.obs, [x + 1])
    np.testing.assert_allclose(obs.privileged_state, [x, -x])
    assert float(reward) == 1 and not hasattr(envs.Unprivileged(env).privileged_state, "shape")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("text", "Seen.privileged_state returned a str; return an array of numbers, or a dict or a tuple of them"),
        (jax.random.key(0), r"privileged_state returned key<fry>\[\]; return an array of numbers"),
        (jnp.zeros((0,)), r"Seen.privileged_state is Box\(.*\), which has no elements"),
        ({}, "Seen.privileged_state returned an empty dict"),
    ],
    ids=["text", "key", "empty", "nothing"],
)
def test_what_is_no_privileged_state(given, message):
    class Odd(Seen):
        name = "Seen"

        def privileged_state(self, state):
            return given

    with pytest.raises(TypeError, match=message):
        with_privileged(Odd())
