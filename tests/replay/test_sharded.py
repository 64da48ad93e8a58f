"""Buffers split over devices: the same samples, nothing moved, nothing copied."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax import replay
from msrl_jax.envs.goals import Goals
from msrl_jax.fragments.plan.hlo import collectives, module_of
from tests.support.compiled import elements, instructions
from tests.support.history import EXAMPLE, steps
from tests.support.slow import mostly_slow

VECTORS = Goals(lambda obs: obs, lambda obs: obs, lambda obs, goal: goal, lambda a, b: (-jnp.abs(a - b).sum(), (a == b).all()))
KINDS = {
    "transitions": functools.partial(replay.uniform, length=3, discount=0.9, storage={"obs": "bfloat16"}),
    "sequences": functools.partial(replay.uniform, length=4, stride=2),
    "prioritized": functools.partial(replay.prioritized, length=3, discount=0.9),
    "relabelled": functools.partial(replay.uniform, length=2, discount=0.9, relabelling=replay.Relabelling(VECTORS)),
}
NUM_ENVS, UNROLL, BATCH = 16, 2, 32


def make(kind, capacity=NUM_ENVS * 64):
    return KINDS[kind](EXAMPLE, capacity=capacity, num_envs=NUM_ENVS, unroll_length=UNROLL, batch_size=BATCH)


def iterate(buffer, state, items, key, count):
    """Inserts, samples and updates in a loop, as training does."""

    def iteration(state, xs):
        items, key = xs
        state = buffer.insert(state, items)
        batch = buffer.sample(state, key)
        state = buffer.update(state, batch.indices, batch.indices.step - batch.indices.env + 0.5)
        return state, batch._replace(probability=replay.importance_weights(batch.probability, 0.5))

    return jax.lax.scan(iteration, state, (items, jax.random.split(key, count)))


def compile_on(buffer, num_devices, count):
    mesh = Mesh(np.array(jax.devices()[:num_devices]), ("devices",))

    def place(spec, x):
        spec = P("devices") if spec == P(replay.SHARD_AXIS) else spec
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), x)

    state = jax.tree.map(place, buffer.axes, jax.eval_shape(buffer.init), is_leaf=lambda x: isinstance(x, P))
    items = jax.eval_shape(lambda: jax.tree.map(lambda x: jnp.zeros((count, UNROLL, NUM_ENVS, *x.shape), x.dtype), EXAMPLE))
    items = place(P(None, None, "devices"), items)
    key = place(P(), jax.eval_shape(jax.random.key, 0))
    fn = jax.jit(functools.partial(iterate, buffer, count=count), donate_argnums=0)
    return fn.lower(state, items, key).compile()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_samples_do_not_depend_on_the_devices(kind):
    buffer, rng, count = make(kind), np.random.default_rng(0), 40
    inserted = [steps(rng, UNROLL, NUM_ENVS, i * UNROLL) for i in range(count)]
    items = jax.tree.map(lambda *x: np.stack(x), *inserted)
    seen = []
    for num_devices in (1, 2, 4, 8):
        program = compile_on(buffer, num_devices, count)
        args = jax.device_put((buffer.init(), items, jax.random.key(0)), program.input_shardings[0])
        seen.append(jax.tree.map(np.asarray, program(*args)))
        moved = collectives(module_of(program)).collectives
        # Only the least probability of the batch, for the importance weights.
        assert all(c.kind == "all-reduce" and c.nbytes == 4 for c in moved), moved
        assert len(moved) == (kind == "prioritized" and num_devices > 1)
    for other in seen[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, seen[0])


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "prioritized"))
def test_nothing_as_large_as_the_buffer_is_copied(kind):
    buffer = make(kind, capacity=NUM_ENVS * 2**14)
    program = compile_on(buffer, 1, 3)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= buffer.nbytes
    assert memory.temp_size_in_bytes < buffer.nbytes / 50
    shapes = [made.shape for made in instructions(program) if made.kind in ("copy", "copy-start")]
    assert all(elements(shape) < 2**14 for shape in shapes), shapes
