"""Warnings of faults of jaxlib: where a program meets one, once, and nowhere else."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import msrl_jax as msrl
from msrl_jax.fragments.passes import known_faults


@pytest.fixture(autouse=True)
def forgotten():
    """No warning has been given yet, and none is when the test is over."""
    known_faults._warn.cache_clear()
    yield
    known_faults._warn.cache_clear()


def mesh_of(platform, kind="a device"):
    device = SimpleNamespace(platform=platform, device_kind=kind)
    return SimpleNamespace(devices=np.array([device], object))


ADD = jax.make_jaxpr(lambda x: x + 1)(1.0)


def warned(mesh, jaxlib):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        known_faults.warn_of_known_faults(ADD, mesh, jaxlib)
        known_faults.warn_of_known_faults(ADD, mesh, jaxlib)
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("platform", "jaxlib", "expected"),
    [
        ("cpu", (0, 11, 1), "jaxlib 0.11.1: loops on a CPU"),
        ("cpu", (0, 11, 2), None),
        ("gpu", (0, 11, 1), None),
        ("NVIDIA RTX A6000", (0, 11, 1), "40633"),
        ("NVIDIA RTX A6000", (0, 10, 2), None),
        ("NVIDIA H100", (0, 11, 1), None),
    ],
)
def test_each_fault_is_said_once_where_a_program_meets_it(platform, jaxlib, expected):
    found = warned(mesh_of("gpu", platform) if platform.startswith("NVIDIA") else mesh_of(platform), jaxlib)
    assert len(found) == (expected is not None)
    assert expected is None or expected in found[0]


def test_a_product_of_many_rows_and_a_reduction_is_right_in_each_row():
    """Plain jit of jaxlib 0.10.2 is wrong in the last row."""
    rows = np.arange(32_769, dtype=np.float32)
    energy = lambda x: jax.vmap(lambda row: ((jnp.eye(3) @ row) ** 2).sum())(x)
    points, zeros = np.stack((rows, 0 * rows, 0 * rows), axis=1), jnp.zeros_like(rows)
    program = msrl.compile(lambda s: ((s[0], energy(s[0])), {}), (points, zeros), policy=msrl.policies.GPUOnly(1))
    (_, found), _ = program.run((points, zeros), 1)
    np.testing.assert_allclose(found, rows.astype(np.float64) ** 2, rtol=1e-6)


def test_a_reduction_of_many_dimensions_returns():
    """Plain jit of jaxlib 0.10.2 ends the process or hangs, on some processors."""
    step = lambda total, x: (total + (x * x).sum(-2), None)
    sums = lambda s: ((s[0], jax.lax.scan(step, s[1], s[0])[0]), {})
    state = jnp.ones((3, *(2,) * 7)), jnp.zeros((2,) * 6)
    (_, found), _ = msrl.compile(sums, state, policy=msrl.policies.GPUOnly(1)).run(state, 1)
    np.testing.assert_array_equal(found, 6.0)


@pytest.mark.parametrize(("padding", "says"), [((-1, 1), True), ((0, -1), False), ((1, 1), False)])
def test_a_convolution_that_crops_and_pads_is_told(padding, says):
    run = lambda x: jax.lax.conv_general_dilated(x, x, (1, 1), (padding, (0, 0)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        known_faults.warn_of_known_faults(jax.make_jaxpr(run)(jnp.ones((2, 2, 2, 2))), mesh_of("cpu"), (0, 11, 2))
    assert ["slice the array" in str(w.message) for w in found] == [True] * says


def test_this_program_meets_none():
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known_faults.warn_of_known_faults(ADD, mesh)
