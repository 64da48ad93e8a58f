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
from msrl_jax._compat import JAXLIB, jaxpr_as_fun
from msrl_jax.fragments.passes.repairs import apply_xla_workarounds
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
        "cumsum": jnp.cumsum(x),
        "cumprod": jnp.cumprod(x),
        "cummin": jax.lax.cummin(x),
        "cummax": jax.lax.cummax(x),
        "last": jax.lax.cummin(x, reverse=True),
        "logs": jax.lax.cumlogsumexp(x),
        "rest": jax.lax.cumsum(x, reverse=True),
        "three": shifted(x, 3),
        "zero": shifted(x, 0),
        "nine": shifted(x, 9),
        "given": shifted(x, 0) + shifted(x, x[0]),
        **windows(x, low=(jnp.inf, jax.lax.min), high=(-jnp.inf, jax.lax.max), sums=(0.0, jax.lax.add)),
    }


def edges_of(x):
    """As NumPy computes them."""
    near = lambda start: np.lib.stride_tricks.sliding_window_view(np.pad(x, 1, constant_values=start), 3)
    late = lambda edge: np.concatenate([[edge], x[:-1]])
    return {
        "cumsum": np.cumsum(x),
        "cumprod": np.cumprod(x),
        "zero": late(0),
        "cummin": np.minimum.accumulate(x),
        "cummax": np.maximum.accumulate(x),
        "last": np.minimum.accumulate(x[::-1])[::-1],
        "logs": np.logaddexp.accumulate(x),
        "rest": np.cumsum(x[::-1])[::-1],
        "three": late(3),
        "nine": late(9),
        "given": late(0) + late(x[0]),
        "low": near(np.inf).min(1),
        "high": near(-np.inf).max(1),
        "sums": near(0).sum(1),
    }


def reductions(x, bits):
    odd = lambda a, b: jnp.where(a * a > b * b, a, b)
    return {
        "xor": jnp.bitwise_xor.reduce(bits),
        "or": jnp.bitwise_or.reduce(bits),
        "and": jnp.bitwise_and.reduce(bits + 128),
        "parity": jnp.logical_xor.reduce(bits > 50),
        "any": (bits > 50).any(),
        "own": jax.lax.reduce(x, 0.0, odd, (0,)),
    }


def reductions_of(x, bits):
    return {
        "xor": np.bitwise_xor.reduce(bits),
        "or": np.bitwise_or.reduce(bits),
        "and": np.bitwise_and.reduce(bits + 128),
        "parity": np.logical_xor.reduce(bits > 50),
        "any": True,
        "own": x[np.abs(x).argmax()],
    }


def assert_equal(got, want):
    for name, expected in want.items():
        np.testing.assert_allclose(got[name][0], expected, 1e-4, 1e-5, err_msg=name)


SPLIT = P("devices")


def over(count, x, spec=SPLIT):
    """An array that is split over the first devices."""
    return jax.device_put(x, NamedSharding(Mesh(np.array(jax.devices()[:count]), ("devices",)), spec))


def test_xla_takes_the_padding_of_another_operation():
    """The smallest program in plain JAX: right from jaxlib 0.12 on, where `repairs` leaves operations that pad as they are."""
    x = over(3, jnp.array([0.36, 0.95, 0.11]))
    _, low = jax.jit(lambda x: (jax.lax.cumsum(x), jax.lax.cummin(x)))(x)
    assert np.asarray(low)[0] == (np.float32(0.36) if JAXLIB >= (0, 12) else 0)
    _, three = jax.jit(lambda x: (shifted(x, 9), shifted(x, 3)))(x)
    assert np.asarray(three)[0] == (3 if JAXLIB >= (0, 12) else 9)


def test_xla_drops_gradients_of_windows_across_shards():
    """The smallest program in plain JAX: once it is right, `repairs` need not make dimensions whole."""
    gradient = jax.jit(jax.grad(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (1,), "SAME").sum()))
    x = jnp.array([3.0, 1, 2, 6, 5, 4])
    assert np.asarray(gradient(x)).tolist() == [1, 0, 1, 2, 1, 1]
    assert np.asarray(gradient(over(3, x))).tolist() != [1, 0, 1, 2, 1, 1]


