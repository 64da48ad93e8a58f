"""A policy applied to devices and the sizes of logical axes."""

import dataclasses

import jax
import pytest

import msrl_jax as msrl
from msrl_jax.fragments.passes.placed_policy import PlacedPolicy, round_robin_by_process
from msrl_jax.policies import GPUOnly


@pytest.mark.parametrize("axis", ["env", "agent", "member", "worker", "shard"])
def test_workers_and_shards_divide_as_the_first_axis_of_a_placement_does(axis):
    leaves = {"env": [("state.obs", 8)], axis: [("state.leaf", 6)]}
    it = PlacedPolicy(GPUOnly(num_devices=4), tuple(jax.devices()), leaves)
    if axis in ("agent", "member"):  # these lie whole beside environments
        assert len(it.layout.devices) == 4
        return
    with pytest.raises(ValueError, match=r"=6.* cannot be split over the 4 devices of placement 'all'.* 1 or 2 or 3 devices"):
        _ = it.layout


class Markets:
    """A custom policy with a logical axis of its own."""

    def __init__(self, *separate):
        self.separate = separate

    def layout(self, devices, sizes):
        placement = msrl.policies.Placement.over("all", devices, split=("env", "market"))
        placement = dataclasses.replace(placement, separate=self.separate)
        return msrl.policies.Layout({"env": placement, "learner": placement}, policy="Markets")


def test_a_policy_says_which_of_its_axes_are_separate():
    leaves = {"env": [("state.obs", 8)], "market": [("state.prices", 6)]}
    assert len(PlacedPolicy(Markets(), tuple(jax.devices()[:4]), leaves).layout.devices) == 4
    with pytest.raises(ValueError, match="the size of axis 'market'=6 cannot be split over the 4 devices of placement 'all'"):
        _ = PlacedPolicy(Markets("market"), tuple(jax.devices()[:4]), leaves).layout


def test_sizes_of_an_axis_have_a_common_divisor_that_counts_whole_groups():
    it = PlacedPolicy(GPUOnly(), tuple(jax.devices()), {"env": [("state.obs", 12), ("state.rows", 8)]}, {"env": 2})
    assert it.sizes == {"env": 2}
    assert len(it.layout.devices) == 2


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """A device of some process."""

    id: int
    process_index: int
    platform: str = "cpu"


def test_devices_are_interleaved_over_processes():
    devices = [FakeDevice(0, 0), FakeDevice(1, 0), FakeDevice(2, 0), FakeDevice(7, 1), FakeDevice(5, 1)]
    assert [d.id for d in round_robin_by_process(devices)] == [0, 7, 1, 5, 2]
    alone = jax.devices()[::-1]
    assert round_robin_by_process(alone) == tuple(alone)
