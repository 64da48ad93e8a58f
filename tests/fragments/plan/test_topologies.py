"""Devices that are not there: their names, and that plans are all that can be made of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl

step = msrl.fragment(role="learner", name="step")(lambda x: x + x.mean())
STATE, AXES = jax.ShapeDtypeStruct((64,), jnp.float32), P("env")


def make(devices):
    return msrl.compile(lambda x: (step(x), {}), STATE, policy=msrl.policies.GPUOnly(), axes=AXES, devices=devices)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("tpux:v5e:2x2", "unknown platform 'tpux' \\(did you mean 'tpu'\\?\\)"),
        ("tpu", "pass a kind and a number of devices"),
        ("tpu:v5:2x2", "unknown TPU 'v5' \\(did you mean 'v5[ep]'\\?\\); use v5e, v5p, v6e"),
        ("tpu:v5e:0x2", "'0x2' is not a size; use tpu:v5e:8x8"),
        ("gpu:h100:1x2x3", "GPUs are hosts x GPUs"),
        ("cpu:9", 'this process has 8 CPU devices. Call jax.config.update\\("jax_num_cpu_devices", 9\\) before JAX starts'),
    ],
)
def test_a_wrong_name_is_refused_with_the_right_ones(spec, message):
    with pytest.raises(ValueError, match=f"devices '{spec}': {message}"):
        msrl.plan_devices(spec)


def test_a_list_of_names_is_refused():
    with pytest.raises(TypeError, match=r"devices \['gpu:h100:1'\]: pass a string"):
        msrl.plan_devices(["gpu:h100:1"])


def test_cpu_devices_are_those_of_this_process():
    assert msrl.plan_devices("cpu:4") == jax.devices()[:4]


@pytest.mark.parametrize(
    ("spec", "error", "remedy"),
    [
        ("tpu:v5e:2x2", RuntimeError("JAX TPU support not installed; cannot generate TPU topology."), ".msrl-jax\\[tpu\\]"),
        ("gpu:h100:8", NotImplementedError("topology not implemented for cuda"), "jax-cuda12-pjrt .* or plan for cpu:8"),
    ],
)
def test_without_the_compiler_the_error_says_what_to_install(monkeypatch, spec, error, remedy):
    def missing(*args, **kwargs):
        raise error

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(ImportError, match=f"devices '{spec}'.*{remedy}"):
        msrl.plan_devices(spec)


def refused(program, state):
    for use in (
        lambda: program.place(state),
        lambda: program(state),
        lambda: program.run(state, 1),
        lambda: program.initialize(lambda: jnp.zeros(64)),
    ):
        with pytest.raises(RuntimeError, match=r"devices that this machine does not have .* it can be explained, but no state"):
            use()


def test_nothing_is_placed_or_run_on_devices_that_are_not_there(monkeypatch):
    program = make(jax.devices())
    monkeypatch.setattr("msrl_jax.fragments.program.is_planned", lambda device: True)
    refused(program, jnp.zeros(64))
    assert "all-reduce" in str(program.explain())


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "count"), [("tpu:v5e:1x1", 1), ("tpu:v5e:8x8", 64), ("tpu:v5p:2x2x2", 8)])
def test_a_pod_of_tpus_is_planned_without_one(spec, count):
    """Needs the compiler for TPUs: pip install 'jax[tpu]'."""
    pytest.importorskip("libtpu")
    devices = msrl.plan_devices(spec)
    assert len(devices) == count and {d.platform for d in devices} == {"tpu"}
    program = make(devices)
    refused(program, jnp.zeros(64))
    plan = program.explain()
    found = [(c.kind, c.nbytes) for p in plan.programs for c in p.collectives]
    assert found == ([("all-reduce", 4)] if count > 1 else [])
    huge = jax.ShapeDtypeStruct((128, 2**32), jnp.float32)
    program = msrl.compile(lambda x: (step(x), {}), huge, policy=msrl.policies.GPUOnly(), axes=AXES, devices=devices)
    with pytest.raises(ValueError, match=f"the state takes {2**41 // count:,} bytes of TPU_.*which has"):
        program.state.check_memory()
