"""Legal actions of environments: where observations carry them, what wrappers do with them, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.data.experience import RecordedEnvironment
from msrl_jax.envs.masks import check_returns_not_nan, only_legal, sample_legal
from tests.support.corridor import Corridor
from tests.support.maze import JUMP, LEFT, RIGHT, Maze, legal


def play(venv, actions):
    """All time steps of a vector environment, as NumPy arrays, and its first observations."""

    def run(key):
        state, obs = venv.reset(key)
        return obs, jax.lax.scan(venv.step, state, jnp.int32(actions))[1]

    return jax.device_get(jax.jit(run)(jax.random.key(0)))


@pytest.fixture(scope="module")
def steps():
    """Sixty steps to the right, of three mazes; right is always legal."""
    return play(envs.vectorize(Maze(), 3), np.full((60, 3), RIGHT))


def test_every_observation_has_its_legal_actions(steps):
    first, t = steps
    for x in (first, t.obs, t.final_obs):
        assert isinstance(x, envs.MaskedObservation)
        np.testing.assert_array_equal(x.action_mask, legal(x.obs[..., 0].astype(int), 4))
    assert t.terminated.any() and not t.final_obs.action_mask[t.terminated].any()
    assert t.obs.action_mask.any(-1).all() and np.isfinite(t.reward).all(), "an end without legal actions is no fault"


def test_an_environment_that_forbids_nothing_keeps_its_rewards_to_the_bit(steps):
    class Plain(Maze):
        action_mask = None

    first, t = play(envs.vectorize(Plain(), 3), np.full((60, 3), RIGHT))
    for plain, masked in ((first, steps[0]), (t.obs, steps[1].obs), (t.final_obs, steps[1].final_obs)):
        np.testing.assert_array_equal(plain, masked.obs)
    assert t.reward.tobytes() == steps[1].reward.tobytes()


@pytest.mark.parametrize(
    ("env", "action"),
    [(Maze(), LEFT), (Maze(stuck=2), RIGHT), (Maze(length=2, stuck=0), JUMP)],
    ids=["an illegal action", "no legal action", "no legal action at the start"],
)
def test_a_step_without_a_legal_action_or_with_an_illegal_one_has_a_reward_of_nan(env, action):
    first, t = play(envs.vectorize(env, 8), np.full((30, 8), action))
    before = np.concatenate([first.action_mask[None], t.obs.action_mask[:-1]])
    wrong = ~before[..., action] | (~t.final_obs.action_mask.any(-1) & ~t.terminated)
    np.testing.assert_array_equal(np.isnan(t.reward), wrong)
    assert wrong.any()
    with pytest.raises(ValueError, match=rf"Maze: {wrong.sum()} of 240 .* no legal action"):
        check_returns_not_nan(env, t.reward)


@pytest.mark.parametrize(
    "wrap",
    [
        envs.FlattenObservation,
        lambda env: envs.TimeLimit(env, 3),
        lambda env: envs.FrameStack(env, 2),
        lambda env: RecordedEnvironment(env, 4),
        lambda env: envs.TimeLimit(envs.FrameStack(env, 2), 9),
    ],
)
def test_a_wrapper_names_the_legal_actions_if_the_environment_does(wrap):
    assert not hasattr(wrap(Corridor()), "action_mask")
    env = wrap(Maze())
    state, obs = env.reset(jax.random.key(1))
    for action in (RIGHT, LEFT):
        np.testing.assert_array_equal(env.action_mask(state), legal(int(obs[-2]), 4))
        state, obs, *_ = env.step(jax.random.key(2), state, jnp.int32(action))


def test_normalization_leaves_the_legal_actions_alone(steps):
    class Plain(Maze):
        action_mask = None

    _, plain = play(envs.NormalizeObservation(envs.vectorize(Plain(), 3)), np.full((60, 3), RIGHT))
    _, masked = play(envs.NormalizeObservation(envs.vectorize(Maze(), 3)), np.full((60, 3), RIGHT))
    np.testing.assert_array_equal(masked.obs.obs, plain.obs)
    np.testing.assert_array_equal(masked.final_obs.obs, plain.final_obs)
    np.testing.assert_array_equal(masked.obs.action_mask, steps[1].obs.action_mask)


def with_mask(mask, **changes):
    """A corridor that returns this mask, some of whose members are replaced."""
    env = Corridor()
    env.action_mask = lambda state: mask
    for name, value in changes.items():
        setattr(env, name, value)
    return env


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (with_mask(jnp.ones(3, bool)), r"Corridor\.action_mask is bool\[3\]; return bool\[2\]"),
        (with_mask(jnp.ones(2)), r"Corridor\.action_mask is float32\[2\]; return bool\[2\]"),
        (with_mask(jnp.ones((), bool)), r"is bool\[\]; return bool\[2\], whether each action of Discrete\(2\)"),
        (with_mask(jnp.ones(2, bool), action_space=envs.Box(0, 1, (), jnp.int32)), "only actions of a Discrete space can be"),
        (with_mask(jnp.ones(2, bool), action_space=envs.Discrete(2, start=5)), r"use Discrete\(2\), and add 5 to the"),
    ],
)
def test_a_wrong_mask_is_refused_with_the_value_named(env, message):
    with pytest.raises(TypeError, match=message):
        envs.vectorize(env, 2)


def test_only_legal_actions_are_drawn_all_with_the_same_probability():
    keys = jax.random.split(jax.random.key(0), 3000)
    masks = np.array([[1, 0, 1, 1], [0, 1, 0, 0], [1, 1, 1, 1]], bool)
    for mask in masks:
        drawn = np.bincount(jax.vmap(sample_legal, (0, None))(keys, mask), minlength=4) / 3000
        np.testing.assert_allclose(drawn, mask / mask.sum(), atol=0.03)
        assert not drawn[~mask].any()
    plain = jax.vmap(envs.Discrete(4).sample)(keys)
    np.testing.assert_array_equal(jax.vmap(sample_legal, (0, None))(keys, masks[2]), plain)


def test_values_of_illegal_actions_are_forbidden_unless_all_are_illegal():
    values, masks = np.float32([[1, 2], [3, 4], [5, 6]]), np.array([[1, 0], [1, 1], [0, 0]], bool)
    found = only_legal(jnp.asarray(values), envs.MaskedObservation(np.zeros((3, 1)), jnp.asarray(masks)))
    np.testing.assert_array_equal(found, [[1, -np.inf], [3, 4], [5, 6]])
    assert only_legal(values, np.zeros((3, 1))) is values
