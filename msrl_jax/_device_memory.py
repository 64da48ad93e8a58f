"""The memory that arrays take, and the memory that devices report."""

import math
import os
from collections.abc import Sequence
from typing import Any


def device_memory(devices: Sequence[Any]) -> int:
    """The bytes available to arrays that are split evenly over devices.

    Args:
      devices: the devices.

    Returns:
      The smallest memory limit times the number of devices. If a device reports no limit, as CPUs do, the host's memory.
    """
    stats = [d.memory_stats() if d.platform != "cpu" else None for d in devices]
    limits = [s["bytes_limit"] for s in stats if s and "bytes_limit" in s]
    if len(limits) == len(devices):
        return min(limits) * len(limits)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def array_bytes(aval: Any) -> int:
    """Bytes of an array, typed PRNG keys included (8 for each threefry key, 16 for each rbg key).

    Args:
      aval: anything that has a shape and a dtype.

    Returns:
      The bytes.
    """
    return math.prod(aval.shape) * aval.dtype.itemsize
