"""Random training loops, wired at random from a seed.

They contain fragments (also nested ones), glue, nested loops of any length including 0, stacked constants, numbers of weak
type, callbacks, and effects whose order is logged.
"""

import random
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.policies import Layout, Placement

ENVS, LENGTH = 8, 3
ROLES = ("env", "actor", "learner", "server")
LOG: list[tuple] = []
"""The log of the loops' effects: a name and numbers each."""


def log(name, *values):
    LOG.append((name, *(float(v) for v in values)))


class Pool(NamedTuple):
    """Available values by kind: per env `[E]`, whole vectors `[4]`, scalars `[]`."""

    env: list
    vector: list
    scalar: list


def axes():
    pairs = {"env": [P("env"), P("env")], "vector": [P(), P()], "scalar": [P(), P()]}
    return pairs | {"keys": P("env"), "count": P(), "weak": P()}


def initial_state():
    key = jax.random.key(7)
    ks = jax.random.split(key, 5)
    return {
        "env": [jax.random.normal(ks[0], (ENVS,)), jax.random.uniform(ks[1], (ENVS,))],
        "vector": [jax.random.normal(ks[2], (4,)), jnp.ones(4)],
        "scalar": [jnp.float32(0.5), jnp.float32(-1.0)],
        "keys": jax.random.split(ks[3], ENVS),
        "count": jnp.int32(0),
        "weak": jnp.asarray(1.5),
    }


def make_iteration(seed: int):
    """A pure iteration `state -> (state, metrics)` that is the same for the same seed."""

    def iteration(state):
        rng = random.Random(seed)
        pool = Pool(list(state["env"]), list(state["vector"]), [*state["scalar"], jnp.float32(1) * state["weak"]])
        keys = state["keys"]
        for _ in range(rng.randint(3, 7)):
            pool, keys = add_part(rng, pool, keys, depth=0)
        count = state["count"] + 1
        new = {
            "env": [rng.choice(pool.env) for _ in range(2)],
            "vector": [rng.choice(pool.vector) for _ in range(2)],
            "scalar": [rng.choice(pool.scalar), pool.scalar[-1] * 0.5 + count * 0.01],
            "keys": keys,
            "count": count,
            "weak": state["weak"] * 0.75,
        }
        metrics = {"a": rng.choice(pool.scalar), "b": jnp.tanh(rng.choice(pool.scalar))}
        return new, metrics | {"n": state["count"], "c": new["scalar"][0]}

    return iteration


def add_part(rng, pool, keys, depth):
    special = ["keys", "nested", "twice", "constant", "weak", "callback", "effect"]
    kind = rng.choice(["fragment"] * 4 + ["glue"] * 3 + ["scan"] * (3 if depth < 2 else 0) + special)
    if kind == "constant":
        table = np.linspace(rng.uniform(-1, 0), 1, ENVS, dtype=np.float32)
        pool.env.append(rng.choice(pool.env) * table + np.float32(rng.random()))
        pool.scalar.append(jnp.float32(rng.random()))
    elif kind == "weak":
        half = (rng.choice(pool.env) * 8).astype(jnp.bfloat16) * jnp.asarray(0.5)  # bfloat16, since the factor is weak
        pool.env.append(half.astype(jnp.float32) * rng.random())
    elif kind == "callback":
        role = rng.choice([None, *ROLES])
        call = host_add if role is None else msrl.fragment(role=role)(host_add)
        pool.env.append(call(rng.choice(pool.env)))
    elif kind == "effect":
        name, value = f"effect {rng.random():.3f}", rng.choice(pool.scalar)
        if rng.random() < 0.5:
            io_callback(lambda v: log(name, v), None, value, ordered=True)
        else:

            def tick(v):
                log(name, v)
                return np.float32(v) / 2

            pool.scalar.append(io_callback(tick, jax.ShapeDtypeStruct((), jnp.float32), value, ordered=True))
    elif kind == "glue":
        pool.env.append(jnp.tanh(rng.choice(pool.env) + rng.choice(pool.scalar)))
        pool.scalar.append(jnp.sin(rng.choice(pool.scalar) + rng.choice(pool.scalar)))
        if rng.random() < 0.5:
            pool.vector.append(rng.choice(pool.vector) * rng.choice(pool.scalar))
    elif kind == "keys":

        @msrl.fragment(role=rng.choice(ROLES), name="draw")
        def draw(keys):
            pairs = jax.vmap(jax.random.split)(keys)
            return pairs[:, 0], jax.vmap(jax.random.uniform)(pairs[:, 1])

        keys, noise = draw(keys)
        pool.env.append(noise)
    elif kind == "scan":
        pool, keys = add_scan(rng, pool, keys, depth)
    else:
        args = rng.choice(pool.env), rng.choice(pool.vector), rng.choice(pool.scalar)
        part = make_fragment(rng, nested=kind == "nested")
        out = part(*args)
        if kind == "twice":
            out2 = part(rng.choice(pool.env), out[1], out[2])
            for values, x in zip(pool, out2, strict=True):
                values.append(x)
        for values, x in zip(pool, out, strict=True):
            values.append(x)
    return pool, keys


