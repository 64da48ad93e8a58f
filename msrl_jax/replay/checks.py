"""Checks of a buffer's sizes: every message names the argument, its value and what it should be."""

import math
import numbers
from typing import Any

import jax

from msrl_jax._device_memory import device_memory
from msrl_jax.replay.ring import Ring
from msrl_jax.replay.storage import Storage, layout

_FIELDS = ("obs", "action", "reward", "terminated", "truncated", "next_obs")


def check_integers(**arguments: int) -> None:
    """Raises ValueError unless every argument is an integer of at least 1."""
    for name, value in arguments.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: use an integer of at least 1")


def check_numbers(**arguments: float) -> None:
    """Raises ValueError unless every argument is a finite number that is not negative."""
    for name, value in arguments.items():
        if not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
            raise ValueError(f"{name}={value!r}: use a finite number of at least 0")


def make_ring(
    example: Any,
    *,
    capacity: int,
    num_envs: int,
    unroll_length: int,
    batch_size: int,
    length: int,
    stride: int,
    min_size: int | None,
    shards: int | None,
    storage: Storage | None,
    discount: float | None,
) -> tuple[Ring, int]:
    """Checks the arguments of a buffer, and works out its sizes.

    Args:
      example: one item.
      capacity: steps of all environments to hold at most.
      num_envs: environments.
      unroll_length: steps inserted at once.
      batch_size: windows per batch.
      length: steps of a window.
      stride: steps between starts of windows.
      min_size: steps of all environments from which on the buffer is ready, or None.
      shards: shards, or None.
      storage: codecs.
      discount: whether and how windows are folded.

    Returns:
      The sizes, and the steps of each environment from which on the buffer is ready.

    Raises:
      ValueError: if they do not fit.
    """
    check_integers(
        capacity=capacity, num_envs=num_envs, unroll_length=unroll_length, batch_size=batch_size, length=length, stride=stride,
        **{name: value for name, value in (("min_size", min_size), ("shards", shards)) if value is not None},
    )  # fmt: skip
    if discount is not None:
        check_numbers(discount=discount)
        missing = [field for field in _FIELDS if not hasattr(example, field)]
        if missing:
            raise ValueError(
                f"discount={discount} asks for n-step transitions, but the example has no {', '.join(missing)}; "
                f"give a msrl_jax.replay.Transition, or discount=None"
            )
    both = math.gcd(num_envs, batch_size)
    shards = math.gcd(both, 8) if shards is None else shards
    if both % shards:
        raise ValueError(
            f"shards={shards} does not divide both num_envs={num_envs} and batch_size={batch_size}; use a divisor of {both}"
        )
    unit = math.lcm(unroll_length, stride)
    steps = capacity // num_envs // unit * unit
    ring = Ring(num_envs, steps, unroll_length, batch_size, length, stride, shards, layout(example, storage))
    what = f"capacity={capacity} holds {steps} steps of each of num_envs={num_envs} environments"
    enough = num_envs * -(-(ring.steps_of_batch + ring.lag) // unit) * unit
    if steps < length:
        raise ValueError(
            f"{what} (in whole multiples of {unit}: unroll_length={unroll_length}, stride={stride}), but a window is "
            f"length={length} steps long; use a capacity of at least {enough}, or shorter windows"
        )
    if ring.fewest_windows * num_envs < batch_size:
        raise ValueError(
            f"{what}, which are {ring.fewest_windows * num_envs} windows of length={length}, fewer than "
            f"batch_size={batch_size}; use a capacity of at least {enough}, or smaller batches"
        )
    if steps * ring.envs > 2**30:
        raise ValueError(f"{what}, more than can be counted with 32 bits; use a smaller capacity, or more shards")
    serves = -(-ring.steps_of_batch // unroll_length) * unroll_length
    if min_size is not None and not serves * num_envs <= min_size <= steps * num_envs:
        raise ValueError(
            f"min_size={min_size}: a batch of {batch_size} windows of length={length} needs {serves * num_envs} steps of all "
            f"environments, and the buffer holds {steps * num_envs}; use a number between these"
        )
    return ring, serves if min_size is None else -(-min_size // num_envs)


def check_memory(nbytes: int, parts: int, what: str, capacity: int) -> None:
    """Raises ValueError if a buffer does not fit the memory of the devices that it can be split over.

    Args:
      nbytes: its bytes.
      parts: over how many devices at most.
      what: what it is, for the message.
      capacity: how much it holds, to suggest how much would fit.
    """
    local = jax.local_devices()
    devices = local[: math.gcd(parts, len(local))]
    limit = device_memory(devices)
    if nbytes > limit:
        raise ValueError(
            f"{what} takes {nbytes:,} bytes, but the {len(devices)} {devices[0].platform} devices that it can be split over "
            f"have {limit:,} bytes; use capacity={limit * capacity // nbytes} or less, smaller dtypes (storage={{...}}), or "
            f"more devices (and as many shards)"
        )
