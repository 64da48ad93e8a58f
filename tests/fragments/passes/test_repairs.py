"""Operations along a split axis that XLA's partitioner computes wrongly or not at all: programs compute them as NumPy does."""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from tests.support import processes
from tests.support.slow import slow_unless

X = np.random.default_rng(0).normal(size=24).astype(np.float32)
BITS = np.arange(24, dtype=np.int32) * 37 % 101

POLICIES = [
    policies.GPUOnly(3),
    policies.MultiLearner(3),
    policies.SingleLearnerCoarse(actors=3),
    policies.SingleLearnerFine(envs=3, learners=3),
    policies.Environments(envs=3, agents=3),
    policies.Central(workers=3, shards=3),
]


def by_name(*fast):
    """Each policy, slow unless it is one of the named ones."""
    chosen = [slow_unless(type(p).__name__ in fast, p) for p in POLICIES]
    return pytest.mark.parametrize("policy", chosen, ids=lambda p: type(p).__name__)


def shifted(x, edge):
    """The array one element later, with `edge` first."""
    return jax.lax.pad(x, jnp.float32(edge), [(1, -1, 0)])


def windows(x, **operations):
    return {name: jax.lax.reduce_window(x, start, op, (3,), (1,), "SAME") for name, (start, op) in operations.items()}


def edges(x):
    """Operations of one array that pad it with different values."""
    return {
        "cumsum": jnp.cumsum(x), "cumprod": jnp.cumprod(x), "cummin": jax.lax.cummin(x), "cummax": jax.lax.cummax(x),
        "last": jax.lax.cummin(x, reverse=True), "logs": jax.lax.cumlogsumexp(x), "rest": jax.lax.cumsum(x, reverse=True),
        "three": shifted(x, 3), "zero": shifted(x, 0), "nine": shifted(x, 9), "given": shifted(x, 0) + shifted(x, x[0]),
        **windows(x, low=(jnp.inf, jax.lax.min), high=(-jnp.inf, jax.lax.max), sums=(0.0, jax.lax.add)),
    }  # fmt: skip


def edges_of(x):
    """As NumPy computes them."""
    near = lambda start: np.lib.stride_tricks.sliding_window_view(np.pad(x, 1, constant_values=start), 3)  # noqa: E731
    late = lambda edge: np.concatenate([[edge], x[:-1]])  # noqa: E731
    return {
        "cumsum": np.cumsum(x), "cumprod": np.cumprod(x), "zero": late(0),
        "cummin": np.minimum.accumulate(x), "cummax": np.maximum.accumulate(x),
        "last": np.minimum.accumulate(x[::-1])[::-1], "logs": np.logaddexp.accumulate(x), "rest": np.cumsum(x[::-1])[::-1],
        "three": late(3), "nine": late(9), "given": late(0) + late(x[0]),
        "low": near(np.inf).min(1), "high": near(-np.inf).max(1), "sums": near(0).sum(1),
    }  # fmt: skip


def reductions(x, bits):
    odd = lambda a, b: jnp.where(a * a > b * b, a, b)  # noqa: E731
    return {
        "xor": jnp.bitwise_xor.reduce(bits), "or": jnp.bitwise_or.reduce(bits), "and": jnp.bitwise_and.reduce(bits + 128),
        "parity": jnp.logical_xor.reduce(bits > 50), "any": (bits > 50).any(), "own": jax.lax.reduce(x, 0.0, odd, (0,)),
    }  # fmt: skip


def reductions_of(x, bits):
    return {
        "xor": np.bitwise_xor.reduce(bits), "or": np.bitwise_or.reduce(bits), "and": np.bitwise_and.reduce(bits + 128),
        "parity": np.logical_xor.reduce(bits > 50), "any": True, "own": x[np.abs(x).argmax()],
    }  # fmt: skip


def assert_equal(got, want):
    for name, expected in want.items():
        np.testing.assert_allclose(got[name][0], expected, 1e-4, 1e-5, err_msg=name)


def test_xla_takes_the_padding_of_another_operation():
    """The smallest program in plain JAX: once it is right, `repairs` need not separate operations that pad."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    x = jax.device_put(jnp.array([0.36, 0.95, 0.11]), NamedSharding(mesh, P("devices")))
    _, low = jax.jit(lambda x: (jax.lax.cumsum(x), jax.lax.cummin(x)))(x)
    assert np.asarray(low)[0] == 0  # not 0.36
    _, three = jax.jit(lambda x: (shifted(x, 9), shifted(x, 3)))(x)
    assert np.asarray(three)[0] == 9


def test_xla_drops_gradients_of_windows_across_shards():
    """The smallest program in plain JAX: once it is right, `repairs` need not make dimensions whole."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    gradient = jax.jit(jax.grad(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), "SAME").sum()))
    x = jnp.array([3.0, 1, 2, 6, 5, 4])
    assert np.asarray(gradient(x)).tolist() == [1, 0, 1, 2, 1, 1]
    assert np.asarray(gradient(jax.device_put(x, NamedSharding(mesh, P("devices"))))).tolist() != [1, 0, 1, 2, 1, 1]


def test_xla_has_no_collective_for_exclusive_or():
    """The smallest program in plain JAX: once it runs, `repairs` need not rewrite reductions."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    bits = jax.device_put(jnp.arange(3), NamedSharding(mesh, P("devices")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Unsupported reduction computation"):
        jax.block_until_ready(jax.jit(jnp.bitwise_xor.reduce)(bits))


def test_xla_s_collectives_lose_a_nan():
    """The smallest program in plain JAX: once it is right, `repairs` need not rewrite the largest and the smallest."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    x = jax.device_put(jnp.array([jnp.nan, 1.0, 2.0]), NamedSharding(mesh, P("devices")))
    assert float(jax.jit(jnp.max)(x)) == 2.0


