"""XLA's text: collectives of programs that XLA compiles and of texts by hand, lengths of loops, and whose operations are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.graph.marker import fragment
from msrl_jax.fragments.plan.hlo import Collective, Module, Operation, collectives, operations

RING = [(i, (i + 1) % 8) for i in range(8)]
ALL_REDUCE, GATHER, SCATTER = "all-reduce", "all-gather", "reduce-scatter"
PERMUTE, EXCHANGE = "collective-permute", "all-to-all"


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()[:8]), ("d",))


def compiled(fn, mesh, *, out=None):
    """The text of a program of x: f32[16, 4], which is f32[2, 4], 32 bytes, on each device."""
    x = jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    return jax.jit(fn, out_shardings=out and NamedSharding(mesh, out)).lower(x).compile().as_text()


def on_devices(fn, mesh):
    return jax.shard_map(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)


def found(text):
    listed, known, understood = collectives(Module(text))
    assert understood
    return sorted((c.kind, c.nbytes, c.times) for c in listed), known


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jax.lax.psum(x, "d"), (ALL_REDUCE, 32)),
        (lambda x: jax.lax.pmax(x.sum(), "d")[None], (ALL_REDUCE, 4)),
        (lambda x: jax.lax.all_gather(x, "d", tiled=True), (GATHER, 256)),
        (lambda x: jax.lax.psum_scatter(jnp.tile(x, (4, 1)), "d", tiled=True), (SCATTER, 16)),
        (lambda x: jax.lax.all_to_all(jnp.tile(x, (4, 1)), "d", 0, 0, tiled=True), (EXCHANGE, 128)),
        (lambda x: jax.lax.ppermute(x, "d", RING), (PERMUTE, 32)),
        (lambda x: jax.lax.ppermute(x > 0, "d", RING), (PERMUTE, 8)),
        (lambda x: jax.lax.ppermute(x.astype(jnp.int8), "d", RING), (PERMUTE, 8)),
        (lambda x: sum(jnp.sum(v) for v in jax.lax.psum((x, x[0], x[0, 0]), "d"))[None], (ALL_REDUCE, 32 + 16 + 4)),
        (lambda x: 2 * x, None),
    ],
)
def test_kinds_and_bytes(mesh, fn, expected):
    text = compiled(on_devices(fn, mesh), mesh)
    assert found(text) == ([] if expected is None else [(*expected, 1)], True)


def test_collectives_of_the_partitioner(mesh):
    # The gradient of a loss over a sharded batch is one all-reduce; replicating the batch is an all-gather.
    def gradients(w, x):
        return jax.grad(lambda w: jnp.square(x @ w).sum())(w)

    text = compiled(lambda x: fragment(gradients)(jnp.ones((4, 3)), x), mesh)
    assert found(text) == ([(ALL_REDUCE, 4 * 3 * 4, 1)], True)
    assert found(compiled(lambda x: 2 * x, mesh, out=P(None))) == ([(GATHER, 256, 1)], True)
    assert found(compiled(lambda x: jnp.sin(x) * 2, mesh, out=P("d"))) == ([], True)


def test_source_is_where_jax_says(mesh):
    def fn(x):
        with jax.named_scope("update"):
            return jax.lax.psum(x, "d")

    (collective,) = collectives(Module(compiled(on_devices(fn, mesh), mesh))).collectives
    assert collective.source.startswith("jit(fn)/") and "/update/psum" in collective.source


def test_loops_multiply(mesh):
    def fn(x):
        def inner(c, _):
            return c + 0.1 * jax.lax.psum(c, "d"), jax.lax.ppermute(c.sum(), "d", RING)

        def outer(c, _):
            c, shifted = jax.lax.scan(inner, c, length=3)
            return c + jax.lax.all_gather(shifted, "d").sum(), None

        return jax.lax.scan(outer, jax.lax.pmean(x, "d"), length=5)[0]

    text = compiled(on_devices(fn, mesh), mesh)
    assert found(text) == (sorted([(ALL_REDUCE, 32, 1), (ALL_REDUCE, 32, 15), (PERMUTE, 4, 15), (GATHER, 8 * 3 * 4, 5)]), True)


def test_loops_of_unknown_length_are_reported(mesh):
    def fn(x):
        y = jax.lax.while_loop(lambda c: c[0, 0] < 1e3, lambda c: c + jax.lax.psum(c, "d"), x)
        return jax.lax.scan(lambda c, _: (jax.lax.ppermute(c, "d", RING), None), y, length=4)[0]

    assert found(compiled(on_devices(fn, mesh), mesh)) == ([(ALL_REDUCE, 32, 1), (PERMUTE, 32, 4)], False)


def test_a_loop_of_unknown_length_within_a_known_one(mesh):
    def fn(x):
        def step(c, _):
            return jax.lax.while_loop(lambda c: c[0, 0] < 1e3, lambda c: c + jax.lax.psum(c, "d"), c), None

        return jax.lax.scan(step, x, length=4)[0]

    assert found(compiled(on_devices(fn, mesh), mesh)) == ([(ALL_REDUCE, 32, 4)], False)


def test_a_loop_of_unknown_length_without_collectives_is_ignored(mesh):
    def fn(x):
        return jax.lax.psum(jax.lax.while_loop(lambda c: c[0, 0] < 1e3, lambda c: c * 2 + 1, x), "d")

    assert found(compiled(on_devices(fn, mesh), mesh)) == ([(ALL_REDUCE, 32, 1)], True)


def test_the_predicate_of_a_loop_counts(mesh):
    # A batched while_loop over a sharded axis: an all-reduce per repetition decides whether any element continues.
    def fn(x):
        return jax.vmap(lambda v: jax.lax.while_loop(lambda c: c.sum() < 1e3, lambda c: c * 2 + 1, v))(x)

    ((kind, nbytes, _),), known = found(compiled(fn, mesh))
    assert kind == ALL_REDUCE and nbytes <= 4 and not known


def test_every_branch_of_a_conditional_is_listed(mesh):
    def fn(x):
        def branches(c, _):
            branch = jax.lax.axis_index("d") * 0 + c[0, 0].astype(int)
            gathered = [lambda: jax.lax.psum(c, "d"), lambda: c, lambda: jax.lax.all_gather(c, "d").sum(0)]
            return jax.lax.switch(branch, gathered), None

        return jax.lax.scan(branches, x, length=6)[0]

    assert found(compiled(on_devices(fn, mesh), mesh)) == ([(GATHER, 256, 6), (ALL_REDUCE, 32, 6)], True)


# As XLA prints programs for GPUs and TPUs: asynchronous pairs, layouts with tiles and memory spaces, calls of calls.
ASYNCHRONOUS = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[1024]{0})->f32[1024]{0}}

%add.clone (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %add = f32[] add(f32[] %x, f32[] %y)
}

%async_computation (p: f32[4096]) -> f32[1024] {
  %p = f32[4096]{0} parameter(0)
  ROOT %rs = f32[1024]{0} reduce-scatter(f32[4096]{0} %p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add.clone
}

%body.1 (t: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %ars = (bf16[8,128]{1,0:T(8,128)(2,1)}, f32[], pred[3]{0}) all-reduce-start(%a, %b, %c), to_apply=%add.clone
  %ard = (bf16[8,128]{1,0}, f32[], pred[3]{0}) all-reduce-done(%ars)
  %one = f32[2,2]{1,0} all-reduce-start(%d), to_apply=%add.clone
  %pair = (f32[6]{0}, f32[6]{0}) all-reduce-start(%e, %f), to_apply=%add.clone
}

%cond.1 (t: (s32[], bf16[8,128])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[1024]) -> f32[1024] {
  %ags = (f32[2,4]{1,0}, f32[8,4]{1,0:T(4,128)S(1)}) all-gather-start(f32[2,4]{1,0} %q), dimensions={0}, \
metadata={op_name="jit(step)/learn/all_gather" source_line=3}
  %agd = f32[8,4]{1,0} all-gather-done((f32[2,4]{1,0}, f32[8,4]{1,0}) %ags)
  %many = ((f32[2]{0}, bf16[3]{0}), (f32[8]{0}, bf16[12]{0})) all-gather-start(%q, %r), dimensions={0}
  %cps = (c64[5]{0}, c64[5]{0}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%s), source_target_pairs={{0,1}}
  %cpd = c64[5]{0} collective-permute-done(%cps)
  %a2a = ((f32[16]{0}), f32[16]{0}, s32[]) all-to-all-start(%u), dimensions={0}
  %ragged = f32[<=7,2]{1,0} ragged-all-to-all(%u, %v)
  %as = ((f32[4096]{0}), f32[1024]{0}, s32[]) async-start(f32[4096]{0} %w), calls=%async_computation
  %ad = f32[1024]{0} async-done(((f32[4096]{0}), f32[1024]{0}, s32[]) %as), calls=%async_computation
  %cb = u8[9]{0} collective-broadcast(%z), replica_groups={{0,1}}
  %while.2 = (s32[], bf16[8,128]{1,0}) while(%tuple), condition=%cond.1, body=%body.1, \
backend_config={"operation_queue_id":"0","known_trip_count":{"n":"10"},"known_init_step":{"init":"0","step":"1"}}
  ROOT %out = f32[1024]{0} fusion(%ad), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/all-gather-ish"}
}
"""


