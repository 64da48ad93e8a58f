"""Operations of a jaxpr, compared with counts by hand and, for programs without loops, with XLA's own analysis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.graph.marker import fragment
from msrl_jax.fragments.placement import Layout, Placement
from msrl_jax.fragments.plan.cost import Collective, collectives, flops, fragment_plans


def count(fn, *shapes, platform="cpu"):
    return flops(jax.make_jaxpr(fn)(*[jnp.zeros(s) if isinstance(s, tuple) else s for s in shapes]).jaxpr, platform)


def everywhere(*roles):
    return Layout(dict.fromkeys(roles, Placement.over("all", jax.devices()[:2])))


def xla(fn, *shapes):
    """XLA counts transcendental functions apart."""
    cost = jax.jit(fn).lower(*[jnp.zeros(s) for s in shapes]).compile().cost_analysis()
    return cost.get("flops", 0) + cost.get("transcendentals", 0)


def mlp(w1, w2, x):
    return jnp.tanh(x @ w1) @ w2


MLP_SHAPES = (4, 64), (64, 2), (32, 4)
MLP = 2 * 32 * 4 * 64 + 32 * 64 + 2 * 32 * 64 * 2


def test_a_platform_counts_its_own_branch():
    def one(x):
        return jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=lambda x: x @ x, default=lambda x: x + x * x)

    assert [count(one, (8, 8), platform=p) for p in ("cpu", "gpu", "tpu")] == [64, 2 * 8**3, 2 * 64]


def test_products_by_hand():
    assert count(jnp.matmul, (3, 4), (4, 5)) == 2 * 3 * 4 * 5
    assert count(jnp.dot, (7,), (7,)) == 2 * 7
    assert count(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (2, 3, 4), (2, 4, 5)) == 2 * 2 * 3 * 4 * 5
    assert count(jax.vmap(jnp.matmul, (None, 0)), (3, 4), (6, 4, 5)) == 6 * 2 * 3 * 4 * 5
    assert count(mlp, *MLP_SHAPES) == MLP


def test_elementwise_and_reductions_by_hand():
    assert count(lambda x: jnp.sin(x) * x + 1.0, (5, 3)) == 3 * 15
    assert count(lambda x: x.sum(0), (5, 3)) == 15
    assert count(lambda x: jnp.cumsum(x), (9,)) == 9
    assert count(lambda x: x.argmax(1), (5, 3)) == 15
    assert count(lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (2, 2), "VALID"), (6, 6)) == 9 * 4


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.T.reshape(-1)[::2],
        lambda x: jnp.where(x > 0, x, 0.0),
        lambda x: x.at[0].set(x[1]),  # a write to a replay buffer costs no arithmetic, however large the buffer
        lambda x: jax.lax.dynamic_update_index_in_dim(x, x[1], 0, 0),
        lambda x: x[jnp.arange(3)] == 2,
        lambda x: jax.random.permutation(jax.random.key(0), x),
        lambda x: (jnp.arange(12) * 3 + 1).sum(),
        lambda x: x.astype(jnp.bfloat16),
    ],
)
def test_moving_data_and_integers_cost_nothing(fn):
    assert count(fn, (6, 2)) == 0


def test_scatter_add_counts_its_updates():
    assert count(lambda x: x.at[jnp.arange(4)].add(1.0), (1000, 3)) == 4 * 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"padding": "VALID"},
        {"window_strides": (2, 2)},
        {"feature_group_count": 2},
        {"batch_group_count": 2},
        {"rhs_dilation": (2, 1)},
        {"padding": ((1, 2), (2, 1)), "lhs_dilation": (2, 2)},
    ],
    ids=str,
)
def test_convolutions_equal_the_count_of_xla(options):
    kernel = 3, 3, 4 // options.get("feature_group_count", 1), 6

    def conv(x, k):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, k, **({"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": numbers} | options)
        )

    assert count(conv, (2, 8, 8, 4), kernel) == xla(conv, (2, 8, 8, 4), kernel)


def test_a_convolution_by_hand():
    def conv(x, k):
        return jax.lax.conv(x, k, (1, 1), "VALID")

    assert count(conv, (2, 3, 8, 8), (5, 3, 3, 3)) == 2 * (2 * 5 * 6 * 6) * (3 * 3 * 3)


def conv_loss(x, k, w):
    h = jax.nn.relu(jax.lax.conv(x, k, (2, 2), "VALID"))
    return jnp.square(h.reshape(h.shape[0], -1) @ w).mean()


@pytest.mark.parametrize(
    ("fn", "shapes", "share"),
    [
        (mlp, MLP_SHAPES, 0.01),
        (jax.value_and_grad(lambda *args: jnp.square(mlp(*args)).mean(), (0, 1)), MLP_SHAPES, 0.1),
        (jax.vmap(mlp, (0, None, None)), ((3, 4, 64), (64, 2), (32, 4)), 0.01),
        (jax.value_and_grad(conv_loss, (1, 2)), ((4, 3, 9, 9), (8, 3, 3, 3), (128, 5)), 0.1),
        (jax.jit(jax.checkpoint(fragment(mlp))), MLP_SHAPES, 0.01),
        (lambda x: jnp.exp(x) * jnp.tanh(x) / (1 + x), ((500,),), 0.01),
    ],
)
def test_loop_free_programs_agree_with_xla(fn, shapes, share):
    # Not exact: XLA simplifies before it counts, and counts n - 1 additions for a sum of n.
    np.testing.assert_allclose(count(fn, *shapes), xla(fn, *shapes), rtol=share)


def test_loops_count_as_often_as_they_run():
    def scan(w, x):
        return jax.lax.scan(lambda x, _: (x @ w, x.sum()), x, length=7)

    def nested(w, x):
        return jax.lax.scan(lambda x, _: (scan(w, x)[0], None), x, length=5)

    once = 2 * 3 * 4 * 4 + 3 * 4
    assert count(scan, (4, 4), (3, 4)) == 7 * once
    assert count(nested, (4, 4), (3, 4)) == 35 * once
    assert count(lambda w, x: jax.lax.fori_loop(0, 6, lambda i, x: x @ w, x), (4, 4), (3, 4)) == 6 * 96
    assert count(lambda w, x: jax.lax.while_loop(lambda x: x[0, 0] < 1, lambda x: x @ w, x), (4, 4), (3, 4)) == 96
    assert count(lambda x: jax.lax.map(jnp.sin, x), (11, 2)) == 22


def test_a_conditional_counts_as_its_most_expensive_branch():
    def fn(w, x):
        branches = [lambda: x, lambda: x @ w, lambda: jnp.sin(x)]
        return jax.lax.switch(jnp.int32(1), branches)

    assert count(fn, (4, 4), (3, 4)) == 2 * 3 * 4 * 4


def test_shard_map_counts_all_of_its_devices():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("env", "model"))

    def sharded(x):
        return jax.shard_map(fragment(name="f")(jnp.sin), mesh=mesh, in_specs=P("env"), out_specs=P("env"))(x)

    def over_env_only(x):
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("env"), out_specs=P("env"), axis_names={"env"})(x)

    assert count(sharded, (8, 3)) == 8 * (2 * 3)  # each row of 4 is computed on 2 devices
    assert count(over_env_only, (8, 3)) == 4 * (2 * 3)
    (cost,) = fragment_plans(jax.make_jaxpr(sharded)(jnp.zeros((8, 3))).jaxpr, everywhere("sin"))
    assert cost.flops * cost.calls == 8 * (2 * 3)


def test_fragments_with_depth_and_calls():
    w = jnp.zeros((4, 4))
    act = fragment(name="act", role="actor")(lambda x: x @ w)
    gradients = fragment(name="gradients")(lambda x: x * 2.0)
    learn = fragment(name="learn", role="learner")(
        lambda x: jax.lax.scan(lambda x, _: (gradients(x) + 1.0, None), x, length=3)[0]
    )

    @jax.jit
    def iteration(x):
        x = jax.lax.scan(lambda x, _: (act(x), None), x, length=5)[0]
        x = jax.lax.cond(x[0, 0] > 0, act, lambda x: x, x)
        return jax.vmap(learn)(x)

    layout = everywhere("actor", "learner", "<lambda>")
    found = fragment_plans(jax.make_jaxpr(iteration)(jnp.zeros((3, 4))).jaxpr, layout)
    assert {(c.placement, c.devices) for c in found} == {("all", 2)}
    assert [(c.name, c.role, c.depth, c.flops, c.calls) for c in found] == [
        ("act", "actor", 0, 96, 5),
        ("act", "actor", 0, 96, 1),
        ("learn", "learner", 0, 3 * 24, 1),
        ("gradients", "<lambda>", 1, 12, 3),
    ]


def test_a_marked_function_costs_what_the_plain_one_does():
    def fn(w1, w2, x):
        return jax.lax.scan(lambda c, _: (c + mlp(w1, w2, x).sum(), None), 0.0, length=4)

    def marked(w1, w2, x):
        step = fragment(lambda c: c + fragment(mlp)(w1, w2, x).sum())
        return jax.lax.scan(lambda c, _: (step(c), None), 0.0, length=4)

    assert count(marked, *MLP_SHAPES) == count(fn, *MLP_SHAPES) == 4 * (MLP + 32 * 2 + 1)


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
    listed, known, understood = collectives(text)
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

    (collective,) = collectives(compiled(on_devices(fn, mesh), mesh)).collectives
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
    assert found(text) == (
        sorted([(ALL_REDUCE, 32, 1), (ALL_REDUCE, 32, 15), (PERMUTE, 4, 15), (GATHER, 8 * 3 * 4, 5)]),
        True,
    )


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
    listed, known, understood = collectives(ASYNCHRONOUS)
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
    listed, known, _ = collectives(text)
    assert known and next((c.nbytes, c.times) for c in listed if c.kind == "all-reduce") == (1, 11)


def test_without_a_trip_count_the_length_is_unknown():
    text = ASYNCHRONOUS.replace('"known_trip_count":{"n":"10"},', "")
    listed, known, _ = collectives(text)
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
}  # fmt: skip


@pytest.mark.parametrize("kind", UNCLEAR)
def test_a_text_that_is_not_understood_is_reported_as_incomplete(kind):
    assert not collectives(UNCLEAR[kind]).understood


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
