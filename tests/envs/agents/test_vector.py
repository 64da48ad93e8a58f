"""Several agents in parallel environments: agents that leave early, statistics, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from tests.envs.agents.leaving import Leaving

TEAMS = {"first": (0,), "others": (1, 2)}


@pytest.fixture(scope="module")
def rollout():
    """Eight steps of an episode that ends with its last agent, and of one that is cut off after two steps."""

    def run(limit):
        venv = envs.VectorizedAgents(Leaving(limit=limit), 2, TEAMS)
        actions = np.random.default_rng(0).integers(0, 3, (8, 2, 3))

        def play(key):
            state, first = venv.reset(key)
            state, steps = jax.lax.scan(venv.step, state, jnp.asarray(actions, jnp.int32))
            state, metrics = venv.pop_episodes(state)
            return first, steps, state._replace(key=()), metrics

        return actions, jax.tree.map(np.asarray, jax.jit(play)(jax.random.key(0)))

    return {limit: run(limit) for limit in (1000, 2)}


@pytest.mark.parametrize("limit", [1000, 2])
def test_agents_that_leave_early_are_absent_until_their_episode_ends(rollout, limit):
    actions, (first, steps, state, metrics) = rollout[limit]
    assert isinstance(first, envs.MaskedObservation) and first.obs.shape == (2, 3, 2)
    assert first.action_mask.shape == (2, 3, 4) and first.action_mask.all()

    def mask(time, absent):
        return (np.arange(4) < 3) | (time % 2 == 0) | absent[:, None]

    leave, time, absent = np.array([1, 3, 2]), 0, np.zeros(3, bool)
    returns, lengths, episode, length = [], [], np.zeros((2, 3)), 0
    for t in range(8):
        time, length = time + 1, length + 1
        reward = np.where(absent, 0, actions[t] + 1)
        episode += reward
        np.testing.assert_array_equal(steps.reward[t], reward)
        np.testing.assert_array_equal(steps.present[t], [~absent] * 2)
        gone = absent | (time == leave)
        np.testing.assert_array_equal(steps.terminated[t], [gone] * 2)
        truncated = time == limit
        ended = truncated or gone.all()
        assert (steps.truncated[t] == truncated).all() and (steps.ended[t] == ended).all()
        np.testing.assert_array_equal(steps.final_obs.obs[t, :, :, 0], np.full((2, 3), time))
        np.testing.assert_array_equal(steps.final_obs.action_mask[t, 0], mask(time, gone))
        np.testing.assert_array_equal(steps.final_state[t], np.tile(np.stack([[time] * 3, range(3)], 1).ravel(), (2, 1)))
        if ended:
            returns.append(episode)
            lengths += [length] * 2
            time, length, episode, gone = 0, 0, np.zeros((2, 3)), np.zeros(3, bool)
        absent = gone
        np.testing.assert_array_equal(steps.obs.obs[t, :, :, 0], np.full((2, 3), time))
        np.testing.assert_array_equal(steps.obs.action_mask[t, 1], mask(time, absent))
        np.testing.assert_array_equal(steps.state[t], np.tile(np.stack([[time] * 3, range(3)], 1).ravel(), (2, 1)))
    every = np.concatenate(returns)
    assert len(every) == {1000: 4, 2: 8}[limit]
    means = {"": every.sum(1), "/first": every[:, 0], "/others": every[:, 1:].sum(1)}
    for team, values in means.items():
        mean = metrics[f"episode_return{team}"]
        assert mean.total / mean.count == pytest.approx(values.mean())
    assert metrics["episode_length"].total / metrics["episode_length"].count == np.mean(lengths)
    assert not state.return_sum.any() and not state.num_episodes.any()
    np.testing.assert_array_equal(state.episode_return, episode)


def test_vectorize_tells_several_agents_from_one_by_their_names():
    venv = envs.vectorize(Leaving(), 4)
    assert isinstance(venv, envs.VectorizedAgents) and venv.agents == Leaving.agents and venv.state_size == 6
    state, obs = jax.eval_shape(venv.reset, jax.random.key(0))
    assert obs.obs.shape == (4, 3, 2) and obs.action_mask.shape == (4, 3, 4)
    state, step = jax.eval_shape(venv.step, state, jnp.zeros((4, 3), jnp.int32))
    assert step.reward.shape == step.terminated.shape == (4, 3) and step.reward.dtype == jnp.float32
    with pytest.raises(ValueError, match=r"action of Leaving is int32\[4\]; it must be int32\[4, 3\]: .* agent of each env"):
        venv.step(state, jnp.zeros(4, jnp.int32))


def changed(**members):
    """A Leaving, some of whose members are replaced."""
    env = Leaving()
    for name, value in members.items():
        setattr(env, name, value)
    return env


def stepping(change):
    """A Leaving whose step returns something else."""
    env = Leaving()
    step = env.step
    env.step = lambda key, state, action: change(*step(key, state, action))
    return env


STEP = r"Leaving\.step"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (changed(agents=("one", "two")), r"observation of Leaving\.reset has a value of float32\[3, 2\], but .* its 2 agents"),
        (changed(agents=("one", "two", "one")), r"Leaving\.agents is \('one', 'two', 'one'\), which names an agent twice"),
        (changed(agents=()), r"Leaving\.agents is \(\); give a tuple with the name of every agent, at least one"),
        (changed(agents=(0, 1, 2)), r"Leaving\.agents is \(0, 1, 2\); give a tuple with the name"),
        (changed(observation_space=envs.Box(0, 1, (3,))), r"space for each of its 3 agents has float32\[3, 3\]"),
        (changed(action_space=3), r"Leaving\.action_space is 3 of type builtins\.int; use Discrete, Box"),
        (stepping(lambda s, o, r, d, t: (s, o, r, d)), STEP + r" returned a tuple of 4; return the 5 values"),
        (stepping(lambda s, o, r, d, t: (s, o[:2], r, d, t)), STEP + r" has a value of float32\[2, 2\], but its obs"),
        (stepping(lambda s, o, r, d, t: (s + 0.5, o, r, d, t)), STEP + r" has a value of float32\[\], but that of"),
        (stepping(lambda s, o, r, d, t: (s, o, r.sum(), d, t)), r"reward of " + STEP + r" is int32\[\]; return one number"),
        (stepping(lambda s, o, r, d, t: (s, o, {"one": r[0]}, d, t)), r"reward of " + STEP + r" is a dict; return one number"),
        (stepping(lambda s, o, r, d, t: (s, o, r, d.all(), t)), r"terminated of " + STEP + r" is bool\[\]; return one flag"),
        (stepping(lambda s, o, r, d, t: (s, o, r, r, t)), r"terminated of " + STEP + r" is int32\[3\]; .*bool\[3\]"),
        (stepping(lambda s, o, r, d, t: (s, o, r, d, d)), r"truncated of " + STEP + r" is bool\[3\]; return a scalar bool"),
        (changed(action_mask=lambda state: jnp.ones((3, 2), bool)), r"Leaving\.action_mask is bool\[3, 2\]; .*bool\[3, 4\]"),
        (changed(action_mask=lambda state: jnp.ones((3, 4))), r"Leaving\.action_mask is float32\[3, 4\]; return one flag"),
        (changed(action_mask=lambda state: {"one": state}), r"Leaving\.action_mask is a dict; return one flag per action"),
        (changed(action_space=envs.Box(-1, 1, ())), r"Leaving has action_mask, but its actions are in Box"),
        (changed(global_state=lambda state: state), r"Leaving\.global_state returned int32\[\]; return a vector"),
    ],
)  # fmt: skip
def test_an_environment_that_breaks_the_protocol_is_refused_with_the_field_named(env, message):
    with pytest.raises(TypeError, match=message):
        envs.vectorize(env, 2)


def test_an_incomplete_environment_is_refused():
    class Dicts:
        agents = ("one", "two")
        observation_spaces = action_spaces = reset = step = None

    with pytest.raises(TypeError, match=r"Dicts has no observation_space; .*stack_agents\(env\) makes them of dicts"):
        envs.vectorize(Dicts(), 2)  # type: ignore[arg-type]
