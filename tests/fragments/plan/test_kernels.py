"""Launches of programs: of a text by hand, and of programs that XLA compiles for a GPU that is not there."""

import functools

import jax
import jax.numpy as jnp
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms import counted
from msrl_jax.fragments.plan.hlo import Module
from msrl_jax.fragments.plan.kernels import Launches, launches, roofline_seconds

TEXT = """HloModule jit_iteration

%body (state: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %state = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %rows = f32[8,4]{1,0} get-tuple-element(%state), index=1
  %row = f32[1,4]{1,0} fusion(%rows, %i), kind=kLoop, calls=%slice_and_add, metadata={op_name="jit(iteration)/while/body/play/act/add"}
  %rows.2 = f32[8,4]{1,0} fusion(%rows, %row, %i), kind=kLoop, calls=%write, metadata={op_name="jit(iteration)/while/body/play/dynamic_update_slice"}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[8,4]{1,0}) tuple(%next, %rows.2)
}

%test (state.1: (s32[], f32[8,4])) -> pred[] {
  %state.1 = (s32[], f32[8,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %most = s32[] constant(5)
  ROOT %less = pred[] compare(%i.1, %most), direction=LT
}

%slice_and_add (p0: f32[8,4], p1: s32[]) -> f32[1,4] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,4]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,4}
  ROOT %sum = f32[1,4]{1,0} add(%slice, %slice)
}

%write (q0: f32[8,4], q1: f32[1,4], q2: s32[]) -> f32[8,4] {
  %q0 = f32[8,4]{1,0} parameter(0)
  %q1 = f32[1,4]{1,0} parameter(1)
  %q2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %updated = f32[8,4]{1,0} dynamic-update-slice(%q0, %q1, %q2, %zero.1)
}

%small (s: f32[8,4]) -> f32[8,4] {
  ROOT %s = f32[8,4]{1,0} parameter(0)
}

%large (l: f32[8,4]) -> f32[8,4] {
  %l = f32[8,4]{1,0} parameter(0)
  %sine = f32[8,4]{1,0} sine(%l)
  ROOT %cosine = f32[8,4]{1,0} cosine(%sine)
}

ENTRY %main (a: f32[8,4], w: f32[4,4], which: s32[]) -> (f32[8,4], f32[4,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %w = f32[4,4]{1,0} parameter(1)
  %which = s32[] parameter(2)
  %zero.2 = s32[] constant(0)
  %start = (s32[], f32[8,4]{1,0}) tuple(%zero.2, %a)
  %loop = (s32[], f32[8,4]{1,0}) while(%start), condition=%test, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %rows.3 = f32[8,4]{1,0} get-tuple-element(%loop), index=1
  %product = f32[8,4]{1,0} custom-call(%rows.3, %w), custom_call_target="__cublas$gemm", metadata={op_name="jit(iteration)/learn/dot_general"}
  %either = f32[8,4]{1,0} conditional(%which, %product, %product), branch_computations={%small, %large}
  %copied = f32[8,4]{0,1} copy(%either)
  %sum.1 = f32[4,4]{1,0} all-reduce-start(%w), to_apply=%add
  %sum.2 = f32[4,4]{1,0} all-reduce-done(%sum.1)
  ROOT %result = (f32[8,4]{0,1}, f32[4,4]{1,0}) tuple(%copied, %sum.2)
}
"""  # noqa: E501


def test_launches_of_a_text_by_hand():
    rows, row, weights, index = 8 * 4 * 4, 4 * 4, 4 * 4 * 4, 4
    assert launches(Module(TEXT), ["act", "play", "learn"]) == (
        Launches("act", (5,), 1, 0, 0, 0, row + index + row),  # reads a slice and the index, writes a row
        Launches("play", (5,), 1, 0, 0, 0, row + index + row),  # reads a row and the index, writes the row in place
        Launches("", (5,), 1, 0, 0, 0, 3 * index),  # the counter
        Launches("learn", (), 0, 1, 0, 0, rows + weights + rows),
        # The larger branch has two kernels; then a copy, and a collective that is not counted twice.
        Launches("", (), 2, 0, 1, 1, 2 * 2 * rows + 2 * rows + 2 * weights),
    )
    assert sum(x.count * x.times for x in launches(Module(TEXT))) == 3 * 5 + 1 + 4


def test_a_fusion_that_runs_beside_others_counts_as_one():
    line = next(line for line in TEXT.splitlines() if line.startswith("  %rows.2 ="))
    shape = "((f32[8,4]{1,0}, f32[1,4]{1,0}, s32[]), f32[8,4]{1,0}, u32[])"
    start = line.replace("%rows.2 = f32[8,4]{1,0} fusion(", f"%start.1 = {shape} fusion-start(")
    other = TEXT.replace(line, f"{start}\n  %rows.2 = f32[8,4]{{1,0}} fusion-done(%start.1)")
    assert launches(Module(other)) == launches(Module(TEXT))


