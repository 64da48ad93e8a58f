"""A small actor-critic on a linear system, as a user would write it; plain Python references use its parts."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.policies import DistributionPolicy

ENVS, UNROLL, EPOCHS, MINIBATCHES = 16, 6, 2, 2
OPTIMIZER = optax.adam(1e-2)


class State(NamedTuple):
    params: dict
    opt_state: optax.OptState
    x: jax.Array  # [E, 2]
    keys: jax.Array  # [E]
    key: jax.Array
    step: jax.Array


AXES = State(P(), P(), P("env"), P("env"), P(), P())


def initial_state() -> State:
    key = jax.random.key(3)
    params = {"w": 0.1 * jax.random.normal(key, (2,)), "v": jnp.zeros(2)}
    x = jax.random.normal(jax.random.key(1), (ENVS, 2))
    return State(params, OPTIMIZER.init(params), x, jax.random.split(key, ENVS), jax.random.key(9), jnp.int32(0))


@msrl.fragment(role="actor")
def act(params, x, keys):
    pairs = jax.vmap(jax.random.split)(keys)
    noise = jax.vmap(jax.random.normal)(pairs[:, 1])
    return x @ params["w"] + noise, pairs[:, 0]


@msrl.fragment(role="env")
def env_step(x, action):
    x = 0.9 * x + 0.1 * jnp.stack([x[:, 1], action], 1)
    return x, -(x**2).sum(1)


@msrl.fragment(role="learner")
def gradients(params, batch):
    x, action, target = batch

    def loss(params):
        log_prob = -0.5 * (action - x @ params["w"]) ** 2
        error = target - x @ params["v"]
        return (-log_prob * jax.lax.stop_gradient(error) + 0.5 * error**2).mean()

    return jax.value_and_grad(loss)(params)


@msrl.fragment(role="server")
def apply_update(params, opt_state, grads):
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


@msrl.fragment(role="learner")
def learn(params, opt_state, key, trajectory):
    x, action, reward = trajectory
    target = jax.lax.scan(lambda g, r: (r + 0.9 * g,) * 2, jnp.zeros(ENVS), reward, reverse=True)[1]
    rows = jnp.concatenate([jax.random.permutation(k, UNROLL) for k in jax.random.split(key, EPOCHS)])
    rows = rows.reshape(EPOCHS * MINIBATCHES, -1)

    def update(carry, rows):
        params, opt_state = carry
        loss, grads = gradients(params, jax.tree.map(lambda y: y[rows], (x, action, target)))
        return apply_update(params, opt_state, grads), loss

    (params, opt_state), losses = jax.lax.scan(update, (params, opt_state), rows)
    return params, opt_state, losses.mean()


def rollout(params, x, keys):
    def step(carry, _):
        x, keys = carry
        action, keys = act(params, x, keys)
        new_x, reward = env_step(x, action)
        return (new_x, keys), (x, action, reward)

    return jax.lax.scan(step, (x, keys), None, length=UNROLL)


def iteration(state: State):
    (x, keys), trajectory = rollout(state.params, state.x, state.keys)
    key, learn_key = jax.random.split(state.key)
    params, opt_state, loss = learn(state.params, state.opt_state, learn_key, trajectory)
    reward = trajectory[2].mean()
    metrics = {"loss": loss, "twice": 2 * loss, "reward": reward, "gap": reward - loss}
    return State(params, opt_state, x, keys, key, state.step + 1), metrics


def program(policy: str | DistributionPolicy, devices: int = 8) -> msrl.Program:
    """The program on the first devices, made of shapes; tests share it, so they leave it as it is."""
    return _program(msrl.policies.get(policy), devices)


@functools.lru_cache(12)  # those of tests that stand near each other: JAX is slow with many programs
def _program(policy: DistributionPolicy, devices: int) -> msrl.Program:
    return msrl.compile(iteration, jax.eval_shape(initial_state), policy=policy, axes=AXES, devices=jax.devices()[:devices])
