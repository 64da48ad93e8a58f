"""PPO for several agents in plain formulas, to compare with: agents that leave, central critics, a memory.

In the shape descriptions, `T` is the length of an unroll, `E` the number of environments and `A` the number of agents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from msrl_jax.networks.distributions import Categorical
from tests.support.ppo import plain_value_scale
from tests.support.recurrent import plain_core

T, E, MINIBATCHES, EPOCHS = 8, 8, 2, 2


def _layer(p, x):
    return x @ p["kernel"] + p["bias"]


def _features(p, x, xp):
    return xp.tanh(_layer(p["Dense_1"], xp.tanh(_layer(p["Dense_0"], x))))


def plain_outputs(params, obs, state, is_first, carry, xp=jnp):
    """Logits `[T, B, N]` and values `[T, B]` of one network along sequences, and the carries; of separate critics too."""
    if "critic" in params:
        actor, critic = params["actor"]["params"], params["critic"]["params"]
        value = _layer(critic["Dense_0"], _features(critic["torso"], state, xp))
        return _layer(actor["Dense_0"], _features(actor["torso"], obs, xp)), value[..., 0], carry
    if "core" not in params:
        p = params["params"]
        value = _layer(p["critic_head"], _features(p["critic_torso"], obs, xp))
        return _layer(p["actor_head"], _features(p["actor_torso"], obs, xp)), value[..., 0], carry
    x = _features(params["torso"]["params"], obs, xp)
    x, carries = plain_core("gru", params["core"], x, is_first, carry, xp)
    heads = params["heads"]["params"]
    return _layer(heads["actor_head"], x), _layer(heads["critic_head"], x)[..., 0], carries


def _wide(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def _networks(params, num_agents, shared):
    """The agents and the parameters of every network."""
    if shared:
        return [(range(num_agents), params)]
    return [([a], jax.tree.map(lambda x, a=a: x[a], params)) for a in range(num_agents)]


def _rows(x, agents):
    """The part of some agents of `[..., E, A, ...]`, one after another. `[..., E * A, ...]`"""
    x = x[..., list(agents), :]
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _states(state, num_agents, shared):
    """What the critic of each agent sees: the global state, and the agent's number if all have one critic. `[..., E, A, S]`"""
    state = np.repeat(np.asarray(state)[..., None, :], num_agents, -2)
    numbers = np.broadcast_to(np.eye(num_agents), (*state.shape[:-1], num_agents))
    return np.concatenate([state, numbers], -1) if shared else state


def plain_rollout(agent, state, shared):
    """Steps the environments in Python; log-probabilities and values come from float64 NumPy. Columns `[T, E, A, ...]`."""
    num_agents = agent.env.num_agents
    params, learner, now = _wide(state.params["agents"]), state.teams["agents"], state.now["agents"]
    keys = jax.vmap(jax.vmap(lambda k: jax.random.split(k, T + 1)))(learner.actor_keys)[:, :, 1:]
    carry = _wide(jax.tree.leaves(state.carry["agents"]))
    env_state, step, columns = state.env_state, jax.jit(agent.env.step), []
    obs, joint, is_first = np.asarray(now.obs), np.asarray(now.state), np.asarray(now.is_first)

    def outputs(obs, joint, is_first, carry):
        logits, value, after = np.zeros((E, num_agents, 3)), np.zeros((E, num_agents)), [np.zeros_like(x) for x in carry]
        for agents, p in _networks(params, num_agents, shared):
            of = lambda x, agents=agents: _rows(np.asarray(x, np.float64), agents)
            found = plain_outputs(
                p,
                of(obs)[None],
                of(_states(joint, num_agents, shared))[None],
                np.repeat(is_first, len(agents))[None],
                [of(x) for x in carry],
                np,
            )
            logits[:, agents], value[:, agents] = found[0].reshape(E, -1, 3), found[1].reshape(E, -1)
            for whole, part in zip(after, found[2], strict=True):
                whole[:, agents] = part.reshape(E, len(agents), -1)
        return logits, value, after

    for t in range(T):
        logits, value, after = outputs(obs, joint, is_first, carry)
        action = np.asarray(Categorical(jnp.float32(logits)).sample(keys[:, :, t]))
        log_prob = np.take_along_axis(logits, action[..., None], -1)[..., 0] - np.log(np.exp(logits).sum(-1))
        env_state, s = step(env_state, jnp.asarray(action))
        future = outputs(s.final_obs, s.final_state, np.zeros(E, bool), after)[1]
        truncated = np.repeat(np.asarray(s.truncated)[:, None], num_agents, 1)
        first = np.repeat(is_first[:, None], num_agents, 1)
        seen = obs, _states(joint, num_agents, shared), first
        columns.append([*seen, action, log_prob, value, future, s.reward, s.terminated, truncated, s.valid])
        obs, joint, is_first, carry = np.asarray(s.obs), np.asarray(s.state), np.asarray(s.ended), after
    return obs, is_first, carry, [np.stack([np.asarray(x) for x in column]) for column in zip(*columns, strict=True)]


