"""Arguments that do not fit are refused before anything compiles."""

import re

import jax
import jax.numpy as jnp
import pytest

from msrl_jax import replay
from tests.support.history import EXAMPLE

FITS = {"capacity": 480, "num_envs": 8, "unroll_length": 4, "batch_size": 16}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"capacity": 0}, r"capacity=0: use an integer of at least 1"),
        ({"batch_size": 512}, r"480 windows of length=1, fewer than batch_size=512; use a capacity of at least 512,"),
        ({"length": 64}, r"capacity=480 holds 60 steps of each of num_envs=8 .* a window is length=64 steps long; use a capac"),
        ({"shards": 3}, r"shards=3 does not divide both num_envs=8 and batch_size=16; use a divisor of 8"),
        ({"min_size": 481}, r"min_size=481: a batch .* needs 32 steps of all environments, and the buffer holds 480"),
        ({"min_size": 24, "length": 5}, r"min_size=24: a batch of 16 windows of length=5 needs 64 steps"),
        ({"discount": -1.0}, r"discount=-1\.0: use a finite number of at least 0"),
        ({"storage": {"observation": "uint8"}}, r"storage has 'observation', which is not in an item; it has \["),
        ({"storage": {"obs": "uint9"}}, r"unknown codec 'uint9'"),
        ({"storage": {"terminated": "uint8"}}, r"the codec cannot pack item\.terminated, which is bool\[\]"),
        ({"capacity": 10**14}, r"which exceeds 32-bit counts"),
    ],
)
def test_arguments(arguments, message):
    """Both kinds of buffers make the same ring."""
    with pytest.raises(ValueError, match=message):
        replay.prioritized(EXAMPLE, **{**FITS, **arguments})


@pytest.mark.parametrize("key", ["capacity", "batch_size", "length"])
def test_the_capacity_that_an_error_suggests_is_accepted(key):
    wrong = {
        "capacity": {"capacity": 4, "length": 7, "stride": 3},
        "batch_size": {"batch_size": 999, "stride": 3},
        "length": {"length": 64, "stride": 6},
    }[key]
    with pytest.raises(ValueError) as error:
        replay.uniform(EXAMPLE, **{**FITS, **wrong})
    match = re.search(r"a capacity of at least (\d+)", str(error.value))
    assert match
    replay.uniform(EXAMPLE, **{**FITS, **wrong, "capacity": int(match[1])})


def test_too_much_memory_is_refused_in_bytes():
    image = jax.ShapeDtypeStruct((84, 84, 4), jnp.float32)
    arguments = {"capacity": 10**9, "num_envs": 8, "unroll_length": 1, "batch_size": 8}
    with pytest.raises(ValueError, match=r"capacity=1000000000 steps takes 112,896,000,0\d\d,\d\d\d bytes") as error:
        replay.uniform({"obs": image}, **arguments)
    match = re.search(r"use capacity=(\d+) or less", str(error.value))
    assert match
    replay.uniform({"obs": image}, **{**arguments, "capacity": int(match[1])})
    with pytest.raises(ValueError, match=r"a queue of capacity=1000000 batches takes [\d,]+ bytes"):
        replay.fifo(jax.ShapeDtypeStruct((128, 8, 84, 84, 4), jnp.float32), capacity=10**6)


def test_items_of_another_shape():
    buffer = replay.uniform({"x": jnp.zeros(3)}, **FITS)
    with pytest.raises(ValueError, match=r"items\['x'\] is float32\[4, 8, 2\], but the buffer takes float32\[4, 8, 3\]"):
        buffer.insert(buffer.init(), {"x": jnp.zeros((4, 8, 2))})
    with pytest.raises(ValueError, match=r"but the buffer holds"):
        buffer.insert(buffer.init(), {"y": jnp.zeros((4, 8, 3))})
