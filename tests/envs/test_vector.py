"""vectorize: automatic reset by hand, keys, what it refuses, and that splitting the environments changes nothing."""

from typing import NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax import envs
from tests.support.compiled import exchanges
from tests.support.corridor import Corridor, CorridorState
from tests.support.slow import mostly_slow


def rollout(venv, state, actions):
    return jax.jit(lambda state, actions: jax.lax.scan(venv.step, state, actions))(state, actions)


def sample_actions(venv, num_steps, seed=7):
    keys = jax.random.split(jax.random.key(seed), (num_steps, venv.num_envs))
    return jax.vmap(jax.vmap(venv.action_space.sample))(keys)


def plain(tree):
    """The tree with typed keys as integers, for comparisons."""

    def convert(x):
        return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)

    return jax.tree.map(convert, tree)


def test_a_custom_environment_just_works_and_its_trajectory_is_as_worked_by_hand():
    venv = envs.vectorize(Corridor(length=3, max_steps=4), 2)
    state, obs = venv.reset(jax.random.key(0))
    np.testing.assert_array_equal(obs, [[0], [0]])
    # The first walks right: the end at step 3, then anew. The second dithers and is cut off at step 4, in cell 2.
    actions = jnp.array([[1, 0], [1, 0], [1, 1], [0, 1], [1, 1]])
    _, steps = rollout(venv, state, actions)
    np.testing.assert_array_equal(steps.final_obs[..., 0], [[1, 0], [2, 0], [3, 1], [0, 2], [1, 1]])
    np.testing.assert_array_equal(steps.obs[..., 0], [[1, 0], [2, 0], [0, 1], [0, 0], [1, 1]])
    np.testing.assert_array_equal(steps.reward, [[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(steps.terminated, [[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]])
    np.testing.assert_array_equal(steps.truncated, [[0, 0], [0, 0], [0, 0], [0, 1], [0, 0]])
    assert steps.reward.dtype == jnp.float32 and steps.terminated.dtype == steps.truncated.dtype == bool


class Noise:
    """Observes fresh noise at each step, and has its key in the state too."""

    observation_space = envs.Box(-np.inf, np.inf, ())
    action_space = envs.Box(-1, 1, (2,))

    def reset(self, key):
        return {"key": key, "last": 0.0}, jax.random.normal(key)

    def step(self, key, state, action):
        obs = jax.random.normal(key)
        return {"key": key, "last": obs + action.sum()}, obs, obs, jax.random.bernoulli(key, 0.2), False


def test_every_environment_and_step_has_its_own_randomness():
    venv = envs.vectorize(Noise(), 8)
    state, first = venv.reset(jax.random.key(0))
    _, steps = rollout(venv, state, jnp.zeros((50, 8, 2)))
    fresh = np.asarray(steps.obs)[np.asarray(steps.terminated)]
    assert len(fresh) > 20
    draws = np.concatenate([np.ravel(first), np.ravel(steps.final_obs), fresh])
    assert len(np.unique(draws)) == len(draws)


class Splitting:
    """Observes numbers drawn with its key, with the keys split from it, and with those split from these; every step ends."""

    observation_space = envs.Box(-np.inf, np.inf, (7,))
    action_space = envs.Discrete(2)

    def reset(self, key):
        halves = jax.random.split(key)
        keys = jnp.concatenate([key[None], halves, jax.vmap(jax.random.split)(halves).ravel()])
        return (), jax.vmap(jax.random.normal)(keys)

    def step(self, key, state, action):
        return (), self.reset(key)[1], 0.0, jnp.asarray(True), jnp.asarray(False)


def test_no_key_is_split_from_another_that_an_environment_had():
    venv = envs.vectorize(Splitting(), 4)
    state, first = venv.reset(jax.random.key(0))
    _, steps = rollout(venv, state, jnp.zeros((20, 4), jnp.int32))
    draws = np.concatenate([np.ravel(x) for x in (first, steps.final_obs, steps.obs)])
    assert len(draws) == 4 * 7 * 41 and len(np.unique(draws)) == len(draws)


def test_the_trajectory_of_an_environment_depends_on_its_own_key_only():
    actions = jnp.zeros((20, 8, 2))
    venv = envs.vectorize(Noise(), 8)
    state, _ = venv.reset(jax.random.key(0))
    _, together = rollout(venv, state, actions)
    _, alone = rollout(envs.vectorize(Noise(), 1), jax.tree.map(lambda x: x[5:6], state), actions[:, 5:6])
    np.testing.assert_array_equal(alone.obs, together.obs[:, 5:6])


def test_states_can_be_carried_through_a_scan():
    venv = envs.vectorize(Noise(), 3)  # its reset returns a Python float
    state, obs = jax.eval_shape(venv.reset, jax.random.key(0))
    stepped, time_step = jax.eval_shape(venv.step, state, jnp.zeros((3, 2)))
    assert jax.tree.structure(state) == jax.tree.structure(stepped)
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(stepped), strict=True):
        assert (before.shape, before.dtype) == (after.shape, after.dtype)
        assert not before.weak_type and not after.weak_type
    assert time_step.obs == time_step.final_obs == obs


@pytest.mark.parametrize("name", mostly_slow(["CartPole-v1", "Pendulum-v1", "Breakout-MinAtar"], "CartPole-v1"))
def test_splitting_the_environments_over_devices_costs_no_communication_and_changes_no_bit(name):
    # Eight environments per device: XLA's CPU code for fewer may round the last bit of an observation otherwise.
    venv = envs.vectorize(envs.make(name, max_steps_in_episode=40), 64)
    state, _ = jax.jit(venv.reset)(jax.random.key(0))
    actions = sample_actions(venv, 60)
    mesh = Mesh(np.array(jax.devices()[:8]), ("env",))
    by_env, by_time_env = NamedSharding(mesh, P("env")), NamedSharding(mesh, P(None, "env"))

    def run(state, actions):
        return jax.lax.scan(venv.step, state, actions)

    split = jax.jit(run, in_shardings=(by_env, by_time_env), out_shardings=(by_env, by_time_env))
    program = split.lower(state, actions).compile()
    assert not exchanges(program)
    one = jax.jit(run)(state, actions)
    eight = program(jax.device_put(state, by_env), jax.device_put(actions, by_time_env))
    assert eight[1].obs.sharding.device_set == set(jax.devices()[:8])
    assert np.any(one[1].terminated | one[1].truncated)
    jax.tree.map(np.testing.assert_array_equal, plain(one), plain(eight))


def test_initial_states_do_not_depend_on_the_number_of_devices():
    venv = envs.vectorize(envs.make("CartPole-v1"), 64)
    mesh = Mesh(np.array(jax.devices()[:8]), ("env",))
    split = jax.jit(venv.reset, out_shardings=NamedSharding(mesh, P("env")))(jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, plain(jax.jit(venv.reset)(jax.random.key(3))), plain(split))


class BrokenState(NamedTuple):
    cell: jax.Array


def broken(**changes):
    """A Corridor, some of whose members are replaced."""
    env = Corridor()
    for name, value in changes.items():
        setattr(env, name, value)
    return env


def returning(change):
    """A Corridor whose step returns something else."""
    env = Corridor()
    step = env.step
    env.step = lambda key, state, action: change(*step(key, state, action))
    return env


STEP, RESET = r"Corridor\.step", r"Corridor\.reset"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (returning(lambda s, o, r, d, t: (s, o, r, d)), STEP + r" returned a tuple of 4; return the 5 values"),
        (returning(lambda s, o, r, d, t: (s, o, r, r, t)), r"terminated of " + STEP + r" is float32\[\]"),
        (returning(lambda s, o, r, d, t: (s, o, r, d, t[None])), r"truncated of " + STEP + r" is bool\[1\]"),
        (returning(lambda s, o, r, d, t: (s, o, r[None], d, t)), r"reward of " + STEP + r" is float32\[1\]"),
        (
            returning(lambda s, o, r, d, t: (s._replace(cell=s.cell / 2), o, r, d, t)),
            rf"state of {STEP} has \.cell of float32\[\], but that of {RESET} has int32\[\]; .*jnp\.int32",
        ),
        (
            returning(lambda s, o, r, d, t: (BrokenState(s.cell), o, r, d, t)),
            rf"that of {RESET} has \.steps, which the state of {STEP} does not have",
        ),
        (
            broken(reset=lambda key: CorridorState(jnp.int32(0), jnp.int32(0))),
            rf"observation of {RESET} has a value of int32\[\], but its observation_space has float32\[1\]",
        ),
        (broken(reset=lambda key: [key, key]), RESET + r" returned a list; return the 2 values"),
        (broken(observation_space=envs.Box(0, 3, (0,))), r"observation_space is Box.* has no elements; give it at least one"),
        (broken(action_space=gymnasium.spaces.Discrete(2)), r"action_space is a Gymnasium space; use .*GymnasiumEnv"),
        (broken(action_space=envs.Dict({"a": envs.Tuple((2,))})), r"action_space\.spaces\['a'\]\.spaces\[0\] is 2 of type"),
    ],
)
def test_an_environment_that_breaks_the_protocol_is_refused_with_the_value_named(env, message):
    with pytest.raises(TypeError, match=message):
        envs.vectorize(env, 2)


def test_bad_keys_and_actions_are_refused():
    venv = envs.vectorize(Corridor(), 2)
    with pytest.raises(TypeError, match=r"make it with jax.random.key\(seed\)"):
        venv.reset(jax.random.PRNGKey(0))
    with pytest.raises(TypeError, match="needs one typed key"):
        venv.reset(jax.random.split(jax.random.key(0), 2))
    state, _ = venv.reset(jax.random.key(0))
    with pytest.raises(ValueError, match=r"action of Corridor is int32\[2, 1\]; it must be int32\[2\]"):
        venv.step(state, jnp.zeros((2, 1), jnp.int32))
    with pytest.raises(ValueError, match=r"is float32\[2\]; it must be int32\[2\]"):
        venv.step(state, jnp.zeros(2))
