"""Lowering for CPUs: straight-line random bits, and compiler options without known faults.

JAX's own code of its Threefry generator for CPUs is a loop over groups of rounds, of about 80 small operations. In a training
loop that draws a few numbers per step, they take longer than all others together. Only programs that `lower_jitted` lowers
have this straight-line code, of the same bits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

from msrl_jax._compat import lower_as, lowering_rule, threefry2x32_p
from msrl_jax.fragments.passes.known_faults import CPU_OPTIONS

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, section 4.2).

    Takes the two words of keys and of counters, all `[...]` uint32; returns the two words of random bits for each counter.
    """
    # `lax.add` instead of `+` etc.: tracing takes a third of the time, and a run traces this for every shape that it draws.
    keys = (key0, key1, lax.bitwise_xor(lax.bitwise_xor(key0, key1), _PARITY))
    x0, x1 = lax.add(x0, keys[0]), lax.add(x1, keys[1])
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x0 = lax.add(x0, x1)
            left, right = lax.shift_left(x1, np.uint32(distance)), lax.shift_right_logical(x1, np.uint32(32 - distance))
            x1 = lax.bitwise_xor(x0, lax.bitwise_or(left, right))
        x0 = lax.add(x0, keys[(group + 1) % 3])
        x1 = lax.add(x1, lax.add(keys[(group + 2) % 3], np.uint32(group + 1)))
    return x0, x1


_ON_CPU = ((threefry2x32_p, lowering_rule(threefry2x32)),)


def lower_jitted(jitted: jax.stages.Wrapped, *args: Any) -> Callable[[], jax.stages.Compiled]:
    """Lowers a jitted function; for CPUs, with straight-line random bits and safe compiler options.

    Returns:
      A function that compiles it.
    """
    traced = jitted.trace(*args)
    shardings = (getattr(x, "sharding", None) for x in jax.tree.leaves(args))
    platforms = {device.platform for sharding in shardings if sharding for device in sharding.device_set} or {
        jax.default_backend()
    }
    if platforms != {"cpu"}:
        return traced.lower().compile
    return functools.partial(lower_as(traced, _ON_CPU).compile, compiler_options=CPU_OPTIONS)
