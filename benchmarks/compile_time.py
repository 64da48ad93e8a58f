"""Seconds of `msrl.compile` and of tracing under `jax.jit`, for iterations with more and more code outside of fragments."""

import argparse
import time

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl

act = msrl.fragment(role="actor")(lambda params, x: 0.5 * x + params.sum())
learn = msrl.fragment(role="learner")(lambda params, x: 0.9 * params - 0.01 * x.mean())


def chain(n, s):
    """Operations in a row."""
    params = s["params"]
    for _ in range(n):
        params = params * 0.999 + 0.001
    return s | {"acting": params}


def shared(n, s):
    """Lines of which each reads the one before it three times."""
    params = s["params"]
    for _ in range(n):
        params = params * params * 0.1 - params
    return s | {"acting": params}


def keys(n, s):
    """Keys, each split from the one before it."""
    key, x = s["key"], s["x"]
    for _ in range(n):
        key, own = jax.random.split(key)
        x = x + jax.random.uniform(own)
    return s | {"key": key, "x": x}


def nested(n, s):
    """A jitted function that calls a jitted function twice, n / 8 deep (JAX itself recurs)."""
    f = jax.jit(jnp.sin)
    for _ in range(n // 8):
        f = jax.jit(lambda x, f=f: f(x) + f(x))
    return s | {"x": f(s["x"])}


CASES = [(chain, 0), (chain, 1), (shared, 0), (shared, 1), (keys, 0), (nested, 0)]


def seconds(fn):
    """The seconds that a function takes."""
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def main():
    """Prints one row for each kind of code and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[25, 50, 100, 200, 400])
    sizes = parser.parse_args().sizes
    state = {"params": jnp.full(8, 0.5), "x": jnp.ones(8), "key": jax.random.key(0)}
    axes = {"params": P(), "x": P("env"), "key": P()}
    print(f"{'code':8} {'staleness':>9} {'n':>5} {'jax trace':>10} {'compile':>8} {'ratio':>6}")
    for code, staleness in CASES:
        for n in sizes:

            def iteration(s, code=code, n=n):
                s = {"acting": s["params"]} | code(n, s)
                x = act(s["acting"], s["x"])
                return {"params": learn(s["params"], x), "x": x, "key": s["key"]}, {}

            policy = msrl.policies.SingleLearnerCoarse(staleness=staleness)
            jax.clear_caches()
            plain = seconds(lambda f=iteration: jax.jit(f).trace(state))
            jax.clear_caches()
            ours = seconds(lambda f=iteration, policy=policy: msrl.compile(f, state, policy=policy, axes=axes))
            print(f"{code.__name__:8} {staleness:9} {n:5} {plain:10.3f} {ours:8.3f} {ours / plain:6.1f}")


if __name__ == "__main__":
    main()
