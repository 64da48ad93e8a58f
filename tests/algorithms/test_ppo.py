"""PPO: one iteration against an independent implementation, what it exchanges between devices, and its options."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

from msrl_jax import envs
from msrl_jax.algorithms import PPO
from msrl_jax.fragments.placement import AXES
from msrl_jax.policies import Placement

from ..support.agents import make_counted, make_still, still
from .random_walk import RandomWalk

T, E = 8, 8
SMALL = {"num_envs": E, "unroll_length": T, "num_epochs": 2, "num_minibatches": 4, "hidden_sizes": (8, 6)}


def build(env, **overrides):
    return make_still("ppo", env, **SMALL | overrides)


def start(agent, iterations=1):
    """The state after some iterations, in which the policy is no longer uniform."""
    state = jax.jit(agent.init)(jax.random.key(0))
    for _ in range(iterations):
        state, _ = jax.jit(agent.iteration)(state)
    return state


@pytest.fixture(scope="module", params=[False, True], ids=["discrete", "continuous"])
def walk(request):
    over = "batch" if request.param else "minibatch"
    agent = build(RandomWalk(request.param), shared_torso=request.param, clip_value=0.1, normalize_advantage=over)
    return agent, start(agent)


def plain_network(params, obs, shared, xp=jnp):
    """The network written out: logits or means, and values."""
    p = params["params"]

    def features(name, x):
        for layer in ("Dense_0", "Dense_1"):
            x = xp.tanh(x @ p[name][layer]["kernel"] + p[name][layer]["bias"])
        return x

    head = lambda name, x: x @ p[name]["kernel"] + p[name]["bias"]  # noqa: E731
    actor = features("actor_torso", obs)
    critic = actor if shared else features("critic_torso", obs)
    return head("actor_head", actor), head("critic_head", critic)[..., 0]


def plain_log_prob_and_entropy(outputs, log_scale, action, xp=jnp):
    if log_scale is None:
        p = xp.exp(outputs) / xp.exp(outputs).sum(-1, keepdims=True)
        chosen = (p * (action[..., None] == xp.arange(p.shape[-1]))).sum(-1)
        return xp.log(chosen), -(p * xp.log(p)).sum(-1)
    variance = xp.exp(2 * log_scale)
    log_density = -((action - outputs) ** 2) / (2 * variance) - xp.log(2 * xp.pi * variance) / 2
    return log_density.sum(-1), (xp.log(2 * xp.pi * xp.e * variance) / 2).sum()


def plain_rollout(agent, state):
    """Steps the environments in Python; samples, log-probabilities and values come from float64 NumPy."""
    continuous = agent.env.action_space.shape != ()
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    log_scale = params["params"].get("log_scale")
    keys = jax.vmap(lambda k: jax.random.split(k, T + 1))(state.actor_keys)[:, 1:]
    env_state, obs, columns = state.env_state, state.obs, []
    step = jax.jit(agent.env.step)
    for t in range(T):
        outputs, value = plain_network(params, np.asarray(obs, np.float64), continuous, np)
        if continuous:
            noise = np.stack([jax.random.normal(k, (2,)) for k in keys[:, t]])
            action = (outputs + np.exp(log_scale) * noise).astype(np.float32)
            env_action = np.clip(action, -1, 1) * np.float32([0.5, 0.5]) + np.float32([0, 0.5])
        else:
            cumulative = np.cumsum(np.exp(outputs), -1) / np.exp(outputs).sum(-1, keepdims=True)
            action = np.array([np.searchsorted(c, jax.random.uniform(k)) for c, k in zip(cumulative, keys[:, t], strict=True)])
            env_action = action
        log_prob, _ = plain_log_prob_and_entropy(outputs, log_scale, action, np)
        env_state, step_out = step(env_state, jnp.asarray(env_action))
        _, bootstrap_value = plain_network(params, np.asarray(step_out.final_obs, np.float64), continuous, np)
        row = (obs, action, log_prob, value, bootstrap_value, step_out.reward, step_out.terminated, step_out.truncated)
        columns.append([np.asarray(x) for x in row])
        obs = step_out.obs
    return obs, [np.stack(x) for x in zip(*columns, strict=True)]


def plain_update(agent, config, state, rollout, num_updates=None):
    """Advantages by a loop; then one optax update per minibatch of time steps, from a loss written out here.

    Also returns how far the parameters after `num_updates` diverge from the policy that acted, on each later minibatch.
    """
    obs, action, log_prob, value, bootstrap_value, reward, terminated, truncated = rollout
    continuous = agent.env.action_space.shape != ()
    advantage, after = np.zeros((T, E)), np.zeros(E)
    for t in reversed(range(T)):
        future = np.where(terminated[t], 0, bootstrap_value[t])
        after = np.where(terminated[t] | truncated[t], 0, after)
        after = reward[t] + config.discount * future - value[t] + config.discount * config.gae_lambda * after
        advantage[t] = after
    target = advantage + value
    standardize = lambda a: (a - a.mean()) / (a.std() + 1e-8)  # noqa: E731
    per_minibatch = config.normalize_advantage == "minibatch"
    advantage = advantage if per_minibatch else standardize(advantage)

    def loss(params, i):
        a = standardize(advantage[i]) if per_minibatch else advantage[i]
        outputs, v = plain_network(params, obs[i], continuous)
        new, entropy = plain_log_prob_and_entropy(outputs, params["params"].get("log_scale"), action[i])
        ratio = jnp.exp(new - log_prob[i])
        clipped = jnp.where(a > 0, jnp.minimum(ratio, 1 + config.clip_ratio), jnp.maximum(ratio, 1 - config.clip_ratio))
        near = jnp.clip(v, value[i] - config.clip_value, value[i] + config.clip_value)
        value_error = jnp.maximum((v - target[i]) ** 2, (near - target[i]) ** 2).mean() / 2
        return -(clipped * a).mean() + config.value_coef * value_error - config.entropy_coef * entropy.mean()

    tx = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate, eps=1e-5))
    _, *epoch_keys = jax.random.split(state.key, config.num_epochs + 1)
    params, opt_state = state.params, (state.opt_state[0], (state.opt_state[1], optax.EmptyState()))
    minibatches = np.concatenate([jax.random.permutation(k, T).reshape(config.num_minibatches, -1) for k in epoch_keys])
    for i in minibatches[:num_updates]:
        updates, opt_state = tx.update(jax.grad(loss)(params, i), opt_state)
        params = optax.apply_updates(params, updates)

    def divergence(i):
        outputs, _ = plain_network(params, obs[i], continuous)
        new, _ = plain_log_prob_and_entropy(outputs, params["params"].get("log_scale"), action[i])
        return (jnp.exp(new - log_prob[i]) - 1 - (new - log_prob[i])).mean()

    return params, [divergence(i) for i in minibatches[num_updates:]] if num_updates else []


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


def test_the_state_keeps_its_types(walk):
    agent, state = walk
    after, metrics = jax.eval_shape(agent.iteration, state)
    before = jax.eval_shape(agent.init, jax.random.key(0))
    kind = lambda x: (x.shape, x.dtype, x.weak_type)  # noqa: E731
    assert jax.tree.map(kind, after) == jax.tree.map(kind, before)
    assert not any(x.weak_type for x in jax.tree.leaves(after))
    assert all(x.shape == () and x.dtype == jnp.float32 for x in jax.tree.leaves(metrics))
    assert agent.steps_per_iteration == T * E


def test_a_key_samples_and_no_key_is_greedy(walk):
    agent, state = walk
    continuous = agent.env.action_space.shape != ()
    outputs, _ = plain_network(state.params, state.obs, continuous)
    want = np.clip(outputs, -1, 1) * 0.5 + np.float32([0, 0.5]) if continuous else np.argmax(outputs, -1)
    np.testing.assert_allclose(agent.act(state, state.obs, None), want, rtol=1e-5, atol=1e-6)
    drawn = np.stack([agent.act(state, state.obs, jax.random.key(i)) for i in range(30)])
    assert len(np.unique(drawn)) > 2
    assert all(agent.env.action_space.contains(action) for action in drawn.reshape(-1, *drawn.shape[2:]))


def shardings(agent, mesh):
    """Shardings of the state over a mesh with one axis, over which every logical axis is split."""
    placement = Placement("all", mesh, tuple((axis, "env") for axis in AXES))
    spec = lambda axes, part: jax.tree.map(lambda x: placement.sharding(axes, x.shape), part)  # noqa: E731
    state = jax.eval_shape(agent.init, jax.random.key(0))
    return jax.tree.map(spec, agent.axes, state, is_leaf=lambda x: isinstance(x, PartitionSpec))


def collectives(agent):
    """Name and number of elements of every collective in the compiled iteration, environments split over all devices."""
    mesh = Mesh(np.array(jax.devices()), ("env",))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    compiled = jax.jit(agent.iteration, in_shardings=(shardings(agent, mesh),)).lower(state).compile()
    found = []
    for shapes, name in re.findall(r"= (.*?) (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", compiled.as_text()):
        sizes = re.findall(r"\w+\[([\d,]*)\]", shapes)
        found.append((name, sum(int(np.prod([int(d) for d in size.split(",") if d])) for size in sizes)))
    return sorted(found, key=lambda c: c[1])


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
    "env", [RandomWalk(), pytest.param(RandomWalk(True), marks=pytest.mark.slow), Image()], ids=["mlp", "normal", "cnn"]
)
def test_devices_exchange_one_gradient_per_minibatch_and_a_few_scalars(env):
    """Compiled on eight devices, the gradient and the losses are summed at once; nothing grows with the batch."""
    agent = build(env)
    num_params = sum(x.size for x in jax.tree.leaves(jax.eval_shape(agent.init, jax.random.key(0)).params))
    found = collectives(agent)
    assert {name for name, _ in found} == {"all-reduce"}
    *scalars, gradient = [size for _, size in found]
    assert num_params <= gradient <= num_params + 5
    assert len(scalars) <= 3 and sum(scalars) <= 7
    assert collectives(build(env, num_envs=4 * E, unroll_length=2 * T)) == found


def test_a_split_over_devices_does_not_change_the_run():
    agent = build(RandomWalk())
    state = start(agent, 0)
    iterate = lambda s: jax.lax.scan(lambda s, _: agent.iteration(s), s, None, length=5)  # noqa: E731
    want, want_metrics = jax.jit(iterate)(state)
    split = jax.device_put(state, shardings(agent, Mesh(np.array(jax.devices()), ("env",))))
    got, metrics = jax.jit(iterate)(split)
    np.testing.assert_array_equal(got.obs, want.obs)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)  # noqa: E731
    jax.tree.map(close, (got.params, metrics), (want.params, want_metrics))


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
    assert after.opt_state[1].count - state.opt_state[1].count == 1
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5), after.params, want)
    assert metrics["approx_kl"] > 0


def test_the_learning_rate_falls_to_zero_and_stays_there():
    agent = make_counted("ppo", RandomWalk(), 4, **SMALL, anneal_learning_rate=True, learning_rate=0.5)
    _, metrics = jax.lax.scan(lambda s, _: agent.iteration(s), start(agent, 0), None, length=6)
    np.testing.assert_allclose(metrics["learning_rate"], [0.5, 0.375, 0.25, 0.125, 0, 0])


def test_normalized_environments_train_and_report_raw_episodes():
    agent = build(RandomWalk(), normalize_observations=True, normalize_rewards=True)
    state, metrics = jax.jit(agent.iteration)(start(agent))
    assert 1 <= metrics["episode_length"].mean() <= 5
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((state.params, metrics)))
