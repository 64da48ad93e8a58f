"""Warnings of faults of jaxlib: where a program meets one, once, and nowhere else."""

import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import msrl_jax as msrl
from msrl_jax._compat import JAXLIB
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


def reduction(rank):
    """Sums in a loop over the last but one of some dimensions."""
    body = lambda total, x: (total + (x * x).sum(-2), None)  # noqa: E731
    return jax.make_jaxpr(lambda xs: jax.lax.scan(body, jnp.zeros((1,) * (rank - 1)), xs))(jnp.ones((3, *(1,) * rank)))


def warned(rank, mesh, jaxlib):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        known_faults.warn_of_known_faults(reduction(rank), mesh, jaxlib)
        known_faults.warn_of_known_faults(reduction(rank), mesh, jaxlib)
    return [str(w.message) for w in found]


@pytest.mark.parametrize(
    ("rank", "platform", "jaxlib", "expected"),
    [
        (7, "cpu", (0, 10, 2), "jaxlib 0.10.2: .*seven or more dimensions"),
        (8, "cpu", (0, 11, 0), "39257"),
        (6, "cpu", (0, 10, 2), None),
        (7, "gpu", (0, 10, 2), None),
        (7, "cpu", (0, 12, 0), None),
        (2, "cpu", (0, 11, 1), "jaxlib 0.11.1: loops on a CPU"),
        (2, "cpu", (0, 11, 2), None),
        (2, "NVIDIA RTX A6000", (0, 11, 1), "40633"),
        (2, "NVIDIA RTX A6000", (0, 10, 2), None),
    ],
)
def test_each_fault_is_said_once_where_a_program_meets_it(rank, platform, jaxlib, expected):
    mesh = mesh_of("gpu", platform) if platform.startswith("NVIDIA") else mesh_of(platform)
    found = warned(rank, mesh, jaxlib)
    assert len(found) == (expected is not None)
    if expected:
        with pytest.raises(AssertionError, match=expected):  # `match` searches a text as it does a message
            raise AssertionError(found[0])


def test_rounding_is_no_reduction():
    closed = jax.make_jaxpr(lambda x: jax.lax.reduce_precision(x, 8, 7))(jnp.ones((1,) * 7))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known_faults.warn_of_known_faults(closed, mesh_of("cpu"), (0, 10, 2))


def test_the_flag_that_turns_the_fusions_off_ends_the_warning(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2 --xla_cpu_experimental_ynn_fusion_type=")
    assert not warned(7, mesh_of("cpu"), (0, 10, 2))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=dot")
    assert warned(7, mesh_of("cpu"), (0, 10, 2))


@pytest.mark.skipif(not (0, 10, 2) <= JAXLIB < (0, 11, 1), reason="this version of jaxlib has not the fault")
def test_a_compiled_program_is_looked_at(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    step = lambda state: (state, {"sum": (state * state).sum(-2)})  # noqa: E731
    with pytest.warns(RuntimeWarning, match="39257"):
        state = jnp.ones((1,) * 7)
        msrl.compile(step, state, policy=msrl.policies.GPUOnly(1)).run(state, 1)


@pytest.mark.parametrize(("padding", "says"), [((-1, 1), True), ((0, -1), False), ((1, 1), False)])
def test_a_convolution_that_crops_and_pads_is_told(padding, says):
    run = lambda x: jax.lax.conv_general_dilated(x, x, (1, 1), (padding, (0, 0)))  # noqa: E731
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        known_faults.warn_of_known_faults(jax.make_jaxpr(run)(jnp.ones((2, 2, 2, 2))), mesh_of("cpu"), (0, 11, 2))
    assert ["slice the array" in str(w.message) for w in found] == [True] * says


def test_this_program_meets_none():
    mesh = Mesh(np.array(jax.devices()[:1]), ("devices",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known_faults.warn_of_known_faults(reduction(3), mesh)
