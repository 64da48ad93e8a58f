"""Control flow, transformations and operations across environments, inside of fragments and around them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from tests.support.same_run import ENVS, EVERYWHERE, Case, Where, assert_same_run
from tests.support.slow import mostly_slow, slow_unless

act = msrl.fragment(role="actor", name="act")(lambda w, x: jnp.tanh(x * w))
env_step = msrl.fragment(role="env", name="env_step")(lambda x, a: 0.9 * x + 0.1 * a)
learn = msrl.fragment(role="learner", name="learn")(lambda w, x: w - 0.1 * (w - x.mean()))


def init():
    return {"w": jnp.float32(0.7), "x": jnp.linspace(-0.4, 1.0, ENVS), "n": jnp.int32(0)}


AXES = {"w": P(), "x": P("env"), "n": P()}


def control_flow():
    @msrl.fragment(role="actor")
    def choose(w, x, n):
        x = jax.lax.cond(n % 2 == 0, lambda x: x + w, lambda x: x - w, x)
        x = jax.lax.switch(n % 3, [lambda x: x, lambda x: x * 2, lambda x: x[::-1]], x)
        return jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x / 2, x)

    @msrl.fragment(role="learner")
    def repeat(w, x):
        return jax.lax.fori_loop(0, 3, lambda i, w: w - 0.1 * (w - x.mean()) / (i + 1), w)

    def iteration(s):
        x = choose(s["w"], s["x"], s["n"])
        x = jax.lax.cond(s["n"] % 2 == 0, lambda x: act(s["w"], x), lambda x: act(-s["w"], x), x)  # around one placement
        x = jax.lax.fori_loop(0, 2, lambda _, x: act(s["w"], x), x)
        return {"w": repeat(s["w"], x), "x": env_step(x, s["x"]), "n": s["n"] + 1}, {"x": x, "n": s["n"]}

    return Case(iteration, init, AXES, 4)


def scans():
    def iteration(s):
        def step(x, y):
            x = env_step(x, act(s["w"], x))
            return x, (x if y is None else x + y, x.sum())

        x, (forward, _) = jax.lax.scan(step, s["x"], None, length=3)
        x, (backward, sums) = jax.lax.scan(step, x, forward, reverse=True)
        x, (rows, _) = jax.lax.scan(step, x, jnp.arange(4.0), unroll=2)

        def outer(c, weight):
            w, x = c
            x, (rows, _) = jax.lax.scan(lambda x, y: step(x, y * weight), x, jnp.arange(2.0), reverse=True)
            return (learn(w, rows), x), w

        (w, x), ws = jax.lax.scan(outer, (s["w"], x), jnp.linspace(0.0, 1.0, 3))
        metrics = {"backward": backward.mean(), "sums": sums, "rows": rows[-1], "ws": ws}
        return {"w": w, "x": x, "n": s["n"] + 1}, metrics

    return Case(iteration, init, AXES)


def transformations():
    @msrl.fragment(role="learner")
    def through(w, x):
        """A gradient through the actor and the environment, with a checkpoint."""

        @jax.checkpoint
        def rollout(w, x):
            for _ in range(2):
                x = env_step(x, act(w, x))
            return x

        return w - 0.1 * jax.grad(lambda w: (rollout(w, x) ** 2).mean())(w)

    @msrl.fragment(role="learner")
    def average(w):
        return jax.lax.pmean(w, "member")

    def member(w, x):
        x = env_step(x, act(w, x))
        w = through(w, x)
        return 0.5 * (w + average(w)), x

    def iteration(s):
        w, x = jax.vmap(member, axis_name="member")(s["w"], s["x"])
        return {"w": w, "x": x}, {"w": w.sum(), "x": x[:, 0]}

    def population():
        return {"w": jnp.arange(3.0), "x": jnp.arange(24.0).reshape(3, ENVS) / 10}

    return Case(iteration, population, {"w": P(), "x": P(None, "env")})


def across_environments():
    @msrl.fragment(role="actor")
    def mix(x, key):
        key, draw = jax.random.split(key)
        values, places = jax.lax.top_k(x, 3)
        spectrum = jnp.abs(jnp.fft.rfft(x))
        groups = jax.ops.segment_sum(x, jnp.arange(ENVS) % 3, 3)
        mixed = jnp.sort(x) + jnp.cumsum(x) + jnp.convolve(x, jnp.ones(3), "same") + jax.random.permutation(draw, x)
        return jnp.tanh(mixed), (values, places, spectrum, groups), key

    @msrl.fragment(role="learner")
    def decompose(x):
        matrix = jnp.outer(x, x[::-1]) + jnp.eye(ENVS)
        return jnp.linalg.svd(matrix, compute_uv=False), jnp.unique(x > 0, size=2)

    def iteration(s):
        x, found, key = mix(s["x"], s["key"])
        singular, signs = decompose(x)
        return {"x": x, "key": key}, {"found": found, "singular": singular, "signs": signs}

    return Case(iteration, lambda: {"x": init()["x"], "key": jax.random.key(1)}, {"x": P("env"), "key": P()})


EACH_TIME = {
    control_flow: ("SingleLearnerCoarse-4", "SingleLearnerFine-2"),
    scans: ("GPUOnly-4", "SingleLearnerFine-4"),
    transformations: ("SingleLearnerCoarse-4",),
    across_environments: ("GPUOnly-4", "Environments-4"),
}


@pytest.mark.parametrize(
    ("case", "where"),
    [slow_unless(str(w) in often, case, w, id=f"{case.__name__}-{w}") for case, often in EACH_TIME.items() for w in EVERYWHERE],
)
def test_the_same_run(case, where):
    assert_same_run(case, where)


def a_server():
    @msrl.fragment(role="learner")
    def gradient(w, x):
        return jax.grad(lambda w: ((w @ jnp.ones(12) - x) ** 2).mean())(w)

    @msrl.fragment(role="server")
    def update(w, m, g):
        m = 0.9 * m + g
        return w - 0.01 * m, m

    def iteration(s):
        def epoch(c, _):
            w, m = c
            return update(w, m, gradient(w, s["x"])), None

        (w, m), _ = jax.lax.scan(epoch, (s["w"], s["m"]), None, length=2)
        return {"w": w, "m": m, "x": env_step(s["x"], act(w.sum(), s["x"]))}, {"w": w.sum()}

    def init():
        return {"w": jnp.linspace(0.0, 1.0, 12), "m": jnp.zeros(12), "x": jnp.linspace(-1.0, 1.0, ENVS)}

    return Case(iteration, init, {"w": P(), "m": P(), "x": P("env")})


@pytest.mark.parametrize("shards", mostly_slow([2, 3, 4], "4"))
def test_servers_of_any_size_are_the_same_run(shards):
    assert_same_run(a_server, Where(policies.Central(workers=2, shards=shards), 2 + shards))
