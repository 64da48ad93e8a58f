"""n-step transitions across ends of episodes and the ring's wrap-around."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax import replay
from msrl_jax.replay.buffers import fold
from tests.support.history import EXAMPLE, History, compiled, steps
from tests.support.slow import mostly_slow

DISCOUNT = 0.9


def reference(window):
    """A window's n-step transition, in float64."""
    total, weight = 0.0, 1.0
    for item in window:
        total += weight * float(item.reward)
        weight *= DISCOUNT
        if item.terminated or item.truncated:
            break
    return total, 0.0 if item.terminated else weight, item.next_obs


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        ("000", "000", (1 + 0.9 * 2 + 0.81 * 4, 2, 0.729)),
        ("100", "000", (1, 0, 0)),
        ("010", "000", (1 + 0.9 * 2, 1, 0)),
        ("001", "000", (1 + 0.9 * 2 + 0.81 * 4, 2, 0)),
        ("000", "100", (1, 0, 0.9)),
        ("000", "010", (1 + 0.9 * 2, 1, 0.81)),
        ("000", "001", (1 + 0.9 * 2 + 0.81 * 4, 2, 0.729)),
        ("010", "010", (1 + 0.9 * 2, 1, 0)),  # a terminal state on the last step that is allowed
        ("001", "010", (1 + 0.9 * 2, 1, 0.81)),  # the termination is that of the next episode
        ("010", "100", (1, 0, 0.9)),
    ],
)
def test_worked_by_hand(terminated, truncated, expected):
    def flags(text):
        return jnp.array([c == "1" for c in text])

    got = fold(jnp.array([1.0, 2.0, 4.0]), flags(terminated), flags(truncated), DISCOUNT)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.fixture(scope="module", params=mostly_slow(["uniform", "prioritized"], "prioritized"))
def functions(request):
    make = {"uniform": replay.uniform, "prioritized": replay.prioritized}[request.param]
    return compiled(make(EXAMPLE, capacity=4 * 12, num_envs=4, unroll_length=3, batch_size=16, length=4, discount=DISCOUNT))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(insertions=st.integers(2, 15), seed=st.integers(0, 2**32 - 1))
def test_transitions_equal_float64(functions, insertions, seed):
    rng, history, state = np.random.default_rng(seed), History(4, 12, 2**30), functions.buffer.init()
    for i in range(insertions):
        items = steps(rng, 3, 4, 3 * i)
        state = functions.insert(state, items)
        history.insert(items, 3 * i)
    windows = history.windows(4, 1)
    batch = functions.sample(state, jax.random.key(seed))
    got = jax.tree.map(np.asarray, batch.experience)
    for b, at in enumerate(zip(*map(np.asarray, batch.indices), strict=True)):
        total, weight, next_obs = reference(windows[at])
        np.testing.assert_allclose((got.reward[b], got.discount[b]), (total, weight), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(got.next_obs[b], next_obs)
        np.testing.assert_array_equal(got.obs[b], windows[at][0].obs)
        assert got.action[b] == windows[at][0].action


def test_transitions_of_several_agents_equal_float64():
    """Every agent has its own sum, up to its own end; agents that have left stay terminated until the episode ends."""
    agents, num_envs, length, steps_taken = 3, 2, 3, 60
    rng = np.random.default_rng(0)
    reward = rng.normal(size=(steps_taken, num_envs, agents)).astype(np.float32)
    terminated = rng.uniform(size=reward.shape) < 0.25
    truncated = np.broadcast_to(rng.uniform(size=(steps_taken, num_envs, 1)) < 0.2, reward.shape)
    for t in range(1, steps_taken):
        ended = truncated[t - 1].all(-1) | terminated[t - 1].all(-1)
        terminated[t] |= terminated[t - 1] & ~ended[:, None]
    number = np.arange(steps_taken * num_envs, dtype=np.int32).reshape(steps_taken, num_envs)
    items = replay.Transition(number, number, reward, terminated, truncated, number)
    buffer = replay.uniform(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), items),
        capacity=steps_taken * num_envs,
        num_envs=num_envs,
        unroll_length=steps_taken,
        batch_size=64,
        length=length,
        discount=DISCOUNT,
    )
    batch = jax.jit(lambda key: buffer.sample(buffer.insert(buffer.init(), items), key))(jax.random.key(0))
    got, at = jax.tree.map(np.asarray, (batch.experience, batch.indices))
    ends = truncated | terminated
    seen = set()
    for b, (first, env) in enumerate(zip(*at, strict=True)):
        last = next((t for t in range(first, first + length) if ends[t, env].all()), first + length - 1)
        for a in range(agents):
            total, weight = 0.0, 1.0
            for t in range(first, last + 1):
                total += weight * reward[t, env, a]
                weight *= 0.0 if terminated[t, env, a] else DISCOUNT
                if terminated[t, env, a]:
                    break
            np.testing.assert_allclose((got.reward[b, a], got.discount[b, a]), (total, weight), rtol=1e-5, atol=1e-6)
            seen.add((bool(terminated[first : last + 1, env, a].any()), bool(truncated[last, env, a])))
        assert (got.obs[b], got.action[b], got.next_obs[b]) == (number[first, env], number[first, env], number[last, env])
    assert len(seen) == 4
