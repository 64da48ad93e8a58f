"""The length of a loop that a program's text does not state is read from its counter, as XLA writes it for TPUs."""

import pytest

from msrl_jax.fragments.plan.collectives import collectives

# A scan of 32 steps; one element of its carry is summed over devices.
SCAN = """\
HloModule jit_f, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%cond.1 (wide.param.8: (f32[4], s32[], s32[])) -> pred[] {
  %constant.7.clone.1 = s32[]{:T(128)} constant(32)
  %wide.param.8 = (f32[4]{0:T(128)S(1)}, s32[]{:T(128)}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %get-tuple-element.3 = s32[]{:T(128)} get-tuple-element(%wide.param.8), index=1
  ROOT %lt.1 = pred[]{:T(512)} compare(%get-tuple-element.3, %constant.7.clone.1), direction=LT, metadata={op_name="w/cond/lt"}
}

%body.1 (wide.param.9: (f32[4], s32[], s32[])) -> (f32[4], s32[], s32[]) {
  %wide.param.9 = (f32[4]{0:T(128)S(1)}, s32[]{:T(128)}, /*index=2*/s32[]{:T(128)}) parameter(0)
  %get-tuple-element.4 = s32[]{:T(128)} get-tuple-element(%wide.param.9), index=1
  %copy.5 = s32[]{:T(128)} copy(%get-tuple-element.4)
  %constant.1 = s32[]{:T(128)} constant(1)
  %add.6 = s32[]{:T(128)} add(%copy.5, %constant.1), metadata={op_name="jit(f)/while/body/add" stack_frame_id=1}
  %get-tuple-element.5 = f32[4]{0:T(128)S(1)} get-tuple-element(%wide.param.9), index=0
  %all-reduce.1 = f32[4]{0:T(128)} all-reduce(%get-tuple-element.5), replica_groups={{0,1}}, to_apply=%add
  ROOT %tuple.2 = (f32[4]{0:T(128)S(1)}, s32[]{:T(128)}, s32[]{:T(128)}) tuple(%all-reduce.1, %add.6, /*index=2*/%add.6)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0:T(128)} parameter(0)
  %constant.2 = s32[]{:T(128)} constant(0)
  %copy-start.1 = (s32[]{:T(128)}, s32[]{:T(128)}, u32[]{:S(2)}) copy-start(%constant.2)
  %copy-done.1 = s32[]{:T(128)} copy-done(%copy-start.1)
  %tuple.1 = (f32[4]{0:T(128)}, s32[]{:T(128)}, s32[]{:T(128)}) tuple(%p, %copy-done.1, %copy-done.1)
  %while.1 = (f32[4]{0:T(128)}, s32[]{:T(128)}, s32[]{:T(128)}) while(%tuple.1), condition=%cond.1, body=%body.1
  ROOT %get-tuple-element.9 = f32[4]{0:T(128)} get-tuple-element(%while.1), index=0
}
"""


def length(text):
    """The length of the loop; None if it is reported as unknown."""
    (found,), known, understood = collectives(text)
    assert understood
    return found.times if known else None


def test_a_counter_from_zero_in_steps_of_one_up_to_a_bound():
    assert length(SCAN) == 32


OTHER = {
    "starts elsewhere": ("s32[]{:T(128)} constant(0)", "s32[]{:T(128)} constant(5)"),
    "starts at an argument": ("%constant.2 = s32[]{:T(128)} constant(0)", "%constant.2 = s32[]{:T(128)} parameter(1)"),
    "other steps": ("s32[]{:T(128)} constant(1)", "s32[]{:T(128)} constant(2)"),
    "not a sum": ("s32[]{:T(128)} add(%copy.5", "s32[]{:T(128)} multiply(%copy.5"),
    "a sum of another element": ("get-tuple-element(%wide.param.9), index=1", "get-tuple-element(%wide.param.9), index=2"),
    "another comparison": ("direction=LT", "direction=NE"),
    "a bound from outside": ("%constant.7.clone.1 = s32[]{:T(128)} constant(32)", "%constant.7.clone.1 = s32[] parameter(1)"),
    "a condition in a fusion": ("compare(%get-tuple-element.3, %constant.7.clone.1), direction=LT", "fusion(%wide.param.8)"),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHER)
def test_any_other_loop_is_of_unknown_length(kind):
    old, new = OTHER[kind]
    assert SCAN.count(old) == 1
    assert length(SCAN.replace(old, new)) is None
