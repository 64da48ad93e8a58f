"""Q-learning from prioritized replay on a linear system, as a user would write it; plain Python references use its parts."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import replay

ENVS, UNROLL, UPDATES, BATCH = 8, 2, 2, 16
EXAMPLE = replay.Transition(jnp.zeros(2), jnp.int32(0), jnp.float32(0), jnp.bool_(0), jnp.bool_(0), jnp.zeros(2))
BUFFER = replay.prioritized(
    EXAMPLE, capacity=12 * ENVS, num_envs=ENVS, unroll_length=UNROLL, batch_size=BATCH, discount=0.9, shards=4
)


class State(NamedTuple):
    w: jax.Array  # [2, 3], the values of three actions
    updates: jax.Array
    x: jax.Array  # [E, 2]
    keys: jax.Array  # [E]
    replay: replay.ReplayState
    key: jax.Array
    pending: tuple[replay.Indices, jax.Array]  # [K, B]


AXES = State(P(), P(), P("env"), P("env"), BUFFER.axes, P(), P(None, "env"))


def initial_state() -> State:
    nothing = replay.Indices(*jnp.zeros((2, UPDATES, BATCH), jnp.int32)), jnp.full((UPDATES, BATCH), jnp.nan)
    keys, x = jax.random.split(jax.random.key(0), ENVS), jax.random.normal(jax.random.key(1), (ENVS, 2))
    return State(jnp.zeros((2, 3)), jnp.int32(0), x, keys, BUFFER.init(), jax.random.key(2), nothing)


@msrl.fragment(role="actor")
def act(w, x, keys):
    pairs = jax.vmap(jax.random.split)(keys)
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(pairs[:, 1])
    return jnp.argmax(x @ w + 0.3 * noise, 1).astype(jnp.int32), pairs[:, 0]


@msrl.fragment(role="env")
def env_step(x, action):
    x = 0.9 * x + 0.3 * jnp.stack([x[:, 1], action - 1.0], 1)
    return x, -(x**2).sum(1)


@msrl.fragment(role="buffer")
def remember(state, pending, items):
    return BUFFER.insert(BUFFER.update(state, *pending), items)


@msrl.fragment(role="buffer")
def draw(state, key):
    key, *keys = jax.random.split(key, UPDATES + 1)
    return key, jax.vmap(BUFFER.sample, (None, 0))(state, jnp.stack(keys))


@msrl.fragment(role="learner")
def learn(w, updates, sample):
    def update(w, batch):
        e = batch.experience
        rows = jnp.arange(BATCH)
        td_error = e.reward + e.discount * (e.next_obs @ w).max(1) - (e.obs @ w)[rows, e.action]
        weight = replay.importance_weights(batch.probability, 0.5) * td_error
        return w.at[:, e.action].add(0.02 * (weight[:, None] * e.obs).T), td_error

    w, td_error = jax.lax.scan(update, w, sample)
    return w, updates + UPDATES, (sample.indices, td_error), {"td_error": jnp.abs(td_error).mean()}


def rollout(w, x, keys):
    def step(carry, _):
        x, keys = carry
        action, keys = act(w, x, keys)
        after, reward = env_step(x, action)
        no = jnp.zeros(ENVS, bool)
        return (after, keys), replay.Transition(x, action, reward, no, no, after)

    return jax.lax.scan(step, (x, keys), length=UNROLL)


def iteration(state: State):
    (x, keys), items = rollout(state.w, state.x, state.keys)
    held = remember(state.replay, state.pending, items)
    key, sample = draw(held, state.key)
    w, updates, pending, metrics = learn(state.w, state.updates, sample)
    return State(w, updates, x, keys, held, key, pending), metrics