NO_STEPS = """
import jax
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

at = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("devices",)), PartitionSpec())
step = lambda x, _: (x, io_callback(print, None, x, ordered=True))
jax.jit(lambda x: jax.lax.scan(step, x, length=0)[0]).lower(jax.device_put(1.0, at)).compile()
"""


@pytest.mark.long
def test_jax_cannot_write_a_loop_of_no_steps_with_effects_to_its_cache():
    """The smallest program in plain JAX: once it does, `repairs` need not remove such loops."""
    stored = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # programs of any size
    assert processes.run([sys.executable, "-c", NO_STEPS], env=stored).returncode == -signal.SIGSEGV


@pytest.mark.parametrize("policy", [policies.GPUOnly(3), policies.SingleLearnerCoarse(actors=3)], ids=str)
def test_loops_of_no_steps_have_no_effects(policy):
    """Inside of a loop and a fragment; the program can be written to a cache, and ends without logging anything."""
    log = []

    def none(x, key):
        def step(carry, _):
            return carry + 1, (io_callback(lambda x: log.append(x), None, carry[0], ordered=True), carry.sum())[1]

        after, rows = jax.lax.scan(step, x, length=0)
        return after, rows.sum(), jax.lax.scan(step, (x + 1), None, length=0)[1], key

    def several(x, key):
        step = lambda x, _: (none(x, key)[0] * 2, None)  # noqa: E731
        return jax.lax.scan(step, x, length=3)[0], none(x, key)

    @msrl.fragment(role="env")
    def act(x, key):
        doubled, (same, rows, stack, key) = several(x, key)
        return doubled, same, rows, stack, jax.random.uniform(key)

    def iteration(state):
        doubled, same, rows, stack, drawn = act(state["x"], state["key"])
        return state, {"doubled": doubled, "same": same, "rows": rows, "stack": stack, "drawn": drawn}

    state = {"x": X, "key": jax.random.key(0)}
    program = msrl.compile(iteration, state, policy=policy, axes={"x": P("env"), "key": P()})
    _, found = program.run(state, 1)
    jax.effects_barrier()
    assert not log
    np.testing.assert_allclose(found["doubled"][0], X * 8, 1e-6)
    np.testing.assert_array_equal(found["same"][0], X)
    assert found["rows"][0] == 0 and found["stack"].shape == (1, 0)
    np.testing.assert_allclose(found["drawn"][0], jax.random.uniform(jax.random.key(0)))


@by_name("GPUOnly", "SingleLearnerCoarse")
def test_a_nan_is_the_largest_and_the_smallest(policy):
    extremes = lambda x: jnp.stack([x.max(), x.min(), jnp.abs(x).max(), x[:, None].max(0)[0]])  # noqa: E731
    act, learn = (msrl.fragment(role=role)(extremes) for role in ("env", "learner"))
    program = msrl.compile(lambda x: (x, {"env": act(x), "learner": learn(x)}), X, policy=policy, axes=P("env"))
    for x in (X, np.where(np.arange(24) == 5, np.nan, X).astype(np.float32)):
        for found in program.run(x, 1)[1].values():
            np.testing.assert_array_equal(found[0], [x.max(), x.min(), np.abs(x).max(), x.max()])


@by_name("GPUOnly", "SingleLearnerCoarse", "SingleLearnerFine")
def test_operations_along_a_split_axis_compute_as_numpy(policy):
    """In fragments of an actor and a learner, and between them."""
    act = msrl.fragment(role="env")(lambda s: (edges(s["x"]), reductions(s["x"], s["bits"])))
    learn = msrl.fragment(role="learner")(lambda s: (edges(s["x"]), reductions(s["x"], s["bits"])))

    def iteration(s):
        outside = edges(s["x"]), reductions(s["x"], s["bits"])
        return s, {"env": act(s), "learner": learn(s), "outside": outside}

    state = {"x": X, "bits": BITS}
    program = msrl.compile(iteration, state, policy=policy, axes=P("env"))
    _, metrics = program.run(state, 1)
    for found, reduced in metrics.values():
        assert_equal(found, edges_of(X))
        assert_equal(reduced, reductions_of(X, BITS))


def test_repairs_reach_loops_branches_and_gradients():
    @msrl.fragment(role="env")
    def nested(x):
        def step(carry, _):
            return carry, jax.lax.cond(carry[0] > 9, jnp.negative, lambda y: jax.lax.cummin(y) + jnp.cumsum(y), carry)

        tops = lambda y: windows(y, high=(-jnp.inf, jax.lax.max))["high"] * jnp.arange(24.0)  # noqa: E731
        sums = lambda y: windows(y, sums=(0.0, jax.lax.add))["sums"]  # noqa: E731
        return jax.lax.scan(step, x, length=1)[1][0], jax.grad(lambda y: (tops(y) + sums(y)).sum())(x), sums(x)

    program = msrl.compile(lambda x: (x, nested(x)), X, policy=policies.GPUOnly(3), axes=P("env"))
    _, (steps, gradients, sums) = program.run(X, 1)
    want = edges_of(X)
    np.testing.assert_allclose(steps[0], want["cummin"] + want["cumsum"], 1e-4, 1e-5)
    np.testing.assert_allclose(sums[0], want["sums"], 1e-4, 1e-5)
    chosen = np.lib.stride_tricks.sliding_window_view(np.pad(X, 1, constant_values=-np.inf), 3).argmax(1) + np.arange(24) - 1
    ones = np.full(24, 3.0) - (np.arange(24) % 23 == 0)
    np.testing.assert_allclose(gradients[0], np.bincount(chosen, np.arange(24.0), 24) + ones, 1e-5)
