"""Edges of what users pass: weak numbers, arrays without elements, devices, axes and settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.policies import GPUOnly, SingleLearnerCoarse
from tests.support.compare import assert_close, run_plain
from tests.support.small_loop import AXES, act, env_step, initial_state, learn, rollout

COARSE = SingleLearnerCoarse()


def iteration(state):
    x, _ = rollout(state)
    return learn(state, x, x), {}


@pytest.mark.parametrize("policy", [GPUOnly(), COARSE])
def test_other_constants_of_a_weak_state_are_seen(policy, devices):
    """The precision of a weak number beside a bfloat16 is that of bfloat16, of a strong one that of float32."""

    def of_precision(state):
        eps = float(jnp.finfo(jnp.result_type(state["w"], jnp.bfloat16)).eps)
        w = learn(state, env_step(state["x"], act(state["w"], state["x"])), state["x"])["w"] * jnp.float32(1) + eps
        return {**state, "w": w}, {"w": w}

    state = initial_state() | {"w": 0.5}
    with pytest.raises(TypeError, match=r"state\['w'\]"):
        msrl.compile(of_precision, state, policy=policy, axes=AXES, devices=devices[:4]).run(state, 1)
    strong = state | {"w": jnp.float32(0.5)}
    program = msrl.compile(of_precision, strong, policy=policy, axes=AXES, devices=devices[:4])
    assert_close(program.run(strong, 2), run_plain(of_precision, strong, 2))


@pytest.mark.parametrize("policy", [GPUOnly(), SingleLearnerCoarse(learners=4)])
def test_metrics_without_elements_are_read(policy, devices):
    def with_nothing(state):
        after, _ = iteration({k: state[k] for k in AXES})
        return after | {"none": env_step(state["none"], state["none"])}, {"none": state["none"]}

    state = initial_state() | {"none": jnp.zeros((8, 0))}
    program = msrl.compile(with_nothing, state, policy=policy, axes=AXES | {"none": P("env")}, devices=devices)
    _, metrics = program.run(state, 3, chunk=2)
    assert metrics["none"].shape == (3, 8, 0) and metrics["none"].dtype == np.float32


def test_numbers_whose_range_overflows_are_refused_by_the_codec_of_ranges(devices):
    def huge(state):
        x, _ = rollout(state)
        return learn(state, x * 0, x * jnp.float32(1e38) * jnp.where(jnp.arange(8) % 2, 3.0, -3.0)), {}

    policy = SingleLearnerCoarse(trajectory_codec="scaled_uint8")
    program = msrl.compile(huge, initial_state(), policy=policy, axes=AXES, devices=devices[:2])
    with pytest.raises(ValueError, match=r"scaled_uint8.*finite range"):
        program.run(initial_state(), 1)


def test_devices_and_axes_that_cannot_be_meant_are_refused(devices):
    def refused(error, message, **options):
        with pytest.raises(error, match=message):
            msrl.compile(iteration, initial_state(), policy=COARSE, **{"axes": AXES, **options})

    refused(ValueError, "twice; pass every device once", devices=[devices[0], devices[1], devices[0]])
    refused(TypeError, "devices has 2, which is not a device", devices=np.array([[2]]))
    refused(ValueError, r"axes of state\['x'\] name the logical axis 'envs'.*did you mean 'env'", axes=AXES | {"x": P("envs")})
    program = msrl.compile(iteration, initial_state(), policy=COARSE, axes=AXES)
    for number in ("3", None, True, 0):
        with pytest.raises(ValueError, match=f"iterations={number!r} must be an integer"):
            program.run(initial_state(), number)


def test_a_program_of_64_bits_is_refused_without_them(devices):
    with jax.enable_x64(True):
        program = msrl.compile(iteration, initial_state(), policy=COARSE, axes=AXES, devices=devices[:2])
        program.run(initial_state(), 1)
    with pytest.raises(RuntimeError, match=r"compiled under jax\.enable_x64, but runs without it"):
        program.run(initial_state(), 1)
