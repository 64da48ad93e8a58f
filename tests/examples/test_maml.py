"""MAML: its gradient through the step by hand and by differences, its loop under every policy, and what is claimed of it."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.algorithms import counted
from msrl_jax.registry.table import ALGORITHMS
from tests.support.keys import key_uses, reused_keys
from tests.support.small_runs import relative_difference

pytestmark = pytest.mark.long

with mock.patch.dict(ALGORITHMS):  # other tests go through the algorithms of the package
    from examples import maml as example

APART = "examples.maml:Apart"
OTHERS = ("GPUOnly", "SingleLearnerCoarse", "MultiLearner", "SingleLearnerFine", "Environments", "Central")
SMALL = {"num_envs": 8, "num_rollouts": 4, "unroll_length": 10, "hidden_sizes": (8,), "num_epochs": 2}
RATE, SIGMA, THETA, GOAL = 0.05, 0.7, 0.4, -0.3


def of_bandit(theta, baseline=0.0):
    """All actions of a Gaussian policy in one step, `[1, K]`: sums are expectations, by the quadrature of Gauss and Hermite."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(12)
    action = (theta + SIGMA * nodes)[None, :, None]
    rewards = (-((action[..., 0] - GOAL) ** 2) - baseline) * weights / weights.sum() * len(nodes)
    log_prob = example.log_prob((theta, np.log(SIGMA)), action)
    return example.Rollouts(np.zeros((1, 12, 1)), action, log_prob, rewards, np.ones((1, 12), bool))


def constant(theta, obs):
    return theta * jnp.ones_like(obs), jnp.log(jnp.full(1, SIGMA))


def test_the_gradient_through_the_step_is_the_one_by_hand():
    """The expected return is `-(theta - goal)**2 - sigma**2`. A step multiplies `theta - goal` by `1 - 2 rate`, and so does the
    derivative of the step the gradient after it."""
    with jax.enable_x64(True):
        before = of_bandit(THETA)
        after_step = GOAL + (1 - 2 * RATE) * (THETA - GOAL)
        adapted = jax.jit(lambda theta: example.adapted(constant, theta, before, RATE))
        np.testing.assert_allclose(adapted(THETA), after_step, rtol=1e-10)
        tasks = [jax.tree.map(lambda x: x[:, None], rollouts) for rollouts in (before, of_bandit(after_step))]
        found = jax.jit(jax.grad(lambda theta: -example.meta_loss(constant, theta, *tasks, RATE, 1e9)))(THETA)
        np.testing.assert_allclose(found, -2 * (1 - 2 * RATE) ** 2 * (THETA - GOAL), rtol=1e-10)


def test_the_weights_of_actions_are_what_a_second_derivative_needs():
    """Without them, actions are as if drawn whatever the parameters are: with a baseline, nothing is left of the curvature."""
    with jax.enable_x64(True):
        before = of_bandit(THETA, baseline=-((THETA - GOAL) ** 2) - SIGMA**2)

        def of_scores(theta):
            return -jnp.mean(example.log_prob(constant(theta, before.obs), before.action) * before.advantage)

        def of_weights(theta):
            return example.task_loss(constant, theta, before)

        for loss, curvature in {of_weights: 2.0, of_scores: 0.0}.items():
            np.testing.assert_allclose(jax.jit(jax.grad(loss))(THETA), 2 * (THETA - GOAL), rtol=1e-10)
            np.testing.assert_allclose(jax.jit(jax.grad(jax.grad(loss)))(THETA), curvature, rtol=1e-10, atol=1e-10)


def drawn(policy, key, params, tasks, rollouts, steps):
    """Rollouts of made-up observations and advantages, of which the last of each task ends early."""
    keys, shape = jax.random.split(key, 3), (steps, tasks, rollouts)
    obs = jax.random.normal(keys[0], (*shape, 2))
    mean, log_deviation = policy.apply(params, obs)
    action = mean + jnp.exp(log_deviation) * jax.random.normal(keys[1], (*shape, 2))
    valid = jnp.ones(shape, bool).at[2:, :, -1].set(False)
    log_prob = example.log_prob((mean, log_deviation), action)
    return example.Rollouts(obs, action, log_prob, jax.random.normal(keys[2], shape), valid)


