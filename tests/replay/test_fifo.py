"""A queue of batches, against a deque."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from msrl_jax import replay

QUEUE = replay.fifo({"reward": jnp.zeros((3, 2))}, capacity=4)
insert, pop, sample = map(jax.jit, (QUEUE.insert, QUEUE.pop, QUEUE.sample))


def batch(number):
    return {"reward": np.full((3, 2), number, np.float32)}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(["insert", "insert", "pop", "sample"]), max_size=40))
def test_first_in_first_out(actions):
    state, expected, refused = QUEUE.init(), deque(), 0
    for number, action in enumerate(actions, 1):
        if action == "insert":
            state = insert(state, batch(number))
            if len(expected) < 4:
                expected.append(number)
            else:
                refused += 1
        elif action == "pop":
            state, got = pop(state)
            if expected:
                np.testing.assert_array_equal(got["reward"], batch(expected.popleft())["reward"])
        elif expected:
            assert np.unique(sample(state, jax.random.key(number))["reward"]).tolist()[0] in expected
        assert int(QUEUE.size(state)) == len(expected) and bool(QUEUE.ready(state)) == bool(expected)
        assert int(state.refused) == refused


def test_every_batch_is_sampled_alike():
    # Of 4 batches, each is drawn 250 times in 1000: more than 5 deviations (13.7) away has a probability below 1e-6.
    state = QUEUE.init()
    for number in range(4):
        state = insert(state, batch(number))
    state, _ = pop(state)
    state = insert(state, batch(4))
    seen = jax.vmap(lambda key: QUEUE.sample(state, key)["reward"][0, 0])(jax.random.split(jax.random.key(0), 1000))
    numbers, counts = np.unique(np.asarray(seen), return_counts=True)
    assert numbers.tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(counts, 250, atol=5 * 13.7)


def test_a_refused_batch_costs_no_copy_of_the_queue():
    queue = replay.fifo(jnp.zeros((100, 10)), capacity=1000)
    state = jax.eval_shape(queue.init)
    for fn, args in ((queue.insert, (state, jax.ShapeDtypeStruct((100, 10), jnp.float32))), (queue.pop, (state,))):
        memory = jax.jit(fn, donate_argnums=0).lower(*args).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 4_000_000 and memory.temp_size_in_bytes < 50_000


def test_axes_of_batches_follow_that_of_places():
    assert QUEUE.axes.batches == P(None, None, "env")
    axes = replay.fifo((jnp.zeros((4, 2)), jnp.zeros(3)), capacity=2, axes=(P("env"), None)).axes
    assert axes.batches == (P(None, "env"), P(None))


def test_another_batch_is_refused():
    with pytest.raises(ValueError, match=r"a batch is .*, but the queue takes"):
        QUEUE.insert(QUEUE.init(), {"reward": jnp.zeros((3, 3))})