def test_asynchronous_collectives_count_their_results_once():
    listed, known, understood = collectives(Module(ASYNCHRONOUS))
    assert known and understood
    assert listed == [
        Collective("all-gather", 8 * 4 * 4, 1, "jit(step)/learn/all_gather"),
        Collective("all-gather", 8 * 4 + 12 * 2, 1, ""),
        Collective("collective-permute", 5 * 8, 1, ""),
        Collective("all-to-all", 16 * 4, 1, ""),
        Collective("ragged-all-to-all", 7 * 2 * 4, 1, ""),
        Collective("reduce-scatter", 1024 * 4, 1, ""),
        Collective("collective-broadcast", 9, 1, ""),
        Collective("all-reduce", 8 * 128 * 2 + 4 + 3, 10, ""),
        Collective("all-reduce", 2 * 2 * 4, 10, ""),
        Collective("all-reduce", 6 * 4 + 6 * 4, 10, ""),
    ]


def test_the_predicate_of_a_loop_of_known_length_runs_once_more_than_its_body():
    text = ASYNCHRONOUS.replace("  ROOT %lt", "  %any = pred[] all-reduce(%x), to_apply=%add.clone\n  ROOT %lt")
    listed, known, _ = collectives(Module(text))
    assert known and next((c.nbytes, c.times) for c in listed if c.kind == "all-reduce") == (1, 11)


