"""Observations in smaller dtypes, buffers of several seeds, and costs that do not grow with the capacity."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import replay
from tests.support.history import EXAMPLE, steps

SIZES = {"capacity": 64, "num_envs": 4, "unroll_length": 2, "batch_size": 32}


@pytest.mark.parametrize(
    ("codec", "fits", "nbytes", "tolerance"),
    [("uint8", 255, 12, 0), ("bfloat16", 1e3, 24, 1e3 * 2**-8), ("scaled_uint8", 1e3, 12 + 8, 1e3 / 510)],
)
def test_codecs_hold_what_they_promise(codec, fits, nbytes, tolerance):
    example = {"obs": jnp.zeros((3, 4)), "reward": jnp.float32(0)}
    buffer = replay.uniform(example, **SIZES, storage={"obs": codec})
    assert buffer.nbytes == 64 * (nbytes + 4) + 2 * 4 + buffer.shards * 4
    rng = np.random.default_rng(0)
    obs = rng.uniform(0, fits, (2, 4, 3, 4)).astype(np.float32)
    obs = np.round(obs) if codec == "uint8" else obs
    reward = np.arange(8, dtype=np.float32).reshape(2, 4)
    state = jax.jit(buffer.insert)(buffer.init(), {"obs": obs, "reward": reward})
    batch = jax.jit(buffer.sample)(state, jax.random.key(0)).experience
    assert batch["obs"].dtype == jnp.float32 and int(state.lost.sum()) == 0
    expected = obs.reshape(8, 3, 4)[np.asarray(batch["reward"], int)]
    np.testing.assert_allclose(batch["obs"], expected, rtol=0, atol=tolerance + 1e-6 * fits)


def test_of_several_names_on_a_path_the_last_one_given_decides():
    example = {"obs": {"image": jnp.zeros(4), "speed": jnp.zeros(3)}}
    for storage, nbytes in (({"obs": "bfloat16", "image": "uint8"}, 4 + 6), ({"image": "uint8", "obs": "bfloat16"}, 8 + 6)):
        buffer = replay.uniform(example, **SIZES, storage=storage)
        assert buffer.nbytes == 64 * nbytes + 2 * 4 + buffer.shards * 4


def test_items_that_a_codec_cannot_hold_are_counted():
    buffer = replay.uniform({"obs": jnp.zeros(3)}, **SIZES, storage={"obs": "uint8"})
    obs = np.zeros((2, 4, 3), np.float32)
    obs[0, 1, 2], obs[1, 1, 0], obs[1, 3, 1] = 0.5, 256, -1
    state = buffer.insert(buffer.init(), {"obs": obs})
    assert buffer.shards == 4
    assert state.lost.tolist() == [0, 2, 0, 1]


def test_seeds_are_buffers_of_their_own():
    buffer = replay.prioritized(EXAMPLE, **SIZES, length=2, discount=0.9)

    def run(items, key):
        state = buffer.insert(buffer.insert(buffer.init(), items), items)
        batch = buffer.sample(state, key)
        state = buffer.update(state, batch.indices, batch.experience.reward)
        return buffer.sample(state, key)

    rng = np.random.default_rng(0)
    members = [steps(rng, 2, 4, 10 * i) for i in range(3)]
    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.jit(jax.vmap(run))(jax.tree.map(lambda *x: np.stack(x), *members), keys)
    alone = [jax.jit(run)(items, key) for items, key in zip(members, keys, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, together, jax.tree.map(lambda *x: jnp.stack(x), *alone))


@pytest.mark.parametrize("make", [pytest.param(replay.uniform, marks=pytest.mark.slow), replay.prioritized])
def test_costs_do_not_grow_with_the_capacity(make):
    def costs(capacity):
        buffer = make(EXAMPLE, **{**SIZES, "capacity": capacity}, length=3, discount=0.9, shards=1)
        state = jax.eval_shape(buffer.init)
        items = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros((2, 4, *x.shape), x.dtype), EXAMPLE))
        batch = jax.eval_shape(buffer.sample, state, jax.random.key(0))
        calls = (
            (buffer.insert, (state, items)),
            (buffer.sample, (state, jax.random.key(0))),
            (buffer.update, (state, batch.indices, batch.probability)),
        )
        programs = [jax.jit(fn, donate_argnums=() if fn is buffer.sample else 0).lower(*args).compile() for fn, args in calls]
        return np.array([(p.cost_analysis().get("flops", 0), p.memory_analysis().temp_size_in_bytes) for p in programs])

    # Logarithmic: every further factor of 16 adds one level to a tree, so the same cost.
    first, second, third = costs(2**12), costs(2**16), costs(2**20)
    if make is replay.uniform:
        np.testing.assert_array_equal(third, first)
    assert (third - second <= 1.25 * (second - first) + 512).all()
    assert (third < 2.5 * first + 4096).all()


def test_counts_of_lost_items_stop_instead_of_wrapping():
    buffer = replay.uniform({"obs": jnp.zeros(3)}, **SIZES, storage={"obs": "uint8"})
    most = np.iinfo(np.int32).max
    state = buffer.init()._replace(lost=jnp.array([most - 3, most, 0, 5], jnp.int32))
    state = buffer.insert(state, {"obs": np.full((2, 4, 3), 0.5, np.float32)})  # two items of each shard
    assert state.lost.tolist() == [most - 1, most, 2, 7]
    assert buffer.insert(state, {"obs": np.full((2, 4, 3), 0.5, np.float32)}).lost.tolist() == [most, most, 4, 9]
    assert float(buffer.report(state)["replay_lost"]) == np.float32(2.0 * most + 8)
