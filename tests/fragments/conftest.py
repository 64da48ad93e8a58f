"""Fixtures of the compiler's tests: the devices, and the bytes that the host's transfers move."""

import types

import jax
import pytest

from msrl_jax.fragments.runtime import execute as runtime


@pytest.fixture
def moved_bytes(monkeypatch):
    """Runs one iteration; returns the bytes that the host's transfers put on devices."""

    def run(program, state):
        moved, put, state = [], jax.device_put, program.place(state)

        def counting(arrays, shardings, **options):
            results = put(arrays, shardings, **options)
            moved.extend(s.data.nbytes for x in jax.tree.leaves(results) for s in x.addressable_shards)
            return results

        fake = types.SimpleNamespace(**vars(jax) | {"device_put": counting})
        with monkeypatch.context() as patch:
            patch.setattr(runtime, "jax", fake)
            program.run(state, 1, donate=True)
        return sum(moved)

    return run


@pytest.fixture(scope="session")
def devices():
    """The eight virtual devices."""
    return jax.devices()
