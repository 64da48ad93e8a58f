"""What several processes hold and send, planned in one."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.runtime import transfer


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of some process."""

    id: int
    process_index: int
    platform: str = "cpu"


def test_gathered_blocks_have_one_sender():
    """Of equal blocks, the device of the lowest process and number sends its own."""
    a, b, c = FakeDevice(0, 1), FakeDevice(9, 0), FakeDevice(1, 1)
    assert transfer.first_holders({a: ((0, 2),), b: ((0, 2),), c: ((2, 4),)}) == {((0, 2),): b, ((2, 4),): c}


def test_leaves_share_no_memory_with_each_other_or_with_an_array_on_fewer_devices():
    """Else a program to which one of them is donated would write to the others."""
    everywhere = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), P())
    alone = jax.device_put(jnp.ones(8), jax.devices()[0])
    in_place = jnp.copy(jax.device_put(alone, everywhere))
    kept = transfer.put([alone, alone, in_place, in_place], [(everywhere,)] * 4, copy=False)
    assert kept[2] == (in_place,)
    parts = [shard.data for x in (alone, *(x for (x,) in kept)) for shard in x.addressable_shards]
    assert len({part.unsafe_buffer_pointer() for part in parts}) == len(parts) == 9


def test_a_program_that_is_gone_leaves_no_compiled_code():
    """A sweep compiles programs of many shapes: what placing their states compiles must not outlive them."""

    def live(size):
        start = np.zeros(size, np.float32)
        program = msrl.compile(lambda x: (x + 1, {}), start, policy=msrl.policies.GPUOnly(), axes=P("env"))
        assert (np.asarray(program.run(program.place(start), 2)[0]) == 2).all()
        del program
        gc.collect()
        return len(jax.devices()[0].client.live_executables())

    counts = [live(8 * n) for n in range(1, 6)]
    assert counts[1:] == counts[:1] * 4
