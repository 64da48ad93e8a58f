"""PPO in plain formulas, to compare with."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

T, E = 8, 8

SMALL = {"num_envs": E, "unroll_length": T, "num_epochs": 2, "num_minibatches": 4, "hidden_sizes": (8, 6)}


def plain_network(params, obs, shared, xp=jnp):
    """The network written out: logits or means, and values."""
    p = params["params"]

    def features(name, x):
        for layer in ("Dense_0", "Dense_1"):
            x = xp.tanh(x @ p[name][layer]["kernel"] + p[name][layer]["bias"])
        return x

    head = lambda name, x: x @ p[name]["kernel"] + p[name]["bias"]
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


def plain_value_scale(scale, target=None):
    """What the critic's values are divided by, before or with new targets: a decaying mean of their squares, at least 1."""
    square, weight = float(scale.root) ** 2, float(scale.weight)
    if target is not None:
        square = (0.99999 * weight * square + 0.00001 * np.square(target).mean()) / (0.99999 * weight + 0.00001)
    return np.sqrt(max(square, 1.0))


def plain_update(agent, config, state, rollout, num_updates=None):
    """Advantages by a loop; then one optax update per minibatch of time steps, from a loss written out here.

    Also returns how far the parameters after `num_updates` diverge from the policy that acted, on each later minibatch.
    """
    obs, action, log_prob, value, bootstrap_value, reward, terminated, truncated = rollout
    continuous = agent.env.action_space.shape != ()
    advantage, after = np.zeros((T, E)), np.zeros(E)
    value, bootstrap_value = (x * plain_value_scale(state.value_scale) for x in (value, bootstrap_value))
    for t in reversed(range(T)):
        future = np.where(terminated[t], 0, bootstrap_value[t])
        after = np.where(terminated[t] | truncated[t], 0, after)
        after = reward[t] + config.discount * future - value[t] + config.discount * config.gae_lambda * after
        advantage[t] = after
    target = advantage + value
    value, target = (x / plain_value_scale(state.value_scale, target) for x in (value, target))
    standardize = lambda a: (a - a.mean()) / (a.std() + 1e-8)
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
    params, opt_state = state.params, state.opt_state[:2]
    minibatches = np.concatenate([jax.random.permutation(k, T).reshape(config.num_minibatches, -1) for k in epoch_keys])
    for i in minibatches[:num_updates]:
        updates, opt_state = tx.update(jax.grad(loss)(params, i), opt_state)
        params = optax.apply_updates(params, updates)

    def divergence(i):
        outputs, _ = plain_network(params, obs[i], continuous)
        new, _ = plain_log_prob_and_entropy(outputs, params["params"].get("log_scale"), action[i])
        return (jnp.exp(new - log_prob[i]) - 1 - (new - log_prob[i])).mean()

    return params, [divergence(i) for i in minibatches[num_updates:]] if num_updates else []
