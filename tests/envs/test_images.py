"""Images in other layouts than networks convolve: they are named, and `AsImage` mends them."""

import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.envs.images import unseen_images


class Seen:
    """Random observations of a space."""

    name, action_space = "Seen", envs.Discrete(2)

    def __init__(self, space):
        self.observation_space = space

    def reset(self, key):
        return jnp.int32(0), self.observation_space.sample(key)

    def step(self, key, state, action):
        return state + 1, self.observation_space.sample(key), jnp.float32(1), state >= 1, jnp.asarray(False)


def pixels(*shape):
    return envs.Box(0, 255, shape, jnp.uint8)


@pytest.mark.parametrize(
    ("space", "told"),
    [
        (pixels(84, 84), True),
        (pixels(4, 84, 84), True),
        (pixels(3, 64, 96), True),
        (pixels(1, 28, 28), True),
        (envs.Box(0, 1, (4, 84, 84)), True),
        (pixels(4, 84, 84, 3), True),
        (envs.Dict({"camera": pixels(64, 64, 3), "speed": envs.Box(-1, 1, (4,))}), True),
        (pixels(84, 84, 4), False),
        (pixels(210, 160, 3), False),
        (pixels(10, 10, 4), False),
        (envs.Box(-np.inf, np.inf, (64, 40)), False),
        (envs.Box(0, 1, (8, 8, 119)), False),
        (envs.Dict({"grid": envs.Box(0, 5, (12, 12), jnp.int32), "speed": envs.Box(-1, 1, (4,))}), False),
        (envs.Dict({"table": envs.Box(0, 1, (40, 40, 3)), "speed": envs.Box(-1, 1, (4,))}), False),
    ],
    ids=str,
)
def test_images_that_networks_take_for_vectors_are_named(space, told):
    notes = list(unseen_images(Seen(space)))
    assert len(notes) == told and all("msrl_jax.envs.AsImage" in note for note in notes)
    if isinstance(space, envs.Dict) and told:
        assert notes[0].startswith("part ['camera'] of the observations of Seen looks like an image, uint8[64, 64, 3]")


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((8, 9), lambda x: x[..., None]),
        ((4, 8, 9), lambda x: np.stack([*x], -1)),
        ((8, 9, 4), lambda x: x),
        ((8, 9, 8), lambda x: x),
        ((8, 8, 16), lambda x: x),
        ((20, 7, 7), lambda x: np.stack([*x], -1)),
        ((4, 8, 9, 3), lambda x: np.concatenate([*x], -1)),
        ((4, 3, 8, 9), lambda x: np.concatenate([np.stack([*frame], -1) for frame in x], -1)),
    ],
    ids=lambda x: str(x) if isinstance(x, tuple) else "",
)
def test_channels_and_frames_come_last(shape, turned):
    env = envs.AsImage(Seen(pixels(*shape)))
    raw = Seen(pixels(*shape)).reset(jax.random.key(0))[1]
    obs = env.reset(jax.random.key(0))[1]
    np.testing.assert_array_equal(obs, turned(np.asarray(raw)))
    assert env.observation_space == envs.Box(0, 255, obs.shape, jnp.uint8) and obs.dtype == jnp.uint8
    assert not list(unseen_images(env))


def test_parts_become_channels_of_one_image():
    space = envs.Dict(
        {
            "a": envs.Tuple((pixels(2, 8, 9), envs.Discrete(3, start=5))),
            "b": envs.Box([-1, 0], [1, np.inf], (2,)),
            "c": envs.Box(0, 2, (8, 9)),
        }
    )
    env = envs.AsImage(Seen(space))
    raw, obs = space.sample(jax.random.key(1)), env.observe(space.sample(jax.random.key(1)))
    assert env.observation_space.shape == obs.shape == (8, 9, 2 + 3 + 2 + 1) and obs.dtype == jnp.float32
    np.testing.assert_array_equal(obs[..., :2], np.moveaxis(raw["a"][0], 0, -1).astype(np.float32) / 255)
    for i, x in enumerate([*np.eye(3)[raw["a"][1] - 5], *raw["b"]]):
        assert (obs[..., 2 + i] == np.float32(x)).all()
    np.testing.assert_array_equal(obs[..., -1], raw["c"])
    np.testing.assert_array_equal(env.observation_space.low[3, 4], [0, 0, 0, 0, 0, -1, 0, 0])
    np.testing.assert_array_equal(env.observation_space.high[3, 4], [1, 1, 1, 1, 1, 1, np.inf, 2])
    assert env.observation_space.contains(obs)


