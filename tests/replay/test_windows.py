"""Contents and samples of buffers, compared with a deque for every environment."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from msrl_jax import replay
from msrl_jax.replay.ring import make_ring
from tests.support.history import EXAMPLE, History, compiled, steps
from tests.support.slow import slow_unless

KINDS = {"uniform": replay.uniform, "prioritized": replay.prioritized}
# unroll_length, length, stride, steps held of each environment
SIZES = [(1, 1, 1, 5), (4, 3, 1, 12), (2, 5, 3, 18), (6, 4, 4, 24)]
NUM_ENVS = 4
OFTEN = [("uniform", SIZES[1]), ("uniform", SIZES[3]), ("prioritized", SIZES[2])]
RUNS = [slow_unless((kind, size) in OFTEN, kind, size) for kind in KINDS for size in SIZES]
MODULUS = {held: 2**30 // held * held for *_, held in SIZES}


@functools.cache
def buffer(kind, size):
    unroll_length, length, stride, held = size
    return compiled(
        KINDS[kind](
            EXAMPLE,
            capacity=held * NUM_ENVS,
            num_envs=NUM_ENVS,
            unroll_length=unroll_length,
            batch_size=16,
            length=length,
            stride=stride,
            shards=2,
        )
    )


def filled(kind, size, insertions, seed, back=0):
    """A buffer and its history after some insertions; the first one is some steps before the step count wraps.

    Their number is `back` times the least common multiple of insertion and stride, so the first step starts a window.
    """
    unroll_length, _, stride, held = size
    functions, rng = buffer(kind, size), np.random.default_rng(seed)
    history = History(NUM_ENVS, held, MODULUS[held])
    state = functions.buffer.init()
    begin = -back * math.lcm(unroll_length, stride) % MODULUS[held]
    state = state._replace(added=state.added + begin)
    for _ in range(insertions):
        items = steps(rng, unroll_length, NUM_ENVS, begin)
        state = functions.insert(state, items)
        history.insert(items, begin)
        begin = (begin + unroll_length) % MODULUS[held]
    return functions, state, history


@pytest.mark.parametrize(("kind", "size"), RUNS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(insertions=st.integers(0, 40), seed=st.integers(0, 2**32 - 1), back=st.integers(0, 12))
@example(insertions=7, seed=0, back=1)
def test_samples_are_windows_of_consecutive_steps(kind, size, insertions, seed, back):
    functions, state, history = filled(kind, size, insertions, seed, back)
    _, length, stride, _ = size
    windows = history.windows(length, stride)
    assert int(functions.buffer.size(state)) == len(windows)
    assert bool(functions.buffer.ready(state)) <= (len(windows) >= 16)
    if not windows:
        return
    batch = functions.sample(state, jax.random.key(seed))
    for b, at in enumerate(zip(*map(np.asarray, batch.indices), strict=True)):
        expected = jax.tree.map(lambda *x: np.stack(x), *windows[at])
        got = jax.tree.map(lambda x, b=b: np.asarray(x)[:, b] if length > 1 else np.asarray(x)[None, b], batch.experience)
        jax.tree.map(np.testing.assert_array_equal, got, expected)
    np.testing.assert_allclose(batch.probability, 1 / len(windows), rtol=1e-6)
    # The first half of a batch comes from the first half of the environments.
    assert (np.asarray(batch.indices.env) // (NUM_ENVS // 2) == np.repeat([0, 1], 8)).all()


@pytest.mark.parametrize(("kind", "size"), RUNS)
@pytest.mark.parametrize("insertions", [3, 17])
def test_every_window_is_sampled(kind, size, insertions):
    functions, state, history = filled(kind, size, insertions, 0)
    windows = history.windows(*size[1:3])
    seen = set()
    # Of at most 48 windows, one is missing after 100 batches of 16 with a probability below 48 * (1 - 1/48)**1600 < 1e-12.
    for seed in range(100):
        seen.update(zip(*np.asarray(functions.sample(state, jax.random.key(seed)).indices).tolist(), strict=True))
    assert seen == set(windows)


@pytest.mark.parametrize("unroll_length", [1, 2, 4, 6])
@pytest.mark.parametrize("stride", [1, 3, 4, 6])
@pytest.mark.parametrize("length", [1, 4, 5])
def test_the_fewest_windows_of_a_full_ring_are_those_of_its_worst_beginning(unroll_length, stride, length):
    unit = math.lcm(unroll_length, stride)
    sizes = {"num_envs": 1, "unroll_length": unroll_length, "length": length, "stride": stride}
    sizes |= {"min_size": None, "shards": None}
    for steps_held in range(unit, 6 * unit, unit):
        begins = range(0, steps_held * stride, unroll_length)  # of the oldest step
        fewest = min(sum(s % stride == 0 for s in range(b, b + steps_held - length + 1)) for b in begins)
        for batch_size, fits in ((fewest, True), (fewest + 1, False)):
            if batch_size < 1:
                continue
            try:
                ring = make_ring(EXAMPLE, capacity=steps_held, batch_size=batch_size, storage=None, discount=None, **sizes)
            except ValueError:
                assert not fits, (steps_held, batch_size)
            else:
                assert fits and ring.steps == steps_held, (steps_held, batch_size)


@pytest.mark.parametrize(
    ("arguments", "min_steps"),
    [
        ({}, 4),  # one insertion holds 32 windows
        ({"batch_size": 64, "length": 5}, 12),  # 8 windows of each environment
        ({"batch_size": 64, "length": 5, "stride": 2}, 20),  # 5 + 7 * 2 steps, in whole insertions
        ({"min_size": 64}, 8),
        ({"min_size": 50}, 7),  # whole steps of all environments: 56
    ],
)
def test_a_buffer_is_ready_from_its_least_size_on(arguments, min_steps):
    sizes = {"capacity": 480, "num_envs": 8, "unroll_length": 4, "batch_size": 16} | arguments
    held = replay.uniform({"x": jnp.zeros(())}, **sizes)
    assert held.min_size == 8 * min_steps
    state = jax.eval_shape(held.init)
    for filled, ready in ((0, False), (min_steps - 1, False), (min_steps, True), (60, True)):
        state = state._replace(filled=jnp.int32(filled), added=jnp.int32(filled))
        assert bool(held.ready(state)) == ready
    if "min_size" not in arguments:  # and then a batch has windows enough
        assert int(held.size(state._replace(filled=jnp.int32(min_steps), added=jnp.int32(min_steps)))) >= sizes["batch_size"]


def test_a_window_with_an_absent_step_has_no_weight():
    """Wherever in the window it is; one step of one environment of four is absent."""
    example = EXAMPLE._replace(valid=jnp.bool_(0))
    buffer = replay.uniform(example, capacity=6 * NUM_ENVS, num_envs=NUM_ENVS, unroll_length=6, batch_size=16, length=3)
    items = steps(np.random.default_rng(0), 6, NUM_ENVS, 0)
    items = items._replace(valid=jnp.ones((6, NUM_ENVS), bool).at[3, 2].set(False))
    state = jax.jit(buffer.insert)(buffer.init(), items)
    batch = jax.jit(jax.vmap(buffer.sample, (None, 0)))(state, jax.random.split(jax.random.key(0), 16))
    absent = (batch.indices.env == 2) & (batch.indices.step >= 1) & (batch.indices.step <= 3)
    assert set(np.asarray(batch.indices.step)[absent]) == {1, 2, 3}
    np.testing.assert_array_equal(batch.weight > 0, ~absent)