def test_xla_has_no_collective_for_exclusive_or():
    """The smallest program in plain JAX: once it runs, `repairs` need not rewrite reductions."""
    bits = over(3, jnp.arange(3))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Unsupported reduction computation"):
        jax.block_until_ready(jax.jit(jnp.bitwise_xor.reduce)(bits))


def test_xla_s_collectives_lose_a_nan():
    """The smallest programs in plain JAX: once they are right, `repairs` need not rewrite the largest and the smallest."""
    x = over(3, jnp.array([jnp.nan, 1.0, 2.0]))
    assert float(jax.jit(jnp.max)(x)) == 2.0
    assert float(jax.jit(lambda x: jnp.zeros(2).at[jnp.zeros(3, int)].max(x))(x)[0]) == 2.0


def test_xla_writes_an_element_beyond_the_end_nowhere():
    """The smallest program in plain JAX: once it is right, `repairs` need not clamp indices."""
    write = jax.jit(lambda x, at: jax.lax.dynamic_update_slice(x, jnp.full(1, 9.0), (at,)))
    assert np.asarray(write(over(3, jnp.zeros(3)), 5)).tolist() == [0, 0, 0]
    assert np.asarray(write(jnp.zeros(3), 5)).tolist() == [0, 0, 9]


def test_xla_takes_windows_of_a_convolution_from_the_wrong_places():
    """The smallest programs in plain JAX: once they are right, `repairs` need not make dimensions whole."""
    x, kernel = jnp.arange(8.0).reshape(1, 1, 8), jnp.ones((1, 1, 3))
    run = lambda x, k: jax.lax.conv_general_dilated(x, k, (2,), "SAME")
    by_kernel = jax.grad(lambda k, x: run(x, k).sum())
    assert np.asarray(by_kernel(kernel, x)).ravel().tolist() == [12, 16, 12]
    x = over(8, x, P(None, None, "devices"))
    assert np.asarray(jax.jit(by_kernel)(kernel, x)).ravel().tolist() != [12, 16, 12]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_the_upper_half_of_a_product_has_all_carries(dtype):
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    x, y = rng.integers(limits.min, limits.max, (2, 999), dtype, endpoint=True)
    x[:4], y[:4] = [limits.min, limits.max, limits.min, limits.max], [limits.min, limits.min, limits.max, limits.max]
    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    program = jaxpr_as_fun(apply_xla_workarounds(jax.make_jaxpr(jax.lax.mulhi)(x, y), mesh))
    want = [int(a) * int(b) >> 32 for a, b in zip(x, y, strict=True)]
    assert np.asarray(jax.jit(program)(over(3, x), over(3, y))[0]).tolist() == want


