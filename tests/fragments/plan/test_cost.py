"""Operations of a jaxpr, compared with counts by hand and, for programs without loops, with XLA's own analysis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from msrl_jax.fragments.graph.marker import fragment
from msrl_jax.fragments.placement import Layout, Placement
from msrl_jax.fragments.plan.cost import flops, fragment_plans


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