def test_a_loop_of_unknown_length_counts_once_with_its_condition():
    text = TEXT.replace(', backend_config={"known_trip_count":{"n":"5"}}', "").replace("constant(0)", "constant(9)")
    assert [(x.trips, x.count) for x in launches(Module(text)) if x.trips] == [((1,), 1 + 3)]


def test_a_time_is_the_largest_of_three():
    found = [(Launches("", (10,), 3, 1, 0, 0, 10**6), 10)]
    for flops, seconds in ((0, 40e-6), (1e12, 1e12 / 495e12)):
        assert roofline_seconds("NVIDIA H100 80GB HBM3", found, flops) == pytest.approx(seconds)
    assert roofline_seconds("NVIDIA H100 80GB HBM3", [(found[0][0], 10_000)], 0) == pytest.approx(10_000 * 4e-6)
    assert roofline_seconds("TPU v5 lite", found, 0) == pytest.approx(10**7 / 0.82e12)
    assert roofline_seconds("a device of tomorrow", found, 0) is None


@functools.cache
def gpu():
    try:
        return msrl.plan_devices("gpu:h100:1")
    except ImportError as error:
        pytest.skip(str(error))


def planned(iteration, state, devices):
    return msrl.compile(iteration, state, policy=msrl.policies.GPUOnly(), devices=devices).explain()


@pytest.mark.long
def test_launches_of_programs_whose_kernels_are_known():
    @msrl.fragment(role="learner", name="wave")
    def wave(x):
        return jnp.sin(x) * 2 + 1

    @msrl.fragment(role="actor", name="walk")
    def walk(x):
        return jax.lax.scan(lambda x, _: (jnp.cos(x) @ x, ()), x, length=11)[0]

    state = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    once = planned(lambda x: (wave(x), {}), state, gpu())
    # Elementwise operations are one kernel, of 16 KiB read and 16 KiB written; the count of iterations may be another one.
    (of_wave,) = [x for p in once.programs for x in p.launches if x.fragment == "wave"]
    assert (of_wave.kernels, of_wave.trips, of_wave.nbytes) == (1, (), 2**15)
    looped = planned(lambda x: (walk(x), {}), state, gpu())
    (in_loop,) = [x for p in looped.programs for x in p.launches if x.fragment == "walk" and x.trips]
    assert in_loop.trips == (11,) and 1 <= in_loop.kernels + in_loop.library_calls <= 2
    assert looped.to_dict()["launches"] == looped.launches and looped.launches["all"] >= 11
    assert "launches of each device" in str(looped) and looped.roofline_seconds["all"] >= 11e-6


@pytest.mark.long
def test_placements_that_share_a_device_launch_together():
    @msrl.fragment(role="env")
    def step(x):
        return jnp.sin(x) @ x

    @msrl.fragment(role="learner")
    def learn(x):
        return jnp.cos(x) @ x

    state = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    policy = msrl.policies.SingleLearnerFine()
    plan = msrl.compile(lambda x: (learn(step(x)), {}), state, policy=policy, devices=gpu()).explain()
    assert len(plan.launches) == 2
    in_all = sum(plan.launches.values())
    assert f"which placements share, launches {in_all} in all" in " ".join(str(plan).split())


# Launches of an iteration outside of loops, of every turn of a loop, and of all; without `passes/compact.py` these are 3,395
# and 14,120.
MOST = {
    "ppo": ({"num_envs": 4, "num_minibatches": 4}, {(): 50, (32,): 38, (16,): 46}, 2_000),
    "recurrent_ppo": ({}, {(): 50, (16,): 105, (16, 8): 55}, 8_600),
}


@pytest.mark.long
@pytest.mark.parametrize("algorithm", MOST)
def test_an_iteration_launches_few_kernels(algorithm):
    fields, of_loops, of_all = MOST[algorithm]
    agent = counted(msrl.algorithms.build(msrl.algorithms.make(algorithm, fields), msrl.envs.make("CartPole-v1")), 100)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    policy = msrl.policies.GPUOnly()
    plan = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=gpu()).explain()
    found = {}
    for x in plan.programs[0].launches:
        found[x.trips] = found.get(x.trips, 0) + x.count
    assert found.keys() == of_loops.keys() and all(found[trips] <= of_loops[trips] for trips in found), found
    assert plan.launches["all"] <= of_all
    by_fragment = {x.fragment for x in plan.programs[0].launches}
    assert {"act", "env_step", "gradients", "apply_update"} <= by_fragment


def test_cpus_launch_nothing():
    plan = planned(lambda x: (x + 1, {}), jax.ShapeDtypeStruct((4,), jnp.float32), jax.devices()[:1])
    assert plan.launches == {} and not plan.roofline_seconds and "launches" not in str(plan)