def test_xla_has_no_upper_half_of_a_product():
    """The smallest program in plain JAX: once it compiles, `repairs` need not compute it."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="Unable to convert MHLO"):
        jax.jit(jax.lax.mulhi)(over(3, jnp.arange(3)), jnp.arange(3))


def test_xla_overwrites_what_an_update_still_reads():
    """The smallest program in plain JAX: once it is right, `repairs` need not put updates behind barriers."""
    later = jax.jit(lambda x: x.at[1:].set(x[:-1])[None])
    assert np.asarray(later(jnp.arange(4))).tolist() == [[0, 0, 0, 0]]  # not 0, 0, 1, 2


@jax.jit
def put(x, update, start):
    return jax.lax.dynamic_update_slice(x, update, (start, 0))


UPDATES = {
    "set": lambda x, i: x.at[1:].set(x[:-1])[None],
    "add": lambda x, i: x.at[1:].add(x[:-1])[:, None],
    "computed twice": lambda x, i: (x * 2).at[1:].set((x * 2)[:-1])[None],
    "reversed": lambda x, i: x.at[1:].set(x[:-1][::-1])[None],
    "taken": lambda x, i: x.at[1:].set(x[jnp.arange(3)])[None],
    "at an index": lambda x, i: jax.lax.dynamic_update_slice(x, x[:-1], (i, 0))[None],
    "by a function": lambda x, i: put(x, x[:-1], i)[None],
    "in a branch": lambda x, i: jax.lax.cond(i > 0, lambda x: x.at[1:].set(x[:-1])[None], lambda x: x[None], x),
    "of several rows": lambda x, i: jax.vmap(lambda row: row.at[1:].multiply(row[:-1])[None])(x),
}


@pytest.mark.parametrize("devices", [1, 3])
def test_an_update_reads_its_array_before_it_writes(devices):
    """Against JAX's operations one by one, which compute as NumPy does."""
    x = jnp.arange(1, 13, dtype=jnp.float32).reshape(4, 3)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("devices",))
    for name, f in UPDATES.items():
        program = jaxpr_as_fun(apply_xla_workarounds(jax.make_jaxpr(f)(x, 1), mesh))
        with jax.disable_jit():
            right = f(x, 1)
        np.testing.assert_array_equal(jax.jit(program)(x, 1)[0], right, err_msg=name)


NO_STEPS = """
import jax
import numpy as np
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

at = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("devices",)), PartitionSpec())
step = lambda x, _: (x, io_callback(print, None, x, ordered=True))
jax.jit(lambda x: jax.lax.scan(step, x, length=0)[0]).lower(jax.device_put(1.0, at)).compile()
"""


@pytest.mark.slow
def test_jax_cannot_write_a_loop_of_no_steps_with_effects_to_its_cache():
    """The smallest program in plain JAX. From jaxlib 0.11 on it can."""
    stored = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # programs of any size
    code = processes.run([sys.executable, "-c", NO_STEPS], env=stored).returncode
    assert code == (0 if JAXLIB >= (0, 11) else -signal.SIGSEGV)


NEGATIVE_PADDING = """
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

at = NamedSharding(Mesh(np.array(jax.devices()[:3]), ("devices",)), PartitionSpec("devices"))
jax.jit(lambda x: jax.lax.pad(x, x[0], [(-1, 0, 1)])).lower(jax.device_put(np.ones(3), at)).compile()
"""


@pytest.mark.slow
def test_xla_aborts_at_negative_padding_beside_interior_padding():
    """The smallest program in plain JAX: once it compiles, `repairs` need not slice."""
    assert processes.run([sys.executable, "-c", NEGATIVE_PADDING]).returncode == -signal.SIGABRT


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
        step = lambda x, _: (none(x, key)[0] * 2, None)
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
    extremes = lambda x: jnp.stack([x.max(), x.min(), jnp.abs(x).max(), x[:, None].max(0)[0]])
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


def odd_ones(x, kernel, at, bits):
    """Operations along the second dimension of `[2, 8]`, of which each device has one element."""
    nans = jnp.where(x > 1, jnp.nan, x)
    conv = lambda x, k: jax.lax.conv_general_dilated(x[None], k, (2,), "SAME")
    return {
        "max": nans.max(1),
        "min": nans.min(1),
        "of rows": jax.vmap(jnp.max)(nans),
        "scatter": jnp.zeros(3).at[jnp.arange(8) % 3].max(nans[0]),
        "write": jax.lax.dynamic_update_slice(x, jnp.full((2, 1), 9.0), (0, at)),
        "upper": jax.lax.mulhi(bits, bits),
        "pad": jax.lax.pad(x, jnp.float32(5), [(0, 0, 0), (-1, -2, 1)]),
        "conv": conv(x, kernel),
        "by": jax.grad(lambda x, k: (conv(x, k) ** 2).sum(), (0, 1))(x, kernel),
    }


