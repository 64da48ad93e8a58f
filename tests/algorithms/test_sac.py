"""SAC: an update against an implementation written out here, what devices exchange, and what is refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms import SAC, TQC, Replay, counted
from msrl_jax.envs import Box
from tests.support.compiled import collectives
from tests.support.off_policy import (
    B,
    adam,
    assert_close,
    build,
    counting,
    drawn,
    num_params,
    one,
    plain_losses,
    plain_mlp,
    plain_policy,
    start,
    wide,
)
from tests.support.random_walk import RandomWalk


@pytest.mark.parametrize("continuous", [True, pytest.param(False, marks=pytest.mark.long)], ids=["continuous", "discrete"])
def test_one_update_equals_an_independent_implementation(continuous):
    options = {"target_entropy": -1.5, "max_grad_norm": 0.7} if continuous else {"learn_temperature": False}
    env = RandomWalk(continuous)
    options |= {"num_updates": 1, "initial_temperature": 0.3, "replay.n_step": 2, "anneal_learning_rate": True}
    agent, config = build("sac", env, **options)
    iterate = counting(agent, 20)
    state = start(agent, 6, iterate)
    after, metrics = iterate(state, 6)
    batch, key = drawn(env, config, state, after)
    assert (batch.discount == 0).any() and len(np.unique(batch.discount)) == 3
    keys = jax.random.split(key, (2, B))
    noises = np.asarray(jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))(keys))
    target_entropy = -1.5 if continuous else np.log(3) / 2
    losses = plain_losses(state, batch, noises, continuous, target_entropy, config.learn_temperature)
    for name, loss in losses.items():
        value, gradient = jax.jit(jax.value_and_grad(loss))(state.params[name])
        assert_close(after.params[name], adam(state.params[name], state.opt_state[name], gradient, config, 1 - 6 / 20))
        if name != "log_temperature":
            np.testing.assert_allclose(metrics[f"{name}_loss"].total, value, rtol=1e-4, atol=1e-5)
    moved = jax.tree.map(lambda old, new: 0.995 * old + 0.005 * new, wide(state.target_params), wide(after.params["critic"]))
    assert_close(after.target_params, moved)
    assert (after.params["log_temperature"] != np.log(np.float32(0.3))) == continuous


def standardized(obs, statistics):
    mean, var = (np.asarray(x, np.float64) for x in (statistics.mean, statistics.var))
    return np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10).astype(np.float32)


@pytest.mark.slow
def test_an_update_with_quantiles_of_standardized_observations_equals_an_independent_implementation():
    """TQC: targets are the pooled quantiles without the largest, and the actor climbs the mean of all."""
    env, count, dropped = RandomWalk(True), 5, 2
    agent, config = build(
        "sac",
        env,
        returns=TQC(count, dropped),
        num_critics=3,
        num_updates=1,
        initial_temperature=0.3,
        normalize_observations=True,
    )
    iterate = counting(agent, 20)
    state = start(agent, 6, iterate)
    after, metrics = iterate(state, 6)
    batch, key = drawn(env, config, state, after)
    np.testing.assert_allclose(batch.obs[:, 1], batch.obs[:, 0] ** 2, rtol=1e-6)  # as the environment gave them
    statistics, params = after.observations, state.params
    batch = batch._replace(**{name: standardized(getattr(batch, name), statistics) for name in ("obs", "next_obs")})
    keys = jax.random.split(key, (2, B))
    noises = np.asarray(jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))(keys))
    temperature = np.exp(params["log_temperature"])
    quantiles = lambda critic, *inputs: jnp.stack([plain_mlp(one(critic, i), jnp.concatenate(inputs, -1)) for i in range(3)])
    next_action, next_log_prob = plain_policy(params, batch.next_obs, noises[0], True)
    pooled = quantiles(state.target_params, batch.next_obs, next_action).swapaxes(0, 1).reshape(B, -1)
    kept = np.sort(pooled)[:, : 3 * (count - dropped)]
    target = batch.reward[:, None] + batch.discount[:, None] * (kept - temperature * next_log_prob[:, None])

    def critic_loss(critic):
        error = target[:, None] - quantiles(critic, batch.obs, batch.action)[..., None]  # [C, B, N, M]
        huber = jnp.where(jnp.abs(error) < 1, error**2 / 2, jnp.abs(error) - 0.5)
        fraction = (np.arange(count) + 0.5)[:, None] / count
        return (jnp.where(error < 0, 1 - fraction, fraction) * huber).mean(-1).sum((0, 2)).mean()

    def actor_loss(actor):
        action, log_prob = plain_policy({"actor": actor}, batch.obs, noises[1], True)
        return (temperature * log_prob - quantiles(params["critic"], batch.obs, action).mean((0, -1))).mean()

    for name, loss in {"critic": critic_loss, "actor": actor_loss}.items():
        value, gradient = jax.jit(jax.value_and_grad(loss))(params[name])
        np.testing.assert_allclose(metrics[f"{name}_loss"].total, value, rtol=1e-4, atol=1e-5)
        assert_close(after.params[name], adam(params[name], state.opt_state[name], gradient, config))


@pytest.mark.long
def test_statistics_are_those_of_all_batches_and_networks_see_what_is_standardized():
    env = RandomWalk(True)
    agent, config = build("sac", env, num_updates=1, normalize_observations=True)
    iterate, seen = counting(agent), []
    state = jax.jit(agent.init)(jax.random.key(0))
    for i in range(6):
        after, metrics = iterate(state, i)
        if metrics["q"].count:
            seen.append(drawn(env, config, state, after)[0].obs)
        state = after
    statistics, seen = state.observations, np.concatenate(seen).astype(np.float64)
    assert len(seen) == 5 * B
    np.testing.assert_allclose(statistics.mean, seen.mean(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(statistics.var, seen.var(0), rtol=1e-4, atol=1e-5)
    obs = np.linspace(-3, 3, 4 * 3, dtype=np.float32).reshape(4, 3)
    want = np.tanh(plain_mlp(state.params["actor"], standardized(obs, statistics))[:, :2]) * 0.5 + np.array([0, 0.5])
    np.testing.assert_allclose(agent.act(state, obs, None, ())[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_devices_exchange_one_gradient_per_update_and_a_few_scalars():
    agent, _ = build("sac", RandomWalk(True))
    found = collectives(counted(agent))
    assert {kind for kind, _ in found} == {"all-reduce"} and len(found) <= 2
    *scalars, gradient = (size for _, size in found)
    assert num_params(agent) <= gradient <= num_params(agent) + 8 and all(size <= 8 for size in scalars)


@pytest.mark.slow
def test_actors_receive_the_actor_alone():
    agent = counted(build("sac", RandomWalk(True))[0])
    state = jax.jit(agent.init)(jax.random.key(0))
    program = msrl.compile(agent.iteration, state, policy=msrl.policies.SingleLearnerCoarse(actors=2), axes=agent.axes)
    down = [c.value for c in program.explain().crossings if c.destination == "actors"]
    assert sorted(down)[-1] == "state.version" and len(down) == 1 + len(jax.tree.leaves(state.inner.params["actor"]))
    assert all(value.startswith("state.inner.params['actor']") for value in sorted(down)[:-1])


def test_acting_is_greedy_without_a_key():
    agent, _ = build("sac", RandomWalk(True))
    state = jax.jit(agent.init)(jax.random.key(0))
    obs = jnp.linspace(-1, 1, 4 * 3).reshape(4, 3)
    squashed = np.tanh(plain_mlp(state.params["actor"], obs)[:, :2])
    np.testing.assert_allclose(agent.act(state, obs, None, ())[0], squashed * 0.5 + np.array([0, 0.5]), rtol=1e-5, atol=1e-6)
    one, other = (np.asarray(agent.act(state, obs, jax.random.key(k), ())[0]) for k in (1, 2))
    assert (one != other).all() and (np.abs(one - np.array([0, 0.5])) <= 0.5).all()


@dataclasses.dataclass(frozen=True)
class Unbounded(RandomWalk):
    """A walk whose action has no bounds."""

    action_space = Box(-np.inf, np.inf, (2,))


def test_bad_input_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"SAC needs finite bounds .* give its action_space finite low and high, or use .*ppo"):
        SAC().build(Unbounded(True))
    with pytest.raises(ValueError, match=r"learning_starts=10: a batch of 256"):
        SAC(replay=Replay(learning_starts=10)).build(RandomWalk(True))