def test_who_acts_in_a_film_sees_the_image():
    class Filmed(Seen):
        def film(self, act, seed, max_steps):
            return act(jnp.zeros((4, 8, 9), jnp.uint8)).shape, seed, max_steps

    assert envs.AsImage(Filmed(pixels(4, 8, 9))).film(lambda obs: obs, 3, 5) == ((8, 9, 4), 3, 5)
    assert not hasattr(envs.AsImage(Seen(pixels(4, 8, 9))), "film")


@pytest.mark.parametrize("space", [envs.Box(0, 1, (4,)), envs.Dict({"a": pixels(8, 8, 3), "b": pixels(9, 9, 3)})], ids=str)
def test_what_is_no_image_is_refused(space):
    with pytest.raises(ValueError, match=r"AsImage needs arrays .* Seen has observations"):
        envs.AsImage(Seen(space))


class Quarter(gymnasium.Env):
    """Frames with channels first; the newest says which of two actions pays."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 40, 40), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.show(), {}

    def show(self):
        self.side = int(self.np_random.integers(2))
        frames = np.zeros((4, 40, 40), np.uint8)
        frames[3, :, 20 * self.side : 20 * (self.side + 1)] = 255
        return frames

    def step(self, action):
        reward = float(action == self.side)
        self.steps += 1
        return self.show(), reward, False, self.steps == 5, {}


@pytest.mark.long
def test_images_of_simulators_are_told_of_and_mended(capfd, monkeypatch):
    plain = envs.GymnasiumEnvironment(Quarter, name="Quarter", num_workers=1)
    run = {
        "num_envs": 4,
        "unroll_length": 5,
        "num_minibatches": 1,
        "num_epochs": 1,
        "hidden_sizes": (8,),
        "total_steps": 20,
        "eval_episodes": 0,
        "progress": "lines",
        "policy": "MultiLearner:num_devices=1",
    }
    assert any("AsImage" in note for note in envs.check(plain, steps=6).notes)
    told = "the observations of Quarter looks like an image, uint8[4, 40, 40], but networks convolve"
    with monkeypatch.context() as patch, pytest.raises(TypeError, match="not callable"):
        patch.setattr(sys.modules["msrl_jax.run.training"], "_begin_run", None)  # what is said before it is enough
        msrl.train("ppo", plain, **run)
    assert capfd.readouterr().err.startswith(told)
    env = envs.AsImage(plain)
    result = msrl.train("ppo", env, **run)
    assert told not in capfd.readouterr().err
    assert env.observation_space == pixels(40, 40, 4) and result.act(np.zeros((40, 40, 4), np.uint8)).shape == ()
    kernels = [x.shape for path, x in jax.tree.leaves_with_path(result.state.params) if x.ndim == 4]
    assert kernels[0][2] == 4
    report = envs.check(env, steps=6)
    assert report.ok and not any("AsImage" in note for note in report.notes), report


@pytest.mark.slow
def test_vectors_of_simulators_are_flattened():
    class Parts(Quarter):
        observation_space = gymnasium.spaces.Dict({"side": gymnasium.spaces.Discrete(2)})

        def show(self):
            return {"side": int(super().show()[3, 0, -1] > 0)}

    report = envs.check(envs.FlattenObservation(envs.GymnasiumEnvironment(Parts, num_workers=1)), steps=6)
    assert report.ok, report