def test_operations_along_a_later_axis_with_one_element_on_each_device_compute_as_numpy():
    """In a loop, a branch, a call that is differentiated, and outside of them."""
    x = X[:16].reshape(2, 8)
    kernel, bits = np.arange(12, dtype=np.float32).reshape(2, 2, 3), BITS[:8] * 60_000_000 - 1_000_000_000

    @msrl.fragment(role="env")
    def nested(state):
        inner = jax.checkpoint(lambda s, at: odd_ones(s["x"], s["kernel"], at, s["bits"]))
        step = lambda c, _: (c + 1, jax.lax.cond(c > 10, inner, lambda s, at: inner(s, at + 1), state, c))
        return jax.lax.scan(step, state["at"], length=2)[1]

    plain = msrl.fragment(role="env")(lambda s: odd_ones(s["x"], s["kernel"], s["at"], s["bits"]))
    state = {"x": x, "kernel": kernel, "at": np.int32(9), "bits": bits}
    axes = {"x": P(None, "env"), "kernel": P(), "at": P(), "bits": P("env")}
    program = msrl.compile(lambda s: (s, (plain(s), nested(s))), state, policy=policies.GPUOnly(8), axes=axes)
    _, (found, rows) = program.run(state, 1)

    nans = np.where(x > 1, np.nan, x)
    padded = np.full((2, 15), 5, np.float32)
    padded[:, ::2] = x
    windows = np.pad(x, [(0, 0), (0, 1)])[:, np.arange(0, 8, 2)[:, None] + np.arange(3)]  # [2, 4, 3]
    out = np.einsum("itj,oij->ot", windows, kernel)
    by_x = np.zeros((2, 9), np.float32)
    for t in range(4):
        by_x[:, 2 * t : 2 * t + 3] += np.einsum("o,oij->ij", 2 * out[:, t], kernel)
    want = {
        "max": nans.max(1),
        "min": nans.min(1),
        "of rows": nans.max(1),
        "scatter": [np.maximum.reduce([0, *nans[0, i::3]]) for i in range(3)],
        "write": np.concatenate([x[:, :7], np.full((2, 1), 9)], 1),
        "upper": (bits.astype(np.int64) ** 2 >> 32),
        "pad": padded[:, 1:-2],
        "conv": out[None],
    }
    for one in (found, *(jax.tree.map(lambda v, t=t: v[:, t], rows) for t in range(2))):
        assert_equal(one, want)
        np.testing.assert_allclose(one["by"][0][0], by_x[:, :8], 1e-4, 1e-4)
        np.testing.assert_allclose(one["by"][1][0], np.einsum("ot,itj->oij", 2 * out, windows), 1e-4, 1e-4)


def test_repairs_reach_loops_branches_and_gradients():
    @msrl.fragment(role="env")
    def nested(x):
        def step(carry, _):
            return carry, jax.lax.cond(carry[0] > 9, jnp.negative, lambda y: jax.lax.cummin(y) + jnp.cumsum(y), carry)

        tops = lambda y: windows(y, high=(-jnp.inf, jax.lax.max))["high"] * jnp.arange(24.0)
        sums = lambda y: windows(y, sums=(0.0, jax.lax.add))["sums"]
        return jax.lax.scan(step, x, length=1)[1][0], jax.grad(lambda y: (tops(y) + sums(y)).sum())(x), sums(x)

    program = msrl.compile(lambda x: (x, nested(x)), X, policy=policies.GPUOnly(3), axes=P("env"))
    _, (steps, gradients, sums) = program.run(X, 1)
    want = edges_of(X)
    np.testing.assert_allclose(steps[0], want["cummin"] + want["cumsum"], 1e-4, 1e-5)
    np.testing.assert_allclose(sums[0], want["sums"], 1e-4, 1e-5)
    chosen = np.lib.stride_tricks.sliding_window_view(np.pad(X, 1, constant_values=-np.inf), 3).argmax(1) + np.arange(24) - 1
    ones = np.full(24, 3.0) - (np.arange(24) % 23 == 0)
    np.testing.assert_allclose(gradients[0], np.bincount(chosen, np.arange(24.0), 24) + ones, 1e-5)
