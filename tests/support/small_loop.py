"""A loop of four fragments, one for each role, in which tests vary one thing."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl

ENVS, LENGTH = 8, 3


@msrl.fragment(role="env")
def env_step(x, action):
    return 0.9 * x + 0.1 * action


@msrl.fragment(role="actor")
def act(w, x):
    return jnp.tanh(w * x)


@msrl.fragment(role="learner")
def gradients(w, x, batch):
    return (w * x - batch).mean()


@msrl.fragment(role="server")
def apply_update(w, gradient):
    return w - 0.1 * gradient


def initial_state():
    return {"w": jnp.float32(0.5), "x": jnp.arange(ENVS, dtype=jnp.float32), "n": jnp.int32(0)}


AXES = {"w": P(), "x": P("env"), "n": P()}


def rollout(state, in_step=lambda *_: None):
    def step(x, t):
        action = act(state["w"], x)
        in_step(x, action, t)
        return env_step(x, action), action

    return jax.lax.scan(step, state["x"], jnp.arange(LENGTH))


def learn(state, x, batch):
    return {"w": apply_update(state["w"], gradients(state["w"], x, batch)), "x": x, "n": state["n"] + 1}