def test_the_gradient_through_the_step_of_a_network_is_that_of_differences():
    with jax.enable_x64(True):
        policy = example.Gaussian(2, (5,))
        params = policy.init(jax.random.key(0), jnp.zeros(2))
        params = jax.tree.map(lambda x: jnp.asarray(x, float) + 0.1, params)
        before, after = (drawn(policy, jax.random.key(seed), params, 3, 4, 5) for seed in (1, 2))
        flat, unravel = ravel_pytree(params)
        loss = jax.jit(lambda flat: example.meta_loss(policy.apply, unravel(flat), before, after, 0.3, 1e9))
        differences = [(loss(flat + d) - loss(flat - d)) / 2e-5 for d in 1e-5 * np.eye(len(flat))]
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(flat), differences, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
def test_steps_after_the_end_of_an_episode_count_for_nothing():
    policy = example.Gaussian(2, (5,))
    params = policy.init(jax.random.key(0), jnp.zeros(2))
    before, after = (drawn(policy, jax.random.key(seed), params, 3, 4, 5) for seed in (1, 2))
    assert not before.valid.all()

    @jax.jit
    def gradient(change):
        other = [
            x._replace(obs=jnp.where(x.valid[..., None], x.obs, x.obs + change), advantage=x.advantage + change * ~x.valid)
            for x in (before, after)
        ]
        return jax.grad(lambda params: example.meta_loss(policy.apply, params, *other, 0.3, 0.2))(params)

    jax.tree.map(np.testing.assert_array_equal, gradient(1.0), gradient(0.0))


def test_advantages_are_returns_to_go_less_a_ridge_regression_on_place_and_time():
    rng = np.random.default_rng(0)
    obs, reward = rng.normal(size=(6, 5, 2)), rng.normal(size=(6, 5))
    valid = np.arange(6)[:, None] < np.array([6, 6, 3, 1, 6])
    reward *= valid
    returns = sum(0.9**k * np.vstack([reward[k:], np.zeros((k, 5))]) for k in range(6))[valid]
    time = np.broadcast_to(np.arange(6)[:, None, None] / 6, (6, 5, 1))
    x = np.concatenate([time**0, time, time**2, time**3, obs, obs**2], -1)[valid]
    ridge = np.sqrt(1e-3 * valid.sum()) * np.eye(8)
    weights = np.linalg.lstsq(np.vstack([x, ridge]), np.append(returns, np.zeros(8)), rcond=None)[0]
    rest = returns - x @ weights
    found = jax.jit(example.advantages)(*(jnp.asarray(x, jnp.float32) for x in (obs, reward)), jnp.asarray(valid), 0.9)
    np.testing.assert_allclose(found[valid], (rest - rest.mean()) / rest.std(), rtol=1e-3, atol=1e-4)


def test_a_point_moves_by_at_most_a_tenth_and_ends_near_its_goal():
    env = example.Navigation((0.25, 0.0))
    state, obs = env.reset(jax.random.key(0))
    rewards, ends = [], []
    for action in ([5.0, 0.02], [0.1, -0.02], [0.045, 0.0]):
        state, obs, reward, terminated, truncated = env.step(jax.random.key(1), state, jnp.array(action))
        rewards.append(reward)
        ends.append(bool(terminated))
        assert not truncated
    np.testing.assert_allclose(rewards, [-(0.15**2) - 0.02**2, -(0.05**2), -(0.005**2)], rtol=1e-4)
    assert ends == [False, False, True]
    np.testing.assert_allclose(obs, [0.245, 0.0], atol=1e-7)


@pytest.mark.slow
def test_the_point_conforms():
    assert envs.check(example.Navigation((0.25, 0.0))).ok


@dataclasses.dataclass(frozen=True)
class Paying:
    """Pays the same in each of a number of steps."""

    pay: float = 0.0
    length: int = 3
    observation_space = envs.Box(0, 100, (1,))
    action_space = envs.Box(-1, 1, (1,))

    @property
    def default_params(self):
        return {"pay": self.pay}

    def with_params(self, params):
        return dataclasses.replace(self, **params)

    def reset(self, key):
        return jnp.zeros(1), jnp.zeros(1)

    def step(self, key, state, action):
        state = state + 1
        return state, state, jnp.asarray(self.pay), state[0] >= self.length, jnp.asarray(False)