def plain_update(agent, config, state, rollout, shared):
    """Advantages by a loop; then, for every network, one optax update per minibatch, from a loss written out here."""
    obs, joint, is_first, action, log_prob, value, future, reward, terminated, truncated, valid = rollout
    learner, recurrent = state.teams["agents"], config.core is not None
    _, *epoch_keys = jax.random.split(learner.key, config.num_epochs + 1)
    if recurrent:  # one environment of every group of adjacent ones
        groups = np.arange(E).reshape(-1, MINIBATCHES)
        order = jnp.broadcast_to(jnp.arange(MINIBATCHES)[:, None], (MINIBATCHES, len(groups)))
        orders = np.concatenate([jax.random.permutation(k, order, axis=0, independent=True) for k in epoch_keys])
        minibatches = [(np.arange(T), groups[np.arange(len(groups)), o]) for o in orders]
    else:
        orders = np.concatenate([jax.random.permutation(k, T).reshape(MINIBATCHES, -1) for k in epoch_keys])
        minibatches = [(o, np.arange(E)) for o in orders]
    tx = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate, eps=1e-5))
    mean = lambda x, counts: jnp.where(counts, x, 0).sum() / counts.sum()

    def loss(params, carry, obs, joint, is_first, action, log_prob, advantage, old, target, counts):
        advantage = advantage - mean(advantage, counts)
        advantage = advantage / (jnp.sqrt(mean(advantage**2, counts)) + 1e-8)
        logits, new, _ = plain_outputs(params, obs, joint, is_first, carry)
        p = jnp.exp(logits) / jnp.exp(logits).sum(-1, keepdims=True)
        ratio = jnp.take_along_axis(p, action[..., None], -1)[..., 0] / jnp.exp(log_prob)
        near = jnp.where(advantage > 0, jnp.minimum(ratio, 1 + config.clip_ratio), jnp.maximum(ratio, 1 - config.clip_ratio))
        clipped = jnp.minimum(jnp.maximum(new, old - config.clip_value), old + config.clip_value)
        error = jnp.maximum((new - target) ** 2, (clipped - target) ** 2) / 2
        entropy = -(p * jnp.log(p)).sum(-1)
        each = -near * advantage + config.value_coef * error - config.entropy_coef * entropy
        return mean(each, counts)

    slope, found, carries = jax.jit(jax.grad(loss)), [], jax.tree.leaves(state.carry["agents"])
    for i, (agents, params) in enumerate(_networks(state.params["agents"], agent.env.num_agents, shared)):
        of = lambda x, agents=agents: x[:, :, list(agents)]
        own = lambda tree, i=i: tree if shared else jax.tree.map(lambda leaf: leaf[i], tree)
        ends, counts, advantage, after = of(terminated | truncated), of(valid), np.zeros((T, E, len(agents))), 0.0
        scale = plain_value_scale(own(learner.value_scale))
        old, later = of(value) * scale, np.where(of(terminated), 0, of(future) * scale)
        for t in reversed(range(T)):
            after = (
                of(reward)[t]
                + config.discount * later[t]
                - old[t]
                + config.discount * config.gae_lambda * np.where(ends[t], 0, after)
            )
            advantage[t] = after
        target = old + advantage
        scale = plain_value_scale(own(learner.value_scale), target[counts])
        data = [*map(of, (obs, joint, is_first, action, log_prob)), advantage, old / scale, target / scale]
        opt_state = own(learner.opt_state)[:2]
        for times, envs in minibatches:
            batch = [x[times][:, envs].reshape(len(times), -1, *x.shape[3:]) for x in (*data, counts)]
            carry = [x[envs][:, list(agents)].reshape(-1, x.shape[-1]) for x in map(np.asarray, carries)]
            batch = [x.astype(np.float32) if x.dtype == np.float64 else x for x in batch]
            updates, opt_state = tx.update(slope(params, carry, *batch), opt_state)
            params = optax.apply_updates(params, updates)
        found.append((params, scale))
    return found
