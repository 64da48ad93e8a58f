"""How much memory arrays take, and how much devices have, as far as they say."""

import math
import os
from collections.abc import Sequence
from typing import Any


def device_memory(devices: Sequence[Any]) -> int:
    """The bytes that arrays split over some devices can take, as far as the devices say.

    Args:
      devices: the devices.

    Returns:
      The sum of the devices' memory; CPU devices share that of the host.
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
