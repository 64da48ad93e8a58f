"""A fragment stays one equation under vmap and meshes, and is replaced by its body under differentiation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax.fragments.graph.marker import fragment, is_fragment
from tests.support.marking import PARAMS, XS, X, assert_same, equations, fragments_of, loss, mlp, mlp_fragment
from tests.support.slow import mostly_slow


def test_under_vmap_a_fragment_stays_one_fragment():
    inner = fragment(name="inner")(jnp.sin)
    f = fragment(name="outer")(lambda w, x: inner(x) @ w)
    mapped = jax.vmap(jax.vmap(f, (None, 0)), (0, None))
    closed = jax.make_jaxpr(mapped)(jnp.ones((5, 3, 2)), XS)
    (eqn,) = closed.jaxpr.eqns
    assert is_fragment(eqn) and eqn.outvars[0].aval.shape == (5, 8, 2)
    assert fragments_of(mapped, jnp.ones((5, 3, 2)), XS) == ["outer", "inner"]
    in_scan = jax.vmap(lambda x: jax.lax.scan(lambda c, _: (f(jnp.eye(3), c), None), x, length=4))
    assert fragments_of(in_scan, XS) == ["outer", "inner"]


def test_results_that_do_not_depend_on_the_mapped_axis_are_not_mapped():
    @fragment
    def f(w, x):
        return w @ w, x * 2, w, 3.0

    mapped = jax.vmap(f, (None, 0), (None, 0, None, None))
    assert_same(jax.jit(mapped)(jnp.ones((2, 2)), X), (2 * jnp.ones((2, 2)), 2 * X, jnp.ones((2, 2)), f(X, X)[3]))
    (eqn,) = jax.make_jaxpr(mapped)(jnp.ones((2, 2)), X).jaxpr.eqns
    assert [v.aval.shape for v in eqn.outvars] == [(2, 2), (3,), (2, 2), ()]
    untouched = jax.vmap(lambda x: (f(jnp.eye(2), jnp.eye(2))[0], x), out_axes=(None, 0))
    assert untouched(X)[0].shape == (2, 2)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.grad(loss(f)),
        lambda f: jax.value_and_grad(lambda p, x: (loss(f)(p, x), 1.0), has_aux=True),
        lambda f: jax.jacfwd(f),
        lambda f: lambda p, x: jax.vjp(f, p, x)[0],
        lambda f: jax.vmap(jax.grad(loss(f)), (None, None), axis_size=2),
        lambda f: jax.grad(jax.checkpoint(loss(f))),
    ],
)
def test_under_differentiation_a_fragment_is_replaced_by_its_body(transform):
    assert fragments_of(mlp_fragment, PARAMS, X) == ["mlp"]
    assert fragments_of(transform(mlp_fragment), PARAMS, X) == []


def test_a_fragment_around_a_gradient_stays():
    learn = fragment(name="learn")(jax.grad(loss(mlp_fragment)))
    assert fragments_of(learn, PARAMS, X) == ["learn"]


def test_a_fragment_without_tangents_stays_under_differentiation():
    env = fragment(name="env")(lambda x: 2 * x)
    assert fragments_of(jax.grad(lambda p, x: loss(mlp)(p, env(x))), PARAMS, X) == ["env"]


@pytest.mark.parametrize("through", ["argument", "result"])
def test_values_without_tangents_add_none(through):
    # sqrt has an infinite derivative at 0. A tangent of zeros for x, in place of none, would give 0 * inf = nan.
    if through == "argument":
        f = fragment(lambda p, x: p * jnp.sqrt(x))
    else:
        pair = fragment(lambda p, x: (p, x))

        def f(p, x):
            p, x = pair(p, x)
            return p * jnp.sqrt(x)

    y, dy = jax.jvp(lambda p: f(p, 0.0), (2.0,), (1.0,))
    assert y == 0 and dy == 0
    assert jax.jit(jax.hessian(f))(2.0, 0.0) == 0
    assert jax.jit(jax.jacfwd(jax.jacrev(f)))(2.0, 0.0) == 0


def test_checkpoint_policies_see_names_inside_a_fragment():
    def body(w, x):
        h = checkpoint_name(jnp.sin(w * x), "h")
        return jnp.sin(h)

    def sines(f):
        remat = jax.checkpoint(f, policy=jax.checkpoint_policies.save_only_these_names("h"))
        jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: remat(w, x).sum()))(X, X).jaxpr
        return sorted(e.primitive.name for e in equations(jaxpr) if e.primitive.name in ("sin", "cos"))

    assert sines(fragment(body)) == sines(body) == ["cos", "cos", "sin", "sin"]  # h is saved: sin(w x) is not redone


def test_linear_transpose():
    def body(w, x, y, n):
        return (x @ w) * 2.0 + y[0], y[1] * n, x

    marked = fragment(body)
    w, n = PARAMS["w"], jnp.arange(4)
    x, y = jnp.zeros((5, 3)), (jnp.zeros(2), jnp.zeros(4))
    ct = (jnp.arange(10.0).reshape(5, 2), jnp.arange(4.0), jnp.ones((5, 3)))
    plain = jax.linear_transpose(lambda x, y: body(w, x, y, n), x, y)(ct)
    assert_same(jax.linear_transpose(lambda x, y: marked(w, x, y, n), x, y)(ct), plain)
    assert_same(jax.jit(jax.linear_transpose(lambda x, y: marked(w, x, y, n), x, y))(ct), plain)
    (twice,) = jax.linear_transpose(jax.linear_transpose(lambda x: marked(w, x, y, n)[0], x), ct[0])((x + 1,))
    assert_same(twice, (x + 1) @ w * 2.0)
    unused = jax.linear_transpose(lambda x: fragment(lambda x: (x[0], 2.0 * x[1]))((x, x))[0], X)  # a zero cotangent
    assert_same(unused(X), (X,))


def test_collectives_over_a_vmapped_axis():
    def body(w, x):
        everything = jax.lax.all_gather(x, "env")
        shifted = jax.lax.ppermute(x, "env", [(i, (i + 1) % 8) for i in range(8)])
        return jax.lax.psum(x @ w, "env"), everything[0] + shifted, jax.lax.axis_index("env"), jax.lax.pmean(w, "env")

    def collective(f):
        return jax.vmap(f, (None, 0), (None, 0, 0, None), axis_name="env")

    def normalized(f):
        def of_one(w, x):
            y = f(w, x)[1]
            return y - jax.lax.pmean(y, "env")

        return lambda w, x: jax.vmap(of_one, (None, 0), axis_name="env")(w, x)

    def nested(f):  # over an inner axis that the fragment does not name
        return lambda w, x: jax.vmap(jax.vmap(f, (0, None)), (None, 0), axis_name="env")(jnp.stack([w, 2 * w]), x)

    marked, w = fragment(body), PARAMS["w"]
    for t in (collective, normalized, nested, lambda f: jax.grad(loss(normalized(f)), (0, 1))):
        assert_same(jax.jit(t(marked))(w, XS), jax.jit(t(body))(w, XS))
    assert fragments_of(nested(marked), w, XS) == ["body"]


def test_vmap_over_a_mesh_axis():
    mesh = Mesh(np.array(jax.devices()[:8]), ("d",))

    def body(x):
        return jax.lax.with_sharding_constraint(2 * x, NamedSharding(mesh, P(None)))

    mapped = jax.vmap(fragment(body), spmd_axis_name="d")
    (spec,) = [e.params["sharding"].spec for e in equations(jax.make_jaxpr(mapped)(XS).jaxpr) if "sharding" in e.params]
    assert spec[0] == "d"
    y = jax.jit(mapped)(jax.device_put(XS, NamedSharding(mesh, P("d"))))
    assert y.sharding.spec[0] == "d"
    np.testing.assert_array_equal(y, 2 * XS)


def test_custom_batching_rules_with_constants():
    @jax.custom_batching.custom_vmap
    def f(x):
        return 2 * x

    @f.def_vmap
    def _(axis_size, in_batched, x):
        return 2 * x + jnp.asarray(np.arange(axis_size, dtype=np.float32)), True

    np.testing.assert_array_equal(jax.vmap(fragment(lambda x: f(x)))(X), 2 * X + np.arange(3))


@pytest.mark.parametrize("check_vma", mostly_slow([True, False], "True"))
def test_inside_shard_map(check_vma):
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("env", "model"))

    def body(params, x, bias):
        h = jnp.tanh(x @ params["w"] + params["b"] + bias)
        return jax.lax.pmean(h.sum(0), "env"), h, params

    def sharded(f):
        def per_device(params, x):
            bias = jax.lax.axis_index("env") * 0.1
            mean, h, params = f(params, x, bias)
            return mean, jax.lax.scan(lambda c, v: (c + f(params, x, bias)[0], v), mean, h)[1], params

        out_specs = P(), P("env"), P()
        return jax.shard_map(per_device, mesh=mesh, in_specs=(P(), P("env")), out_specs=out_specs, check_vma=check_vma)

    marked, plain = sharded(fragment(body)), sharded(body)
    assert_same(jax.jit(marked)(PARAMS, XS), jax.jit(plain)(PARAMS, XS))
    assert_same(marked(PARAMS, XS), jax.jit(plain)(PARAMS, XS))
    grads = jax.jit(jax.value_and_grad(loss(marked), (0, 1)))(PARAMS, XS)
    assert_same(grads, jax.jit(jax.value_and_grad(loss(plain), (0, 1)))(PARAMS, XS))
    assert fragments_of(marked, PARAMS, XS) == ["body", "body"]


def test_around_shard_map_and_gradients_within_it():
    mesh = Mesh(np.array(jax.devices()[:8]), ("env",))

    def train(mark):
        @mark
        def gradients(params, x):
            grads = jax.grad(lambda p: mark(mlp)(p, x).sum())(params)
            return jax.tree.map(lambda g: g if g.ndim == 1 else jax.lax.pmean(g, "env"), grads)

        @mark
        def learn(params, xs):
            out_specs = {"w": P(), "b": P()}
            grads = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P("env")), out_specs=out_specs)(params, xs)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        return learn

    marked, plain = train(fragment), train(lambda f: f)
    assert_same(jax.jit(marked)(PARAMS, XS), jax.jit(plain)(PARAMS, XS))
    assert fragments_of(marked, PARAMS, XS) == ["learn", "gradients"]


def test_shardings_pass_through():
    mesh = Mesh(np.array(jax.devices()[:8]), ("env",))
    x = jax.device_put(XS, NamedSharding(mesh, P("env")))
    y = jax.jit(fragment(lambda x: jnp.sin(x) * 2))(x)
    assert y.sharding.is_equivalent_to(x.sharding, 2)


@pytest.mark.parametrize("size", mostly_slow(["8", "b"], "b"))
def test_export_round_trip(size):
    def body(params, x):
        return jax.lax.scan(lambda c, v: (c + fragment(mlp)(params, v), v.sum()), jnp.zeros(2), x)

    batch = jax.export.symbolic_shape(f"{size}, 3")
    args = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), PARAMS), jax.ShapeDtypeStruct(batch, jnp.float32)
    exported = jax.export.export(jax.jit(fragment(body)))(*args)
    assert_same(exported.call(PARAMS, XS), jax.jit(body)(PARAMS, XS))
    pytest.importorskip("flatbuffers", reason="jax.export serializes with flatbuffers")
    restored = jax.export.deserialize(exported.serialize())
    assert_same(restored.call(PARAMS, XS), jax.jit(body)(PARAMS, XS))
