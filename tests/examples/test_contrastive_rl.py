"""Contrastive RL: its losses and an update in plain formulas on one device, its loop under every policy, and its claim."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.algorithms import counted
from msrl_jax.registry.table import ALGORITHMS
from tests.support.compiled import collectives
from tests.support.off_policy import SMALL, B, adam, assert_close, counting, drawn, plain_mlp, plain_policy, start
from tests.support.small_runs import relative_difference

pytestmark = pytest.mark.long

with mock.patch.dict(ALGORITHMS):  # other tests go through the algorithms of the package
    from examples import contrastive_rl as example

R = 5
ENV = envs.make("PointMaze", maze="open", max_steps=8, tolerance=0.1)
ALL = ("GPUOnly", "SingleLearnerCoarse", "SingleLearnerFine", "Environments", "MultiLearner", "Central")


def build(**given):
    config = msrl.algorithms.make(example.ContrastiveRL, SMALL | {"representation_size": R} | given)
    return config.build(ENV), config


def run(agent, state, policy, devices, iterations):
    chosen = msrl.policies.get(policy)
    program = msrl.compile(agent.iteration, state, policy=chosen, axes=agent.axes, devices=jax.devices()[:devices])
    return program.run(state, iterations)


def test_the_losses_are_cross_entropies_of_rows_and_columns_and_a_penalty():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 6)) * 3
    rows, columns = (np.exp(logits) / np.exp(logits).sum(axis, keepdims=True) for axis in (1, 0))
    expected = -np.log(np.diag(rows)) - np.log(np.diag(columns)) + 0.3 * np.log(np.exp(logits).sum(1)) ** 2
    np.testing.assert_allclose(example.contrastive_losses(jnp.asarray(logits, jnp.float32), 0.3), expected, rtol=1e-5)


def numpy_losses(pair, goal, penalty):
    """The loss of each pair in float64, one by one, of representations `[B, R]`."""
    energy = np.array([[-np.sqrt(((p - g) ** 2).sum() + 1e-6) for g in goal] for p in pair])
    losses = []
    for i in range(len(pair)):
        row, column = np.log(np.exp(energy[i]).sum()), np.log(np.exp(energy[:, i]).sum())
        losses.append(row - energy[i, i] + column - energy[i, i] + penalty * row**2)
    return np.array(losses)


def plain_energies(critic, obs, action, goal):
    """Energies of all pairs and all goals, from all differences. `[B, B]`"""
    pair, goal = plain_mlp(critic["pair"], jnp.concatenate([obs, action], -1)), plain_mlp(critic["goal"], goal)
    return -jnp.sqrt(((pair[:, None] - goal) ** 2).sum(-1) + 1e-6)


def plain_critic_loss(critic, batch, penalty):
    energy = plain_energies(critic, batch.obs["observation"], batch.action, batch.obs["desired_goal"])
    own, which = jnp.diagonal(energy), jnp.arange(len(energy))
    by_row, by_column = jax.nn.log_softmax(energy, 1)[which, which], jax.nn.log_softmax(energy, 0)[which, which]
    return (-by_row - by_column + penalty * (own - by_row) ** 2).mean()


@functools.cache
def before_an_update():
    agent, config = build(num_updates=1, initial_temperature=0.3, other_goals=0.5)
    return agent, config, start(agent, 9, counting(agent))


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "devices"), [pytest.param("GPUOnly", 1, marks=pytest.mark.slow), ("MultiLearner", 8)])
def test_an_update_is_the_plain_one_of_the_whole_batch_wherever_its_parts_lie(policy, devices):
    agent, config, state = before_an_update()
    outer = jax.jit(counted(agent).init)(jax.random.key(0))._replace(inner=state)
    after, metrics = run(counted(agent), outer, policy, devices, 1)
    after = jax.device_get(after.inner)
    batch, key = drawn(ENV, config, state, after)
    with jax.enable_x64(True):
        pair = plain_mlp(state.params["critic"]["pair"], np.concatenate([batch.obs["observation"], batch.action], -1))
        goal = plain_mlp(state.params["critic"]["goal"], batch.obs["desired_goal"])
    expected = numpy_losses(*(np.asarray(x, np.float64) for x in (pair, goal)), config.penalty).mean()
    np.testing.assert_allclose(metrics["critic_loss"].mean(()), expected, rtol=1e-5)

    which, acting = jax.random.split(key)
    others = jax.random.uniform(which, (B,)) < config.other_goals
    assert 0 < others.sum() < B
    achieved = batch.obs["desired_goal"]
    wanted = np.where(others[:, None], achieved[np.arange(B) - 1], achieved)
    noise = np.asarray(jax.vmap(lambda k: jax.random.normal(k, (2,)))(jax.random.split(acting, B)))
    temperature = np.exp(state.params["log_temperature"])
    seen = np.concatenate([batch.obs["achieved_goal"], wanted, batch.obs["observation"]], -1)

    def acts(actor):
        return plain_policy({"actor": actor}, seen, noise, True)

    def actor_loss(actor):
        action, log_prob = acts(actor)
        value = jnp.diagonal(plain_energies(state.params["critic"], batch.obs["observation"], action, wanted))
        return (temperature * log_prob - value).mean()

    def temperature_loss(log_temperature):
        return -(jnp.exp(log_temperature) * (acts(state.params["actor"])[1] - 1.0)).mean()

    losses = {"critic": lambda critic: plain_critic_loss(critic, batch, config.penalty), "actor": actor_loss}
    for name, loss in (losses | {"log_temperature": temperature_loss}).items():
        gradient = jax.jit(jax.grad(loss))(state.params[name])
        assert_close(after.params[name], adam(state.params[name], state.opt_state[name], gradient, config))


@pytest.mark.slow
def test_devices_exchange_goals_of_the_batch_and_one_gradient():
    found = collectives(counted(build()[0]))
    assert B * R in [size for kind, size in found if kind == "all-gather"]


@functools.cache
def agent_and_state():
    agent = counted(build(num_updates=2)[0])
    return agent, jax.jit(agent.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def on_one_device():
    return run(*agent_and_state(), "GPUOnly", 1, 5)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ALL)
def test_eight_devices_compute_what_one_does(policy, on_one_device):
    state, metrics = run(*agent_and_state(), policy, 8, 5)
    pairs = zip(*(jax.tree.leaves(s.inner.params) for s in (state, on_one_device[0], agent_and_state()[1])), strict=True)
    for a, b, first in pairs:
        assert relative_difference(a, b) < 1e-5 < relative_difference(a, first)
    for a, b in zip(jax.tree.leaves(metrics), jax.tree.leaves(on_one_device[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(state.inner.obs["observation"], on_one_device[0].inner.obs["observation"], rtol=1e-5, atol=1e-5)


@dataclasses.dataclass(frozen=True)
class Unpaid(type(ENV)):
    """A maze whose rewards are no numbers."""

    def goal_reward(self, achieved, desired):
        return jnp.float32(jnp.nan), super().goal_reward(achieved, desired)[1]


@pytest.mark.slow
def test_rewards_are_not_needed():
    config = msrl.algorithms.make(example.ContrastiveRL, SMALL)
    states = [start(config.build(env), 4) for env in (ENV, Unpaid("open", 8, tolerance=0.1))]
    assert np.isnan(states[1].replay.items[4]).any()
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(s.params) for s in states))


class Parts:
    """Goals are of three parts, more than there are environments below."""

    goal = envs.Dict({name: envs.Box(-1, 1, (size,)) for name, size in {"a": 2, "b": 1, "c": 3}.items()})
    observation_space = envs.Dict({"observation": envs.Box(-1, 1, (2,)), "achieved_goal": goal, "desired_goal": goal})
    action_space = envs.Box(-1, 1, (2,))

    def reset(self, key):
        obs = self.observation_space.sample(key)
        return obs, obs

    def step(self, key, state, action):
        return state, state, *self.goal_reward(state["achieved_goal"], state["desired_goal"]), jnp.asarray(False)

    def goal_reward(self, achieved, desired):
        return -jnp.abs(achieved["a"] - desired["a"]).sum(), jnp.asarray(False)


def test_goals_may_have_several_parts():
    agent = counted(msrl.algorithms.make(example.ContrastiveRL, SMALL | {"num_envs": 2, "replay.shards": 1}).build(Parts()))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    weights = {x.shape[0] for x in jax.tree.leaves(state.inner.params["critic"]["goal"]) if len(x.shape) == 2}
    assert 2 + 1 + 3 in weights and jax.eval_shape(agent.iteration, state)


@pytest.mark.slow
def test_in_the_spiral_it_needs_fewer_steps_than_hindsight_which_ends_above_it():
    runs = [example.train(example.TASKS["spiral"], name, 3) for name in ("contrastive RL", "SAC with HER")]
    early, late = ([example.in_training(result, *part) for result in runs] for part in ((0.3, 0.5), (0.9, 1.0)))
    assert early[0].mean() > early[1].mean() + 0.05
    assert (late[0] > 0.85).all() and late[1].mean() > late[0].mean()


@pytest.mark.slow
def test_it_does_not_reach_small_goals_in_steps_in_which_hindsight_does():
    contrastive, hindsight = (example.train(example.TASKS["u"], name, 3) for name in ("contrastive RL", "SAC with HER"))
    assert (example.in_training(hindsight) > 0.95).all() and (example.in_training(contrastive) < 0.9).all()
    assert example.of_greedy(contrastive, 3, 100).max() < 0.5