def host_add(x):
    return jax.pure_callback(lambda v: np.asarray(v) + np.float32(0.25), jax.ShapeDtypeStruct((ENVS,), jnp.float32), x)


def make_fragment(rng, nested):
    role, factor = rng.choice(ROLES), rng.uniform(0.5, 1.0)
    inner = make_fragment(rng, False) if nested else None

    @msrl.fragment(role=role, name=f"{role}_part")
    def part(x, v, s):
        x = jnp.cos(x * factor + v.sum() * 0.1 + s)
        if inner is not None:
            x, v, s = inner(x, v, s)
        return x, jnp.tanh(v + x.mean()), jnp.sin(s + x.max() * factor)

    return part


def add_scan(rng, pool, keys, depth):
    length = 0 if rng.random() < 0.1 else LENGTH
    rows = jnp.stack([rng.choice(pool.env)] * LENGTH)[:length] if rng.random() < 0.5 else None
    xs = (rows, jnp.arange(length, dtype=jnp.float32))
    stacked = rng.random() < 0.5
    constant = rng.choice(pool.env), rng.choice(pool.vector), rng.choice(pool.scalar)
    seed = rng.random()
    reverse = rng.random() < 0.4
    carry = (rng.choice(pool.env), rng.choice(pool.vector), rng.choice(pool.scalar), keys, jnp.zeros((ENVS,)), jnp.int32(0))

    def body(carry, row):
        inner = random.Random(seed)
        x, v, s, keys, acc, n = carry
        here = Pool([x, constant[0]], [v, constant[1]], [s, constant[2], row[1]])
        if row[0] is not None:
            here.env.append(row[0])
        for _ in range(inner.randint(1, 4)):
            here, keys = add_part(inner, here, keys, depth + 1)
        carry = (here.env[-1], here.vector[-1], inner.choice(here.scalar), keys, acc + inner.choice(here.env), n + 1)
        constants = (1.0, False, np.ones(2, np.float32)) if stacked else ()
        return carry, (inner.choice(here.env), inner.choice(here.scalar), x, row[1], n, constants)

    (x, v, s, keys, acc, n), ys = jax.lax.scan(body, carry, xs, reverse=reverse)
    pool.env.extend([x, acc, ys[0].sum(0), ys[2].sum(0) / LENGTH])
    pool.vector.append(v)
    pool.scalar.extend([s, ys[1].sum(), ys[3].sum() + n + ys[4].sum() + sum(jnp.sum(y) for y in ys[5])])
    return pool, keys


class Scattered:
    """Every role on its own placement; some placements share devices."""

    def layout(self, devices, sizes):
        parts = {"env": devices[:2], "actor": devices[1:5], "learner": devices[4:6], "server": devices[:1]}
        return Layout({role: Placement.over(role, part) for role, part in parts.items()}, policy="Scattered()")


class Apart:
    """Every role on two separate devices."""

    def layout(self, devices, sizes):
        parts = {role: devices[2 * i : 2 * i + 2] for i, role in enumerate(ROLES)}
        return Layout({role: Placement.over(role, part) for role, part in parts.items()}, policy="Apart()")


POLICIES = [Scattered(), Apart(), msrl.policies.Central(shards=2)]
