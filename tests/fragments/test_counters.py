"""Counters compared with Python's integers, around every number where fewer bits would fail."""

import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl_jax.fragments import counters

EDGES = [0, 1, 255, 256, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 10**13, 2**63]
numbers = st.one_of(st.sampled_from(EDGES), st.integers(0, 2**62))

step = jax.jit(counters.advance)
subtract = jax.jit(counters.difference)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(start=numbers, by=st.integers(0, 2**32 - 1))
def test_a_counter_adds_exactly(start, by):
    assert counters.to_int(counters.counter(start)) == start
    after = step(counters.counter(start), np.uint32(by))
    assert counters.to_int(after) == start + by
    assert counters.to_int(counters.advance(counters.counter(start), by)) == start + by
    if by < 2**31:
        assert int(subtract(after, counters.counter(start))) == by


@pytest.mark.parametrize("start", EDGES)
def test_large_python_numbers_and_small_signed_arrays_are_added(start):
    assert counters.to_int(counters.advance(counters.counter(start), 10**13)) == start + 10**13
    assert counters.to_int(counters.advance(counters.counter(start), jnp.int32(7))) == start + 7
    many = counters.advance(counters.counter(start), jnp.arange(3))
    assert [int(h) * 2**32 + int(low) for h, low in zip(*many, strict=True)] == [start, start + 1, start + 2]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(count=numbers, period=st.one_of(st.sampled_from([1, 2, 3, 10_000, 2**16, 2**24 - 3, 2**24]), st.integers(1, 2**24)))
def test_remainders_are_exact(count, period):
    assert int(counters.remainder(counters.counter(count), period)) == count % period


@settings(deadline=None, max_examples=100, derandomize=True)
@given(count=numbers, number=st.one_of(numbers, st.integers(-5, 5)), near=st.integers(-1, 1))
def test_thresholds_are_exact(count, number, near):
    for limit in (number, count + near):
        assert bool(counters.at_least(counters.counter(count), limit)) == (count >= limit)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(count=numbers, total=st.integers(1, 10**15))
def test_fractions_are_exact_to_four_roundings(count, total):
    expected = min(1.0, float(fractions.Fraction(count, total)))
    np.testing.assert_allclose(counters.fraction(counters.counter(count), total), expected, rtol=2**-22)
    np.testing.assert_allclose(counters.to_float(counters.counter(count)), float(count), rtol=2**-22)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(count=numbers, by=st.one_of(st.sampled_from([0, 1, 2**16 - 1, 2**16, 2**32 - 1]), st.integers(0, 2**32 - 1)))
def test_products_are_exact(count, by):
    assert counters.to_int(counters.times(counters.counter(count), by)) == count * by % 2**64
