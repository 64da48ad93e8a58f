"""Parts of off-policy algorithms in plain formulas, to compare with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import algorithms, replay
from msrl_jax.agents.agent import innermost
from msrl_jax.algorithms import Progress
from msrl_jax.fragments.counters import counter
from msrl_jax.loops.replay_buffers import n_step_buffer

E, B = 16, 32
SMALL = {
    "num_envs": E,
    "unroll_length": 4,
    "num_updates": 3,
    "batch_size": B,
    "replay.capacity": 64 * E,
    "replay.learning_starts": 8 * E,
    "hidden_sizes": (8, 6),
    "learning_rate": 3e-3,
}


def build(name, env, **overrides):
    config = algorithms.make(name, SMALL | overrides)
    return config.build(env), config


def counting(agent, total=None):
    """The compiled iteration `(state, iterations done before it) -> (state, metrics)`, of a run of a total of iterations."""
    compiled = jax.jit(lambda state, count: agent.iteration(state, Progress(count, total)))
    return lambda state, done: compiled(state, counter(done))


def start(agent, iterations, iterate=None):
    """The state after some iterations."""
    iterate, state = iterate or counting(agent), jax.jit(agent.init)(jax.random.key(0))
    for i in range(iterations):
        state, _ = iterate(state, i)
    return state


def drawn(env, config, state, after):
    """The first batch that an iteration learned from, as an `NStep` of NumPy arrays, and its key."""
    key = jax.random.split(state.replay_key, config.num_updates + 1)[1]
    sample = sampler(env, config)(after.replay, key)
    assert isinstance(sample.experience, replay.NStep)
    return jax.tree.map(np.asarray, sample.experience), jax.random.split(state.key, config.num_updates + 1)[1]


@functools.cache
def sampler(env, config):
    return jax.jit(n_step_buffer(env, config).sample)


def one(critics, i):
    """The parameters of one of several critics."""
    return jax.tree.map(lambda x: x[i], critics)


def plain_mlp(params, x):
    """A network of two hidden layers of ReLUs."""
    layers = [params["params"]["torso"]["Dense_0"], params["params"]["torso"]["Dense_1"], params["params"]["Dense_0"]]
    for layer in layers[:2]:
        x = jnp.maximum(x @ layer["kernel"] + layer["bias"], 0)
    return x @ layers[2]["kernel"] + layers[2]["bias"]


def adam(params, opt_state, gradient, config, left=1.0):
    """One update of Adam in float64: the gradient scaled down to its largest norm, and of the learning rate what is left."""
    moments = opt_state[1][0]
    count = int(moments.count) + 1
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in jax.tree.leaves(gradient)))
    epsilon = getattr(config, "adam_epsilon", 1e-8)
    scale = 1.0 if config.max_grad_norm is None else min(1.0, config.max_grad_norm / norm)

    def step(p, g, m, v):
        p, g, m, v = (np.asarray(x, np.float64) for x in (p, g, m, v))
        m, v = 0.9 * m + 0.1 * scale * g, 0.999 * v + 0.001 * (scale * g) ** 2
        return p - left * config.learning_rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + epsilon)

    return jax.tree.map(step, params, gradient, moments.mu, moments.nu)


def wide(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def assert_close(got, want):
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=5e-6)
    jax.tree.map(close, got, want)


def num_params(agent):
    return sum(x.size for x in jax.tree.leaves(innermost(jax.eval_shape(agent.init, jax.random.key(0))).params))


def plain_q(params, obs, dueling, xp):
    """The network written out."""
    p = params["params"]
    layer = lambda p, x: x @ p["kernel"] + p["bias"]
    relu = lambda p, x: xp.maximum(layer(p, x), 0)
    x = relu(p["torso"]["Dense_0"], obs)
    if not dueling:
        return layer(p["head"], relu(p["torso"]["Dense_1"], x))
    value = layer(p["value_head"], relu(p["value_stream"], x))
    advantage = layer(p["advantage_head"], relu(p["advantage_stream"], x))
    return value + advantage - advantage.mean(-1, keepdims=True)


def plain_policy(params, obs, noise, continuous):
    """Actions and log-probabilities in the plain formulas of the papers; of all choices, if not continuous."""
    outputs = plain_mlp(params["actor"], obs)
    if not continuous:
        probs = jnp.exp(outputs) / jnp.exp(outputs).sum(-1, keepdims=True)
        return None, jnp.log(probs)
    loc, log_scale = outputs[:, :2], outputs[:, 2:]
    scale = jnp.exp(jnp.minimum(jnp.maximum(log_scale, -20), 2))
    u = loc + scale * noise
    density = jnp.exp(-(((u - loc) / scale) ** 2) / 2) / (scale * np.sqrt(2 * np.pi))
    return jnp.tanh(u), (jnp.log(density) - jnp.log(1 - jnp.tanh(u) ** 2)).sum(-1)


def plain_soft_value(critic, policy, obs, temperature):
    action, log_prob = policy
    inputs = obs if action is None else jnp.concatenate([obs, action], -1)
    q = jnp.minimum(plain_mlp(one(critic, 0), inputs), plain_mlp(one(critic, 1), inputs))
    if action is None:
        probs = jnp.exp(log_prob)
        return (probs * (q - temperature * log_prob)).sum(-1), (probs * log_prob).sum(-1)
    return q[:, 0] - temperature * log_prob, log_prob


def plain_losses(state, batch, noises, continuous, target_entropy, learn_temperature):
    """The losses of the critics, of the actor and of the temperature, each a function of what it trains."""
    temperature = np.exp(state.params["log_temperature"])
    next_policy = plain_policy(state.params, batch.next_obs, noises[0], continuous)
    next_value, _ = plain_soft_value(state.target_params, next_policy, batch.next_obs, temperature)
    target = batch.reward + batch.discount * next_value

    def critic_loss(critic):
        total = 0.0
        for i in range(2):
            inputs = jnp.concatenate([batch.obs, batch.action], -1) if continuous else batch.obs
            q = plain_mlp(one(critic, i), inputs)
            q = q[:, 0] if continuous else q[np.arange(B), batch.action]
            total += ((q - target) ** 2).mean() / 2
        return total

    def soft(actor):
        policy = plain_policy({"actor": actor}, batch.obs, noises[1], continuous)
        return plain_soft_value(state.params["critic"], policy, batch.obs, temperature)

    def temperature_loss(log_temperature):
        log_prob = jax.lax.stop_gradient(soft(state.params["actor"])[1])
        return -learn_temperature * (jnp.exp(log_temperature) * (log_prob + target_entropy)).mean()

    return {"actor": lambda actor: -soft(actor)[0].mean(), "critic": critic_loss, "log_temperature": temperature_loss}
