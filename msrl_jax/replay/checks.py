"""Checks of a buffer's sizes: every message names the argument, its value and the valid values."""

import math
import numbers

from jax.core import Tracer

from msrl_jax._device_memory import device_memory, own_devices


def check_integers(**arguments: int) -> None:
    """Raises ValueError unless every argument is an integer of at least 1."""
    for name, value in arguments.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: use an integer of at least 1")


def check_numbers(**arguments: float) -> None:
    """Raises ValueError unless every argument is a number of a trace, or a finite number that is not negative."""
    for name, value in arguments.items():
        if isinstance(value, Tracer):
            continue
        if not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}={value!r}: use a finite number of at least 0")


def check_memory(nbytes: int, parts: int, what: str, capacity: int) -> None:
    """Raises ValueError if a buffer does not fit the memory of the devices that it can be split over.

    Args:
      nbytes: bytes of the buffer.
      parts: the largest number of devices.
      what: the buffer in words, for the message.
      capacity: the buffer's capacity, to suggest one that fits.
    """
    local = own_devices()
    devices = local[: math.gcd(parts, len(local))]
    limit = device_memory(devices)
    if limit is not None and nbytes > limit:
        raise ValueError(
            f"{what} takes {nbytes:,} bytes, but the {len(devices)} {devices[0].platform} devices that it can be split over "
            f"have {limit:,} bytes; use capacity={limit * capacity // nbytes} or less, smaller dtypes (storage={{...}}), or "
            f"more devices (and as many shards)"
        )
