"""What several processes hold and send, planned in one."""

import dataclasses

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