@pytest.mark.slow
def test_both_phases_play_one_task_up_to_its_end_and_each_iteration_others():
    agent = counted(example.MAML(**SMALL).build(envs.RandomizeParams(Paying(), {"pay": envs.uniform(1.0, 2.0)})))
    state, pays = agent.init(jax.random.key(0)), []
    for _ in range(2):
        state, metrics = jax.jit(agent.iteration)(state)
        before, after = (float(metrics[name].total / metrics[name].count) for name in example.RETURNS)
        assert before == pytest.approx(after, rel=1e-6) and 3.0 < before < 6.0
        pays.append(before)
    assert pays[0] != pays[1]
    # Eight tasks that pay the same would be no tasks: the mean of eight is nearer to 4.5 than one is, in most draws.
    assert all(abs(pay - 4.5) < 1.0 for pay in pays)


@functools.cache
def agent_and_state():
    env = envs.RandomizeParams(example.Navigation(), example.GOALS)
    agent = counted(example.MAML(**SMALL).build(env))
    return agent, jax.jit(agent.init)(jax.random.key(0))


class Slippery(example.Navigation):
    """Its steps need keys."""

    def step(self, key, state, action):
        return super().step(key, state, action + 0.01 * jax.random.normal(key, action.shape))


def test_no_key_is_used_twice():
    agent = counted(example.MAML(**SMALL).build(envs.RandomizeParams(Slippery(), example.GOALS)))
    run = lambda key: jax.lax.scan(lambda state, _: agent.iteration(state), agent.init(key), length=2)
    uses = key_uses(run, jax.random.key(0))
    assert reused_keys(uses) == [] and sum(use.kind == "drawn from" for use in uses) > 300


@functools.cache
def compiled(policy, devices):
    agent, state = agent_and_state()
    chosen = msrl.policies.get(policy)
    return msrl.compile(agent.iteration, state, policy=chosen, axes=agent.axes, devices=jax.devices()[:devices])


@pytest.fixture(scope="module")
def on_one_device():
    return compiled("GPUOnly", 1).run(agent_and_state()[1], 3)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [APART, *(pytest.param(policy, marks=pytest.mark.slow) for policy in OTHERS)])
def test_eight_devices_compute_what_one_does(policy, on_one_device):
    state, metrics = compiled(policy, 8).run(agent_and_state()[1], 3)
    pairs = zip(*(jax.tree.leaves(s.inner.params) for s in (state, on_one_device[0], agent_and_state()[1])), strict=True)
    for a, b, start in pairs:
        assert relative_difference(a, b) < 1e-5 < relative_difference(a, start)
    for name in example.RETURNS:
        np.testing.assert_allclose(metrics[name].mean(()), on_one_device[1][name].mean(()), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "placement"), [(APART, "adapters"), pytest.param("SingleLearnerCoarse", "actors", marks=pytest.mark.slow)]
)
def test_the_adapter_is_where_the_actors_are_unless_a_layout_places_its_role(policy, placement):
    placed = {each["name"]: each["placement"] for each in compiled(policy, 8).explain().to_dict()["fragments"]}
    assert placed["adapt"] == placement and placed["act_adapted"] == "actors"


@pytest.mark.slow
def test_one_step_gains_more_from_the_parameters_of_maml_than_from_those_of_one_policy_or_from_new_ones():
    runs = {name: example.train(rate, 5) for name, rate in example.TRAINED.items()}
    found = {name: example.on_new_tasks(runs.get(name.partition(",")[0]), x, 5) for name, x in example.RATES.items()}
    before, after = found["MAML"].T
    assert (after > before + 10).all()
    for other in ("pretrained", "random, step tuned"):
        assert after.min() > found[other][:, 1].max() + 5, other
    assert (after > found["pretrained, step tuned"][:, 1]).all(), "by little"
