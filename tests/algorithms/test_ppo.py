"""PPO: one iteration against an independent implementation, what it exchanges between devices, and its options."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.algorithms import PPO
from msrl_jax.algorithms.ppo import ppo_loss
from msrl_jax.networks.distributions import Categorical
from tests.support.agents import make_still, still
from tests.support.compiled import collectives
from tests.support.ppo import SMALL, E, T, plain_network, plain_rollout, plain_update
from tests.support.random_walk import RandomWalk


def build(env, **overrides):
    return make_still("ppo", env, **SMALL | overrides)


def start(agent, iterations=1):
    """The state after some iterations, in which the policy is no longer uniform."""
    state = jax.jit(agent.init)(jax.random.key(0))
    for _ in range(iterations):
        state, _ = jax.jit(agent.iteration)(state)
    return state


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["discrete", "continuous"])
def walk(request):
    over = "batch" if request.param else "minibatch"
    agent = build(RandomWalk(request.param), shared_torso=request.param, clip_value=0.1, normalize_advantage=over)
    return agent, start(agent)


def test_one_iteration_equals_an_independent_implementation(walk):
    agent, state = walk
    over = "batch" if agent.env.action_space.shape else "minibatch"
    config = PPO(**SMALL, clip_value=0.1, normalize_advantage=over)
    obs, rollout = plain_rollout(agent, state)
    terminated, truncated = rollout[-2:]
    assert terminated.any() and (truncated & ~terminated).any()
    after, _ = jax.jit(agent.iteration)(state)
    np.testing.assert_allclose(after.obs, obs, rtol=1e-5, atol=1e-6)
    want, _ = plain_update(agent, config, state, rollout)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6), after.params, want)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).max(), after.params, state.params)
    assert min(jax.tree.leaves(moved)) > 1e-4


def test_a_key_samples_and_no_key_is_greedy(walk):
    agent, state = walk
    continuous = agent.env.action_space.shape != ()
    outputs, _ = plain_network(state.params, state.obs, continuous)
    want = np.clip(outputs, -1, 1) * 0.5 + np.float32([0, 0.5]) if continuous else np.argmax(outputs, -1)
    np.testing.assert_allclose(agent.act(state, state.obs, None, ())[0], want, rtol=1e-5, atol=1e-6)
    drawn = np.stack([agent.act(state, state.obs, jax.random.key(i), ())[0] for i in range(30)])
    assert len(np.unique(drawn)) > 2
    assert all(agent.env.action_space.contains(action) for action in drawn.reshape(-1, *drawn.shape[2:]))


class Image:
    """A random walk that is seen as an image."""

    observation_space = envs.Box(-np.inf, np.inf, (4, 4, 1))
    action_space = envs.Discrete(3)

    def reset(self, key):
        state, obs = RandomWalk().reset(key)
        return state, jnp.full((4, 4, 1), obs[0])

    def step(self, key, state, action):
        state, obs, *rest = RandomWalk().step(key, state, action)
        return state, jnp.full((4, 4, 1), obs[0]), *rest


@pytest.mark.parametrize(
    "env",
    [RandomWalk(), *(pytest.param(x, marks=pytest.mark.slow) for x in (RandomWalk(True), Image()))],
    ids=["mlp", "normal", "cnn"],
)
def test_devices_exchange_one_gradient_per_minibatch_and_a_few_scalars(env):
    """Compiled on eight devices, the gradient and the losses are summed at once; nothing grows with the batch."""
    agent = build(env, num_envs=4 * E, unroll_length=2 * T)
    num_params = sum(x.size for x in jax.tree.leaves(jax.eval_shape(agent.init, jax.random.key(0)).params))
    found = collectives(agent)
    assert {name for name, _ in found} == {"all-reduce"}
    *scalars, gradient = [size for _, size in found]
    assert num_params <= gradient <= num_params + 5
    # How many episodes were cut is one of them, and two are the mean square of the values, the second one of large values.
    assert len(scalars) <= 4 and sum(scalars) <= 8


def test_a_step_without_an_answer_adds_nothing_to_the_loss():
    rng = np.random.default_rng(0)
    logits, (log_prob, *numbers) = rng.normal(size=(5, 3)), rng.normal(size=(5, 5))

    def loss(rows, valid):
        taken = SimpleNamespace(action=jnp.array([0, 2, 1, 0, 2])[rows], log_prob=log_prob[rows], valid=valid)
        value, *others = (x[rows] for x in numbers)
        return ppo_loss(PPO(clip_value=0.1), Categorical(jnp.asarray(logits)[rows]), value, taken, *others)

    (got, stats), (wanted, others) = loss(slice(None), jnp.arange(5) < 3), loss(slice(3), None)
    np.testing.assert_allclose([got, *stats.values()], [wanted, *others.values()], rtol=1e-6)


@pytest.mark.long
def test_updates_stop_for_good_once_the_divergence_exceeds_its_target(walk):
    """A later minibatch with a lower divergence does not start them again."""
    agent, state = walk
    continuous = agent.env.action_space.shape != ()
    config = PPO(**SMALL, clip_value=0.1, shared_torso=continuous, learning_rate=0.02)
    state = state._replace(key=jax.random.key(3))  # its minibatches differ
    _, rollout = plain_rollout(agent, state)
    want, (second, *later) = plain_update(agent, config, state, rollout, num_updates=1)
    assert min(later) < 0.9 * second
    stopped = dataclasses.replace(config, target_kl=float(second + min(later)) / 2)
    after, metrics = jax.jit(still(stopped.build(RandomWalk(continuous))).iteration)(state)
    assert after.opt_state[1][0].count - state.opt_state[1][0].count == 1
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5), after.params, want)
    assert metrics["approx_kl"] > 0
