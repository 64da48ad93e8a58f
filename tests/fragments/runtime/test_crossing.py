"""Moves between any two shardings, planned for processes: the same blocks, bit for bit, as `jax.device_put` gives."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax.fragments.runtime import crossing
from tests.support.slow import slow_unless

MESHES = {
    "one": range(1),
    "two": range(2),
    "overlapping three": range(1, 4),
    "apart two": range(4, 6),
    "all": range(6),
    "all reversed": range(5, -1, -1),
}
SPECS = [P(), P("d"), P(None, "d")]
SHAPE = (12, 6)


def mesh(numbers):
    return Mesh(np.array([jax.devices()[i] for i in numbers], dtype=object), ("d",))


def assert_same(moved, expected, sharding):
    """Each device has its block of the array, bit for bit."""
    assert moved.sharding.is_equivalent_to(sharding, moved.ndim)
    assert moved.dtype == expected.dtype and moved.shape == expected.shape
    if jnp.issubdtype(moved.dtype, jax.dtypes.prng_key):
        moved, expected = jax.random.key_data(moved), jax.random.key_data(expected)
    expected = np.asarray(expected)
    for shard in moved.addressable_shards:
        assert np.asarray(shard.data).tobytes() == np.ascontiguousarray(expected[shard.index]).tobytes()


EACH_TIME = {*itertools.pairwise(MESHES), ("one", "all")}  # the others are more cases of the same plan
PAIRS = [slow_unless(pair in EACH_TIME, *pair) for pair in itertools.permutations(MESHES, 2)]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_all_pairs_of_shardings(source, target):
    def fits(sharding):
        ways = [sharding.mesh.size if name else 1 for name in (*sharding.spec, None, None)[:2]]
        return all(size % n == 0 for size, n in zip(SHAPE, ways, strict=True))

    shardings = [[NamedSharding(mesh(MESHES[name]), spec) for spec in SPECS] for name in (source, target)]
    pairs = [pair for pair in itertools.product(*shardings) if all(map(fits, pair))]
    values = [np.arange(72, dtype=np.float32).reshape(SHAPE) + 100 * i for i in range(len(pairs))]
    arrays = [jax.device_put(x, at) for x, (at, _) in zip(values, pairs, strict=True)]
    kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    moved = crossing.MeshCrossing(kinds, *zip(*pairs, strict=True))(arrays)
    for x, y, (_, to) in zip(moved, values, pairs, strict=True):
        assert_same(x, y, to)


def test_all_kinds_of_elements():
    """Keys, scalars, elements of less than a byte, arrays without elements, and the bits of floats survive."""
    values = [
        np.arange(6) % 2 == 0,
        np.arange(12, dtype=np.int8).reshape(6, 2),
        np.array([0.0, -0.0, np.inf, -np.inf, 1e-40, 1.0], np.float32),
        np.array([0x7FC12345, 0xFF812345] * 3, np.uint32).view(np.float32),  # nans with a payload
        np.arange(6).astype(jnp.bfloat16),
        np.arange(6).astype(jnp.float8_e4m3fn),
        np.arange(-3, 3).astype(jnp.int4),
        np.arange(6).astype(jnp.uint4),
        np.array([0, 0.5, -0.5, 6, -6, -0.0]).astype(jnp.float4_e2m1fn),
        np.zeros((0, 3), np.float32),
        np.float32(2.5),
        np.bool_(True),
        jax.random.key(3),
        jax.random.split(jax.random.key(1, impl="rbg"), 6),
        jax.random.split(jax.random.key(1), 6)[:0],
    ]
    split = lambda x: P("d") if np.ndim(x) and x.shape[0] else P()
    source, target = mesh(range(2)), mesh(range(1, 4))
    at = [NamedSharding(source, split(x)) for x in values]
    to = [NamedSharding(target, split(x)) for x in values]
    arrays = [jax.device_put(x, s) for x, s in zip(values, at, strict=True)]
    cross = crossing.MeshCrossing([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays], at, to)
    for x, y, sharding in zip(cross(arrays), values, to, strict=True):
        assert_same(x, y, sharding)


def test_results_have_memory_of_their_own():
    at, to = (NamedSharding(mesh(range(n)), P()) for n in (1, 2))
    x = jax.device_put(np.arange(4.0, dtype=np.float32), at)
    (y,) = crossing.MeshCrossing([jax.ShapeDtypeStruct(x.shape, x.dtype)], [at], [to])([x])
    x.delete()
    np.testing.assert_array_equal(y, np.arange(4.0))


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of some process."""

    id: int
    process_index: int
    platform: str = "cpu"


def test_a_broadcast_takes_few_rounds_and_enters_each_process_once():
    """Each round doubles the number of devices that hold the value; a process sends it on among its own devices."""
    devices = [FakeDevice(i, i // 4) for i in range(16)]
    whole = ((0, 8),)
    own, *rounds = crossing.plan_hops({devices[0]: whole}, dict.fromkeys(devices, whole))
    assert [(hop.sender, hop.receiver) for hop in own] == [(devices[0], devices[0])]
    hops = [hop for round in rounds for hop in round]
    assert len(hops) == 15 and {hop.receiver for hop in hops} == {*devices[1:]}
    assert sum(hop.sender.process_index != hop.receiver.process_index for hop in hops) == 3
    assert len(rounds) <= 6


def test_moves_within_processes_are_programs_of_each_process():
    """If every process has actors and learners, nothing crosses between processes, and each has a program of its own."""
    actors, learners = ([FakeDevice(4 * p + k, p) for p in range(3) for k in ks] for ks in ((0, 1, 2), (3,)))
    whole = ((0, 4),)
    down = crossing.plan_hops(dict.fromkeys(learners, whole), dict.fromkeys(actors, whole))
    up = crossing.plan_hops(
        {d: ((4 * k, 4 * k + 4),) for k, d in enumerate(actors)}, {d: ((12 * k, 12 * k + 12),) for k, d in enumerate(learners)}
    )
    for plans in ([down], [up], [down, up]):
        groups = crossing.connected_devices(plans)
        assert [{d.process_index for d in group} for group in groups] == [{0}, {1}, {2}]