def test_without_a_trip_count_the_length_is_unknown():
    text = ASYNCHRONOUS.replace('"known_trip_count":{"n":"10"},', "")
    listed, known, _ = collectives(Module(text))
    assert not known and [c.times for c in listed if c.kind == "all-reduce"] == [1, 1, 1]


def test_conditionals_on_a_predicate():
    text = """\
HloModule m

%yes (p: f32[4]) -> f32[4] {
  ROOT %r = f32[4]{0} all-reduce(%p), to_apply=%add
}

%no (p: f32[4]) -> f32[4] {
  ROOT %g = f32[4]{0} collective-permute(%p), source_target_pairs={{0,1}}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  ROOT %c = f32[4]{0} conditional(%pred, %p, %p), true_computation=%yes, false_computation=%no
}
"""
    assert found(text) == ([(ALL_REDUCE, 16, 1), (PERMUTE, 16, 1)], True)


UNCLEAR = {
    "nothing": "",
    "no entry": ASYNCHRONOUS.replace("ENTRY %main (p: f32[1024]) -> f32[1024] {", "ENTRY main [p: f32[1024]] -> f32[1024] {"),
    "another way to write an instruction": ASYNCHRONOUS.replace("%ragged = f32[<=7,2]{1,0}", "%ragged: f32[<=7,2]{1,0} :="),
    "another way to name what is called": ASYNCHRONOUS.replace("calls=%async_computation", "runs=%async_computation"),
    "a loop written in another way": ASYNCHRONOUS.replace("condition=%cond.1, body=%body.1", "do=%body.1"),
}


@pytest.mark.parametrize("kind", UNCLEAR)
def test_a_text_that_is_not_understood_is_reported_as_incomplete(kind):
    assert not collectives(Module(UNCLEAR[kind])).understood


def test_plans_say_which_collectives_are_unknown(mesh, monkeypatch):
    state = {"x": jnp.arange(16.0)}
    learn = fragment(role="learner", name="learn")(lambda x: x - x.mean())
    program = msrl.compile(lambda s: ({"x": learn(s["x"])}, {}), state, policy=msrl.policies.GPUOnly(), axes={"x": P("env")})
    plan = program.explain()
    assert [p["collectives_known"] for p in plan.to_dict()["programs"]] == [True]
    (text,) = [c.as_text() for c in program.compiled()]
    monkeypatch.setattr(jax.stages.Compiled, "as_text", lambda self: text.replace(" = ", " <- "))
    plan = program.explain()
    assert [p["collectives_known"] for p in plan.to_dict()["programs"]] == [False]
    assert any("'learn' @ all could not be parsed completely" in w for w in plan.warnings) and "learn: unknown" in str(plan)


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
    (found,), known, understood = collectives(Module(text))
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
}


@pytest.mark.parametrize("kind", OTHER)
def test_any_other_loop_is_of_unknown_length(kind):
    old, new = OTHER[kind]
    assert SCAN.count(old) == 1
    assert length(SCAN.replace(old, new)) is None


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
    found = operations(Module(TEXT), {"act", "learn", "gradients"})
    assert found["named"] == Operation("add", "gradients", "loop")
    assert found["loop"] == Operation("while", "learn")
    assert found["sum"] == Operation("all-reduce", "learn")
    assert found["outside"] == Operation("negate", "")
    assert Module(TEXT).name == "jit_iterations.2"


def test_what_has_no_name_is_of_what_it_fuses_or_of_its_loop():
    found = operations(Module(TEXT), {"act", "learn", "gradients"})
    assert found["loop_fusion"] == Operation("fusion", "act", "loop")
    assert found["copy.7"] == Operation("copy", "learn", "loop")
    assert found["unknown"] == Operation("copy", None)


def test_names_are_found_as_xla_writes_them():
    text = TEXT.replace("/act/", r"/\303\251 \"a\\b/")
    assert operations(Module(text), {'é "a\\b', "learn"})["inner"].fragment == 'é "a\\b'


def test_a_fragment_is_a_whole_word():
    assert operations(Module(TEXT), {"act", "gradient", "lear"})["named"].fragment == ""
    assert operations(Module(TEXT), ())["named"].fragment == ""
