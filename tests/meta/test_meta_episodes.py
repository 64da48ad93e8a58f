"""Meta-episodes: what observations tell, one task in all of an episode, the model and its values against NumPy, policies."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs, meta
from msrl_jax.envs.params import RandomizeParams
from tests.support.compare import POLICIES, assert_close, run_plain
from tests.support.many_agents import Homes

S, A, HORIZON, LENGTH = 3, 2, 12, 4
MDP = meta.TabularMDP(np.full((S, A, S), 1 / 3), np.ones((S, A)), noise=0.5)
RL2 = meta.RL2(MDP, HORIZON, LENGTH)
RL3 = meta.RL3(RL2, discount=0.9, smoothing=0.2)


@functools.cache
def played(env, seed=0):
    """A meta-episode with random actions: states before each step and after the last, observations, actions, outcomes."""
    env = RandomizeParams(env, meta.random_mdps(S, A))
    actions = np.random.default_rng(seed).integers(0, A, HORIZON)

    @jax.jit
    def play(key):
        first = env.reset(key)
        keys = jax.random.split(key, HORIZON)

        def step(before, inputs):
            state, obs, *outcome = env.step(inputs[0], before[0], inputs[1])
            return (state, obs), ((state, obs), outcome)

        return first, jax.lax.scan(step, first, (keys, jnp.asarray(actions)))[1]

    first, (after, outcome) = jax.device_get(play(jax.random.key(seed)))
    states, obs = jax.tree.map(lambda x, y: np.concatenate([np.asarray(x)[None], y]), first, after)
    return states, obs, actions, outcome


@pytest.mark.long
def test_they_are_environments():
    report = envs.check(RL3)
    assert report.ok, report


def test_an_observation_tells_the_last_action_and_reward_the_start_of_an_episode_and_the_time():
    states, obs, actions, (reward, terminated, truncated) = played(RL2)
    inner = states.env_state
    np.testing.assert_array_equal(obs[:, :S], np.eye(S)[inner.obs])
    np.testing.assert_array_equal(obs[:, S : S + A], np.vstack([np.zeros(A), np.eye(A)[actions]]))
    np.testing.assert_array_equal(obs[1:, S + A], reward)
    np.testing.assert_array_equal(obs[:, S + A + 1], np.arange(HORIZON + 1) % LENGTH == 0)
    np.testing.assert_allclose(obs[:, S + A + 2], np.arange(HORIZON + 1) / HORIZON)
    np.testing.assert_array_equal(inner.obs[::LENGTH], 0)
    assert (inner.final_obs[LENGTH::LENGTH] != 0).any(), "what an episode led to, not the next one's start"
    assert list(np.flatnonzero(terminated)) == [HORIZON - 1] and not truncated.any()
    np.testing.assert_allclose(inner.returns[-1], reward.reshape(4, 3).sum(1), rtol=1e-6)


def test_a_task_lasts_for_a_meta_episode():
    venv = envs.vectorize(RandomizeParams(RL2, meta.random_mdps(S, A)), 2)
    state, _ = venv.reset(jax.random.key(0))

    def step(state, _):
        state, t = venv.step(state, jnp.zeros(2, jnp.int32))
        return state, (jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, dict)), t.terminated)

    _, (leaves, terminated) = jax.jit(lambda s: jax.lax.scan(step, s, None, length=2 * HORIZON))(state)
    (params,) = (x for x in leaves if isinstance(x, dict))
    rewards = np.asarray(params["rewards"])  # after each step, and after the reset that may follow it
    assert (rewards[: HORIZON - 1] == rewards[0]).all() and (rewards[HORIZON - 1 : -1] == rewards[HORIZON - 1]).all()
    assert (rewards[0] != rewards[-2]).all() and np.asarray(terminated[HORIZON - 1]).all()


def values_by_hand(moves, visits, rewards, discount=0.9, smoothing=0.2, sweeps=LENGTH):
    """Backward induction over `sweeps` steps of the estimated model."""
    q = np.zeros((S, A))
    for _ in range(sweeps):
        after = np.zeros((S, A))
        for s in range(S):
            for a in range(A):
                mean = rewards[s, a] / visits[s, a] if visits[s, a] else 0.0
                chances = (moves[s, a] + smoothing) / (visits[s, a] + smoothing * S)
                after[s, a] = mean + discount * sum(chances[t] * q[t].max() for t in range(S))
        q = after
    return q


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_the_model_is_counted_and_solved_as_by_hand(seed):
    states, obs, actions, (reward, *_) = played(RL3, seed)
    inner = states.env_state.env_state
    moves, visits, rewards = np.zeros((S, A, S)), np.zeros((S, A)), np.zeros((S, A))
    for t in range(HORIZON + 1):
        q = values_by_hand(moves, visits, rewards)[inner.obs[t]] / LENGTH
        expected = [*(q - q.max()), q.max(), *(visits[inner.obs[t]] / 10)]
        np.testing.assert_allclose(obs[t, -2 * A - 1 :], expected, rtol=1e-5, atol=1e-6)
        if t < HORIZON:
            at = inner.obs[t], actions[t]
            moves[(*at, inner.final_obs[t + 1])] += 1
            visits[at] += 1
            rewards[at] += reward[t]
    np.testing.assert_array_equal(states.env_state.moves[-1], moves)
    np.testing.assert_array_equal(obs[:, : S + A + 3], played(RL2, seed)[1])


def test_value_iteration_is_that_of_numpy_and_a_missing_probability_ends_the_episode():
    transitions, rewards = np.array([[[0.5, 0.25], [0, 1]], [[0, 0], [1, 0]]]), np.array([[1.0, 0], [4, -1]])
    q = np.zeros((2, 2))
    for _ in range(7):
        q = rewards + 0.9 * np.einsum("sat,t->sa", transitions, q.max(1))
    found = meta.value_iteration(jnp.asarray(transitions, jnp.float32), jnp.asarray(rewards, jnp.float32), 0.9, 7)
    np.testing.assert_allclose(found, q, rtol=1e-6)
    assert found[1, 0] == 4, "nothing follows"
    whole = meta.value_iteration(jnp.asarray(transitions, jnp.float32), jnp.asarray(rewards, jnp.int32), 0.9, 7)
    np.testing.assert_allclose(whole, q, rtol=1e-6)


class StopReason:
    """Two states; action 1 ends the episode with reward 1."""

    observation_space, action_space = envs.Discrete(2), envs.Discrete(2)
    metrics = {"steps": "last"}  # noqa: RUF012

    def reset(self, key):
        return jnp.int32(0), jnp.int32(0)

    def step(self, key, state, action):
        return state + 1, jnp.int32(1), action * 1.0, action == 1, jnp.asarray(False)

    def report(self, state):
        return {"steps": state}


class Shifted(StopReason):
    action_space = envs.Discrete(2, start=1)


def test_an_episode_that_ends_early_is_followed_by_another_and_its_end_is_worth_nothing():
    env = meta.RL3(meta.RL2(StopReason(), 6, 3), discount=1.0, smoothing=0.1)
    state, _ = env.reset(jax.random.key(0))
    begun = []
    for action in (1, 0, 1, 0, 0, 0):
        state, obs, _, terminated, _ = env.step(jax.random.key(1), state, jnp.int32(action))
        begun.append(bool(obs[5]))
    assert begun == [True, False, True, False, False, True] and terminated
    np.testing.assert_array_equal(state.moves, [[[0, 2], [0, 0]], [[0, 2], [0, 0]]])
    np.testing.assert_array_equal(state.visits, [[2, 1], [2, 1]])
    q = env.action_values(state)
    assert abs(q[0, 1] - 1) < 0.3, "1 and next to nothing, though the model counts smoothed moves"
    assert env.metrics == {"steps": "last", **{f"return_quarter_{i}": "last" for i in (1, 2, 3, 4)}}
    assert env.report(state)["return_quarter_1"] == 1.0 and env.report(state)["steps"] == 3, "of the last episode"


@pytest.mark.parametrize(
    ("reduction", "value"), [("last", 3), pytest.param("max", 3, marks=pytest.mark.slow), ("sum", 1 + 1 + 1 + 1 + 2 + 3)]
)
def test_metrics_are_of_what_steps_led_to_and_not_of_the_episode_that_begins_then(reduction, value):
    inner = type("Reporting", (StopReason,), {"metrics": {"steps": reduction}})()
    env = envs.EpisodeStatistics(envs.vectorize(meta.RL2(inner, 6, 3), 1))
    state, _ = env.reset(jax.random.key(0))
    for action in (1, 1, 1, 0, 0, 0):  # three episodes of a step, and one of three
        state, _ = jax.jit(env.step)(state, jnp.array([action]))
    mean = env.pop_episodes(state)[1]["episode_steps"]
    assert (float(mean.total), float(mean.count)) == (value, 1)


@pytest.mark.long
def test_actions_and_observations_of_other_spaces():
    env = meta.RL2(envs.make("Pendulum-v1"), 8, 4)
    assert envs.check(env).ok and env.observation_space.shape == (3 + 1 + 3,)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: meta.RL2(MDP, 64, 7), ValueError, r"horizon=64 is not a multiple of episode_length=7; use one, such as 63"),
        (lambda: meta.RL2(MDP, 5, 7), ValueError, "use one, such as 7"),
        (lambda: meta.RL2(Homes(), 8, 4), TypeError, "single-agent"),
        (lambda: meta.RL3(MDP), TypeError, r"write RL3\(RL2\(env, ...\)\)"),
        (lambda: meta.RL3(meta.RL2(Shifted(), 8, 4)), TypeError, "where both are Discrete from 0"),
        (lambda: meta.RL3(RL2, smoothing=0), ValueError, "smoothing=0 finite and above 0"),
        (lambda: meta.RL2(envs.make("gymnasium:CartPole-v1"), 8, 4), TypeError, "is simulated on the host"),
    ],
)
def test_what_makes_no_meta_episode_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@functools.cache
def agent():
    env = RandomizeParams(RL3, meta.random_mdps(S, A))
    config = msrl.algorithms.get("recurrent_ppo")(
        num_envs=16, unroll_length=HORIZON, num_epochs=1, num_minibatches=2, hidden_sizes=(8,), core="gru:8"
    )
    made = msrl.algorithms.counted(msrl.algorithms.build(config, env), 10)
    state = jax.jit(made.init)(jax.random.key(0))
    return made, state, run_plain(made.iteration, state, 3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_meta_learning_is_the_same_run_under_every_policy(policy):
    made, state, reference = agent()
    program = msrl.compile(made.iteration, state, policy=msrl.policies.get(policy), axes=made.axes)
    assert_close(program.run(state, 3), reference, rtol=1e-4, atol=1e-5)
