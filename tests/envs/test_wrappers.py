"""Wrappers of one environment, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from tests.support.corridor import Corridor

LEFT, RIGHT = 0, 1


def play(env, actions):
    """Steps one environment: the observations (the first one too), and the flags."""
    step = jax.jit(env.step)
    state, obs = env.reset(jax.random.key(0))
    observations, terminations, truncations = [obs], [], []
    for action in actions:
        state, obs, _, terminated, truncated = step(jax.random.key(1), state, jnp.int32(action))
        observations.append(obs)
        terminations.append(bool(terminated))
        truncations.append(bool(truncated))
    return np.stack(observations), terminations, truncations


def test_time_limit_truncates_at_its_step():
    env = envs.TimeLimit(Corridor(length=5, max_steps=100), 3)
    _, terminated, truncated = play(env, [RIGHT, LEFT, RIGHT])
    assert terminated == [False, False, False] and truncated == [False, False, True]


def test_time_limit_does_not_truncate_an_episode_that_terminates_at_the_limit():
    env = envs.TimeLimit(Corridor(length=3, max_steps=100), 3)
    _, terminated, truncated = play(env, [RIGHT, RIGHT, RIGHT])
    assert terminated == [False, False, True] and truncated == [False, False, False]


def test_time_limit_passes_earlier_truncations_and_restarts_after_a_reset():
    _, _, truncated = play(envs.TimeLimit(Corridor(length=9, max_steps=2), 5), [RIGHT, RIGHT])
    assert truncated == [False, True]
    venv = envs.vectorize(envs.TimeLimit(Corridor(length=9, max_steps=100), 2), 1)
    state, _ = venv.reset(jax.random.key(0))
    _, steps = jax.lax.scan(venv.step, state, jnp.ones((6, 1), jnp.int32))
    np.testing.assert_array_equal(steps.truncated[:, 0], [0, 1, 0, 1, 0, 1])
    np.testing.assert_array_equal(steps.final_obs[:, 0, 0], [1, 2, 1, 2, 1, 2])


def test_frame_stack_keeps_the_last_vectors_oldest_first():
    env = envs.FrameStack(Corridor(length=9), 3)
    obs, _, _ = play(env, [RIGHT, RIGHT, RIGHT, LEFT])
    np.testing.assert_array_equal(obs, [[0, 0, 0], [0, 0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 2]])
    assert env.observation_space == envs.Box(0, 9, (3,))


@pytest.mark.parametrize(("name", "shape"), [("Breakout-MinAtar", (10, 10, 8)), ("Catch-bsuite", (10, 5, 2))])
def test_frame_stack_puts_the_frames_of_images_into_the_channels(name, shape):
    single, env = envs.make(name), envs.FrameStack(envs.make(name), 2)
    actions = [0, 1, 2, 0]
    frames, _, _ = play(single, actions)
    frames = frames.reshape(len(frames), *shape[:2], -1)
    stacked, _, _ = play(env, actions)
    assert stacked.shape[1:] == env.observation_space.shape == shape
    channels = shape[2] // 2
    np.testing.assert_array_equal(stacked[..., channels:], frames)
    np.testing.assert_array_equal(stacked[1:, ..., :channels], frames[:-1])
    np.testing.assert_array_equal(stacked[0, ..., :channels], frames[0])


def test_frame_stack_restarts_after_a_reset_and_keeps_the_true_last_observation():
    venv = envs.vectorize(envs.FrameStack(Corridor(length=2), 2), 1)
    state, _ = venv.reset(jax.random.key(0))
    _, steps = jax.lax.scan(venv.step, state, jnp.ones((3, 1), jnp.int32))
    np.testing.assert_array_equal(steps.obs[:, 0], [[0, 1], [0, 0], [0, 1]])
    np.testing.assert_array_equal(steps.final_obs[:, 0], [[0, 1], [1, 2], [0, 1]])


class Mixed:
    """Observes a dict of a grid of integers, a category, and a tuple of a number and a category."""

    observation_space = envs.Dict(
        {
            "grid": envs.Box(0, 9, (2, 2), jnp.int32),
            "category": envs.Discrete(3),
            "pair": envs.Tuple((envs.Box(-1.0, 1.0, ()), envs.Discrete(2))),
        }
    )
    action_space = envs.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), self._observe(jnp.int32(0))

    def step(self, key, state, action):
        state = state + 1
        return state, self._observe(state), jnp.float32(0), state == 3, False

    def _observe(self, time):
        grid = jnp.arange(4, dtype=jnp.int32).reshape(2, 2) + time
        return {"grid": grid, "category": time % 3, "pair": (0.5 * jnp.float32(time), time % 2)}


def test_flatten_observation_of_mixed_parts():
    env = envs.FlattenObservation(Mixed())
    obs, _, _ = play(env, [0])
    # category one-hot, grid ravelled, then the pair: the order of the sorted names
    np.testing.assert_array_equal(obs, [[1, 0, 0, 0, 1, 2, 3, 0, 1, 0], [0, 1, 0, 1, 2, 3, 4, 0.5, 0, 1]])
    assert obs.dtype == np.float32
    space = env.observation_space
    np.testing.assert_array_equal(space.low, [0, 0, 0, 0, 0, 0, 0, -1, 0, 0])
    np.testing.assert_array_equal(space.high, [1, 1, 1, 9, 9, 9, 9, 1, 1, 1])
    assert space.contains(obs[1]) and envs.vectorize(env, 2).reset(jax.random.key(0))[1].shape == (2, 10)


def test_observations_that_are_dicts_are_reset_leaf_by_leaf():
    venv = envs.vectorize(Mixed(), 2)
    state, obs = venv.reset(jax.random.key(0))
    assert obs["grid"].shape == (2, 2, 2)
    _, steps = jax.lax.scan(venv.step, state, jnp.zeros((4, 2), jnp.int32))
    np.testing.assert_array_equal(steps.obs["grid"][:, 0, 0, 0], [1, 2, 0, 1])
    np.testing.assert_array_equal(steps.final_obs["pair"][0][:, 1], [0.5, 1, 1.5, 0.5])


def test_flatten_observation_of_a_discrete_space_is_one_hot():
    env = envs.FlattenObservation(envs.make("FrozenLake-misc"))
    _, obs = env.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs, np.eye(16)[0])
    assert env.observation_space == envs.Box(0, 1, (16,))


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="TimeLimit: max_steps=0: use an integer of at least 1"):
        envs.TimeLimit(Corridor(), 0)
    assert envs.TimeLimit(Corridor(), np.int64(10)).max_steps == 10  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the environment is None, which has no reset; pass an environment"):
        envs.TimeLimit(None, 10)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"num_frames=1.5: use an integer"):
        envs.FrameStack(Corridor(), 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"cannot stack observations of Dict.*apply FlattenObservation first"):
        envs.FrameStack(Mixed(), 2)


def test_wrappers_take_several_agents():
    """Each agent's observation becomes what that of one agent becomes; the time limit ends the episode of all."""

    class Pair:
        agents = ("a", "b")
        observation_space = envs.Dict({"seen": envs.Box(0, 9, (2,)), "turn": envs.Discrete(2)})
        action_space = envs.Discrete(2)

        def observe(self, state):
            return {"seen": jnp.stack([jnp.full(2, state), jnp.full(2, 2 * state)]).astype(jnp.float32), "turn": jnp.arange(2)}

        def reset(self, key):
            return jnp.int32(0), self.observe(jnp.int32(0))

        def step(self, key, state, action):
            return state + 1, self.observe(state + 1), jnp.ones(2), jnp.array([True, False]), jnp.bool(False)

        def action_mask(self, state):
            return jnp.full((2, 2), state >= 0)

        def global_state(self, state):
            return jnp.full(3, state, jnp.float32)

    env = envs.FrameStack(envs.TimeLimit(envs.FlattenObservation(Pair()), 3), 2)
    assert envs.has_agents(env) and not envs.has_agents(envs.TimeLimit(Corridor(length=5, max_steps=100), 3))
    state, obs = env.reset(jax.random.key(0))
    truncations = []
    for _ in range(3):
        state, obs, _, _, truncated = env.step(jax.random.key(1), state, jnp.zeros(2, jnp.int32))
        truncations.append(bool(truncated))
    assert truncations == [False, False, True]
    np.testing.assert_array_equal(obs, [[2, 2, 1, 0, 3, 3, 1, 0], [4, 4, 0, 1, 6, 6, 0, 1]])
    np.testing.assert_array_equal(env.global_state(state), [3, 3, 3])
    assert env.action_mask(state).shape == (2, 2) and env.observation_space.shape == (8,)
