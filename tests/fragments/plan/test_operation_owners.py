"""Operations of a program by hand, and whose they are."""

from msrl_jax.fragments.plan.operation_owners import Operation, module_of, operations

TEXT = """HloModule jit_iterations.2, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %inner = f32[4]{0} multiply(%p, %p), metadata={op_name="jit(iterations)/while/body/act/mul"}
  ROOT %cast = f32[4]{0} bitcast(%inner)
}

%body (state: (s32[], f32[4])) -> (s32[], f32[4]) {
  %state = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%state), index=1
  %named = f32[4]{0} add(%x, %x), metadata={op_name="jit(iterations)/while/body/learn/jvp(gradients)/add"}
  %loop_fusion = f32[4]{0} fusion(%named), kind=kLoop, calls=%fused
  %copy.7 = f32[4]{0} copy(%loop_fusion)
  ROOT %out = (s32[], f32[4]{0}) tuple(%x, %copy.7)
}

%test (state.1: (s32[], f32[4])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %start = (s32[], f32[4]{0}) tuple(%a, %a)
  %loop = (s32[], f32[4]{0}) while(%start), condition=%test, body=%body, metadata={op_name="jit(iterations)/learn/while"}
  %outside = f32[4]{0} negate(%a), metadata={op_name="jit(iterations)/neg"}
  %sum = f32[4]{0} all-reduce(%outside), to_apply=%test, metadata={op_name="jit(iterations)/learn/psum"}
  ROOT %unknown = f32[4]{0} copy(%sum)
}
"""


def test_operations_are_of_their_innermost_fragment():
    found = operations(TEXT, {"act", "learn", "gradients"})
    assert found["named"] == Operation("add", "gradients", "loop")
    assert found["loop"] == Operation("while", "learn")
    assert found["sum"] == Operation("all-reduce", "learn")
    assert found["outside"] == Operation("negate", "")
    assert module_of(TEXT) == "jit_iterations.2"


def test_what_has_no_name_is_of_what_it_fuses_or_of_its_loop():
    found = operations(TEXT, {"act", "learn", "gradients"})
    assert found["loop_fusion"] == Operation("fusion", "act", "loop")
    assert found["copy.7"] == Operation("copy", "learn", "loop")
    assert found["unknown"] == Operation("copy", None)


def test_names_are_found_as_xla_writes_them():
    text = TEXT.replace("/act/", r"/\303\251 \"a\\b/")
    assert operations(text, {'é "a\\b', "learn"})["inner"].fragment == 'é "a\\b'


def test_a_fragment_is_a_whole_word():
    assert operations(TEXT, {"act", "gradient", "lear"})["named"].fragment == ""
    assert operations(TEXT, ())["named"].fragment == ""
