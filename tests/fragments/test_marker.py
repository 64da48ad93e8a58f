"""A marked function computes what the plain one does, under every transformation of JAX."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax._compat import drop_unused, sub_jaxprs
from msrl_jax.fragments.marker import fragment, is_fragment

KEY = jax.random.key(0)
PARAMS = {"w": jnp.array([[0.3, -1.2], [0.7, 0.1], [-0.4, 0.9]]), "b": jnp.array([0.2, -0.5])}
X = jnp.array([0.5, -1.0, 2.0])
XS = jnp.linspace(-2.0, 2.0, 24).reshape(8, 3)


def assert_same(marked, plain, exact=False):
    """Equal structure, shapes, dtypes, weak types and values: to the bit, or but for what XLA fuses in eager mode."""
    assert jax.tree.structure(marked) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(marked), jax.tree.leaves(plain), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and jax.typeof(a).weak_type == jax.typeof(b).weak_type
        if jnp.issubdtype(jax.typeof(a).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, complex), np.asarray(b, complex)
        np.testing.assert_allclose(a, b, rtol=0 if exact else 2e-6, atol=0 if exact else 2e-6)


def equations(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in sub_jaxprs(eqn):
            yield from equations(sub)


def fragments_of(fn, *args):
    return [e.params["name"] for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if is_fragment(e)]


# Bodies: (params, x [3]) -> pytree of floats.


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


def returns_inputs(params, x):
    return params, x, 2.0 * x


def with_scan(params, x):
    def step(h, t):
        return jnp.sin(h @ params["w"].T @ params["w"]) + params["b"], h.sum() * t

    return jax.lax.scan(step, x @ params["w"], jnp.arange(3.0), reverse=True)


def with_cond(params, x):
    return jax.lax.cond(x.sum() > 1.0, lambda: jnp.exp(x) @ params["w"], lambda: params["b"] * x[0])


def with_loop(params, x):
    return jax.lax.fori_loop(0, 3, lambda i, h: jnp.sin(h) * params["b"] + i, x @ params["w"])


@jax.custom_jvp
def clipped(x):
    return jnp.clip(x, -1, 1)


@clipped.defjvp
def _(primals, tangents):
    return clipped(*primals), 7.0 * tangents[0]  # not the derivative: shows that this rule was used


@jax.custom_vjp
def reversed_gradient(x):
    return 2.0 * x


reversed_gradient.defvjp(lambda x: (2.0 * x, None), lambda _, g: (-g,))


def with_custom_jvp(params, x):
    return clipped(x @ params["w"]) * params["b"]


def with_custom_vjp(params, x):
    return reversed_gradient(mlp(params, x))


def with_stop_gradient(params, x):
    h = mlp(params, x)
    return h * jax.lax.stop_gradient(h) + params["b"], jax.lax.stop_gradient(x)


def with_random(params, x):
    keep = jax.random.bernoulli(jax.random.fold_in(KEY, 3), 0.5, x.shape)
    return jnp.where(keep, x, 0.0) @ params["w"]


def with_jit_and_remat(params, x):
    return jax.jit(jax.checkpoint(mlp))(params, x), jax.nn.softmax(x)


def with_nested(params, x):
    inner = fragment(role="inner")(mlp)
    return fragment(name="sum")(lambda p: inner(p, x) + inner(p, 2 * x))(params)


def with_numpy_constant(params, x):
    return (np.arange(6, dtype=np.float32).reshape(2, 3) @ x) * params["b"]


def with_weak_types(params, x):
    return jnp.where(x[0] > 0, 1.0, 2.0), jnp.sum(params["b"])


mlp_fragment = fragment(mlp)

BODIES = [
    mlp, returns_inputs, with_scan, with_cond, with_loop, with_custom_jvp, with_custom_vjp, with_stop_gradient,
    with_random, with_jit_and_remat, with_nested, with_numpy_constant, with_weak_types,
]  # fmt: skip
EVERYWHERE = (mlp, returns_inputs, with_cond, with_stop_gradient)  # the others: only the usual transformations


def loss(f):
    return lambda *args: sum((y * y).sum() for y in jax.tree.leaves(f(*args)))


# Transformations of a body, applied to the same arguments.


def scanned(f):
    def fn(params, xs):
        def step(total, x):
            y = f(params, x)
            return total + sum(v.sum() for v in jax.tree.leaves(y)), y

        return jax.lax.scan(step, 0.0, xs)

    return fn


def while_looped(f):
    def fn(params, x):
        def body(carry):
            i, x = carry
            return i + 1, jnp.sin(x + sum(v.sum() for v in jax.tree.leaves(f(params, x))))

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))

    return fn


def branched(f):
    def fn(params, x):
        late = jax.lax.switch(x[0].astype(int) + 1, [f, lambda p, x: f(p, -x), lambda p, x: f(p, x * x)], params, x)
        return late, jax.lax.cond(x[1] > 0, f, lambda p, x: f(p, 3.0 * x), params, x)

    return fn


def aux(f):
    return lambda *args: (loss(f)(*args), f(*args))


def linearised(f):
    def fn(params, x):
        y, f_jvp = jax.linearize(f, params, x)
        return y, f_jvp(jax.tree.map(jnp.cos, params), jnp.sin(x))

    return fn


def pulled_back(f):
    def fn(params, x):
        y, f_vjp = jax.vjp(f, params, x)
        return y, f_vjp(jax.tree.map(jnp.cos, y))

    return fn


def pushed_forward(f):
    return lambda params, x: jax.jvp(f, (params, x), (jax.tree.map(jnp.cos, params), jnp.sin(x)))


def policies(f):
    save = jax.checkpoint_policies
    for policy in (save.dots_saveable, save.nothing_saveable, save.everything_saveable):
        yield jax.jit(jax.grad(jax.checkpoint(loss(f), policy=policy), argnums=(0, 1)))


SINGLE = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "branches": branched,
    "while_loop": while_looped,
    "fori_loop": lambda f: lambda p, x: jax.lax.fori_loop(
        0, 3, lambda i, x: jnp.cos(x * i) + loss(f)(p, x), x
    ),
    "checkpoint": jax.checkpoint,
    "jvp": pushed_forward,
    "linearize": linearised,
    "hessian": lambda f: jax.hessian(loss(f), argnums=1),
    "grad": lambda f: jax.grad(loss(f), argnums=(0, 1)),
    "value_and_grad with aux": lambda f: jax.jit(jax.value_and_grad(aux(f), has_aux=True)),
    "vjp": pulled_back,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(loss(f)), argnums=(0, 1)),
    "grad of jit of checkpoint": lambda f: jax.grad(jax.jit(jax.checkpoint(loss(f))), argnums=(0, 1)),
    "grad of branches": lambda f: jax.grad(loss(branched(f)), argnums=(0, 1)),
    "checkpoint policies": lambda f: lambda *args: [g(*args) for g in policies(f)],
}
BATCHED = {
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "jit of vmap": lambda f: jax.jit(jax.vmap(f, in_axes=(None, 0))),
    "nested vmap": lambda f: lambda p, xs: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(
        jax.tree.map(lambda v: jnp.stack([v, 2 * v, -v]), p), xs
    ),
    "other axes": lambda f: lambda p, xs: jax.vmap(f, ({"w": 1, "b": None}, 1), -1)(
        {"w": jnp.stack([p["w"]] * 8, 1), "b": p["b"]}, xs.T
    ),
    "scan": scanned,
    "jit of scan": lambda f: jax.jit(scanned(f)),
    "grad of vmap": lambda f: jax.grad(loss(jax.vmap(f, (None, 0))), argnums=(0, 1)),
    "vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(loss(f), argnums=(0, 1)), (None, 0))),
    "grad of scan": lambda f: jax.jit(jax.grad(lambda *args: scanned(f)(*args)[0], argnums=(0, 1))),
    "grad of scan of checkpoint": lambda f: jax.jit(jax.grad(lambda *args: scanned(jax.checkpoint(f))(*args)[0])),
    "vmap of while_loop": lambda f: jax.vmap(while_looped(f), (None, 0)),
    "vmap of branches": lambda f: jax.vmap(branched(f), (None, 0)),
    "lax.map in batches": lambda f: lambda p, xs: jax.lax.map(partial(f, p), xs, batch_size=3),
}


USUAL = ("jit", "value_and_grad with aux", "jit of vmap", "vmap of grad", "grad of scan", "grad of jit of checkpoint")


@pytest.mark.parametrize("body", BODIES, ids=lambda f: f.__name__)
def test_same_values_under_every_transformation(body):
    marked = fragment(body)
    single = {name: t for name, t in SINGLE.items() if name in USUAL or body in EVERYWHERE}
    batched = {name: t for name, t in BATCHED.items() if name in USUAL or body in EVERYWHERE}

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # one program, as compiling takes all the time
    def both(params, x, xs):
        results = {name: (t(marked)(params, x), t(body)(params, x)) for name, t in single.items()}
        return results | {name: (t(marked)(params, xs), t(body)(params, xs)) for name, t in batched.items()}

    for name, (ours, plain) in both(PARAMS, X, XS).items():
        try:
            assert_same(ours, plain)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize(
    "transform",
    ["eager", "checkpoint", "jvp", "linearize", "vjp", "grad", "grad of jit of checkpoint", "vmap", "grad of vmap", "scan"],
)
def test_same_values_outside_jit(transform):
    def body(params, x):
        return jnp.where(x.sum() > 1, 1.0, 2.0), {"w": params["w"]}, jnp.dot(x, params["w"])

    marked = fragment(body)
    t, x = (SINGLE[transform], X) if transform in SINGLE else (BATCHED[transform], XS)
    assert_same(t(marked)(PARAMS, x), t(body)(PARAMS, x))


@pytest.mark.parametrize(
    "args", [(2, 3.0), (True, 2), (2, jnp.bfloat16(1.5)), (1.5, jnp.arange(3)), (2j, 1.0), (np.int8(3), 2)]
)
def test_python_scalars_keep_their_weak_types(args):
    def body(x, y):
        return x, x * y, x + jnp.ones(3, jnp.bfloat16), jnp.where(x == 2, y, x)

    marked = fragment(body)
    assert_same(jax.jit(marked)(*args), jax.jit(body)(*args))
    assert_same(marked(*args), jax.jit(body)(*args))
    assert_same(jax.vmap(marked, (None, None), axis_size=2)(*args), jax.vmap(body, (None, None), axis_size=2)(*args))


def test_64_bit_values_keep_their_width():
    with jax.enable_x64(True):
        x = jnp.arange(3.0)
        ours = fragment(lambda x: (x / 3, x.astype(int)))(x)
        assert x.dtype == ours[0].dtype == jnp.float64 and ours[1].dtype == jnp.int64
        np.testing.assert_array_equal(ours[0], np.arange(3.0) / 3)


def test_bfloat16_keeps_its_width():
    x = jnp.linspace(-2, 2, 6, dtype=jnp.bfloat16).reshape(2, 3)
    w = jnp.ones((3, 2), jnp.bfloat16) / 3
    body = jax.value_and_grad(lambda w, x: jnp.tanh(x @ w).astype(jnp.float32).sum())
    assert_same(jax.jit(fragment(body))(w, x), jax.jit(body)(w, x))


class Batch(NamedTuple):
    obs: jax.Array
    extra: dict


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Learner:
    params: dict
    step: jax.Array
    hidden: jax.Array | None = None
    rate: float = dataclasses.field(default=0.5, metadata={"static": True})


def test_containers_none_and_zero_size_arrays_pass_in_and_out():
    def body(learner, batch, *, scale=2.0, masks=None):
        params = jax.tree.map(lambda v: v * scale * learner.rate, learner.params)
        learner = dataclasses.replace(learner, params=params, step=learner.step + 1)
        return learner, batch._replace(obs=batch.obs[:, :0]), masks, None, (), [{}]

    learner = Learner(PARAMS, jnp.int32(3))
    batch = Batch(jnp.ones((2, 3)), {"empty": jnp.zeros((0, 4)), "none": None})
    marked = fragment(role="learner")(body)
    for kwargs in ({}, {"masks": {"a": None, "b": jnp.zeros((), bool)}, "scale": jnp.float32(3)}):
        assert_same(jax.jit(marked)(learner, batch, **kwargs), jax.jit(body)(learner, batch, **kwargs))
        assert_same(jax.jit(marked)(batch=batch, learner=learner, **kwargs), jax.jit(body)(learner, batch, **kwargs))


def test_typed_keys_pass_in_and_out():
    def body(keys):
        return jax.random.split(keys[0], 3), keys, jax.random.fold_in(keys[1], 7), jax.random.key(3, impl="rbg")

    marked = fragment(body)
    keys = jax.random.split(KEY, 2)
    assert_same(marked(keys), body(keys))
    assert_same(jax.jit(marked)(keys), body(keys))
    batch = jax.random.split(KEY, (4, 2))
    assert_same(jax.jit(jax.vmap(marked, out_axes=(0, 0, 0, None)))(batch), jax.vmap(body, out_axes=(0, 0, 0, None))(batch))


def test_a_key_may_stand_beside_what_is_differentiated():
    def body(x, key, n):
        return x * jax.random.normal(key, x.shape), key, n + 1

    for f in (body, fragment(body)):
        grads = jax.jit(jax.grad(lambda x, f=f: f(x, KEY, jnp.arange(2))[0].sum()))(X)
        np.testing.assert_allclose(grads, jax.random.normal(KEY, X.shape), rtol=1e-6)
    _, f_jvp = jax.linearize(lambda x: fragment(body)(x, KEY, jnp.arange(2)), X)
    assert f_jvp(X)[2].dtype == jax.dtypes.float0


def test_closures_over_arrays_and_over_tracers():
    scale = jnp.array([1.0, 2.0, 3.0])

    def outer(mark):
        def fn(a, b):
            c = jnp.sin(a)
            inner = mark(lambda x: x * a * scale + c.sum() + b["k"])
            return jax.vmap(lambda x: mark(lambda y: inner(x) * inner(y) * x)(2.0 * x))(jnp.arange(2.0)[:, None] + a)

        return fn

    args = X, {"k": jnp.array(0.5)}
    marked, plain = outer(fragment), outer(lambda f: f)
    assert_same(marked(*args), plain(*args))
    for t in (jax.jit, lambda f: jax.jit(jax.grad(loss(f), (0, 1))), lambda f: jax.jit(jax.jacfwd(jax.jacrev(f)))):
        assert_same(t(marked)(*args), t(plain)(*args))
    batched = X * jnp.arange(1.0, 5.0)[:, None], {"k": jnp.arange(4.0)}
    assert_same(jax.jit(jax.vmap(marked))(*batched), jax.jit(jax.vmap(plain))(*batched))


@pytest.mark.parametrize("mark", [fragment, fragment(), fragment(role="env", name="f", static_argnames="double")])
def test_decorator_forms_keep_the_function(mark):
    def body(x, double=True):
        "Doubles, perhaps."
        return 2 * x if double is True else x

    marked = mark(body)
    assert (marked.__name__, marked.__doc__) == ("body", "Doubles, perhaps.")
    assert_same(marked(X), body(X))


def test_role_and_name_are_on_the_equation():
    def step(x):
        return x + 1

    def marks(f):
        (eqn,) = jax.make_jaxpr(f)(X).jaxpr.eqns
        return eqn.params["name"], eqn.params["role"]

    assert marks(fragment(step)) == ("step", "step")
    assert marks(fragment(role="env")(step)) == ("step", "env")
    assert marks(fragment(name="physics")(step)) == ("physics", "step")
    assert marks(fragment(partial(jnp.add, 1))) == ("partial", "partial")


def test_static_arguments_by_position_keyword_and_default():
    def body(static1, x, mode="a", *rest, flag=False, **more):
        assert isinstance(static1, str) and isinstance(flag, bool)
        y = x * {"a": 1.0, "b": 10.0}[mode] + sum(rest, 0.0) + more.get("z", 0.0)
        return -y if flag and more.get("really", True) else y

    marked = fragment(static_argnames=("static1", "mode", "flag", "really"))(body)
    for args, kwargs in [
        (("s", X), {}),
        (("s", X, "b"), {"flag": True}),
        (("s",), {"x": X, "mode": "b"}),
        ((), {"mode": "b", "x": X, "static1": "s", "flag": True}),
        (("s", X, "b", X, 2 * X), {"z": X, "really": False, "flag": True}),
    ]:
        assert_same(marked(*args, **kwargs), body(*args, **kwargs))
        assert_same(jax.jit(lambda x, a=args, k=kwargs: marked(*a, **k))(X), body(*args, **kwargs))


def test_methods_may_be_fragments():
    class Env:
        gravity = 9.8

        @fragment(role="env", static_argnames="self")
        def step(self, velocity, dt=0.1):
            return velocity - self.gravity * dt

    np.testing.assert_allclose(jax.jit(Env().step)(jnp.ones(2), dt=1.0), -8.8, rtol=1e-6)


def test_unknown_static_names_are_refused():
    with pytest.raises(TypeError, match=r"fragment 'act' has no argument 'mod', named in static_argnames.*\['x', 'mode'\]"):
        fragment(name="act", static_argnames="mod")(lambda x, mode: x)


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        (("relu", X, "adam"), {}, r"argument optimiser is a str, not an array"),
        (("relu", {"a": [X, len]}, X), {}, r"argument batch\['a'\]\[1\] is a builtin_function_or_method"),
        ((), {"kind": "relu", "batch": X, "optimiser": np.array(["a"])}, r"argument optimiser is a ndarray of <U1"),
        (("relu", X, X), {"tag": "x"}, r"argument more\['tag'\] is a str"),
    ],
)
def test_arguments_that_are_no_arrays_are_named(args, kwargs, where):
    marked = fragment(name="learn", static_argnames="kind")(lambda kind, batch, optimiser, **more: batch)
    with pytest.raises(TypeError, match=rf"fragment 'learn': {where}.*static_argnames"):
        marked(*args, **kwargs)


def test_mutable_references_are_refused():
    ref = jax.new_ref(jnp.zeros(3))

    @fragment
    def closes_over_it(x):
        ref[...] += x

    with pytest.raises(TypeError, match=r"fragment 'add': argument r is a mutable reference; pass its value"):
        fragment(name="add")(lambda x, r: x + r[...])(X, ref)
    with pytest.raises(TypeError, match=r"fragment 'closes_over_it' closes over a mutable reference"):
        closes_over_it(X)
    with pytest.raises(TypeError, match=r"fragment 'make' makes a mutable reference"):
        fragment(name="make")(jax.jit(lambda x: jax.new_ref(x)[...]))(X)


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
def test_under_differentiation_a_fragment_dissolves(transform):
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

    def normalised(f):
        def of_one(w, x):
            y = f(w, x)[1]
            return y - jax.lax.pmean(y, "env")

        return lambda w, x: jax.vmap(of_one, (None, 0), axis_name="env")(w, x)

    def nested(f):  # over an inner axis that the fragment does not name
        return lambda w, x: jax.vmap(jax.vmap(f, (0, None)), (None, 0), axis_name="env")(jnp.stack([w, 2 * w]), x)

    marked, w = fragment(body), PARAMS["w"]
    for t in (collective, normalised, nested, lambda f: jax.grad(loss(normalised(f)), (0, 1))):
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


@pytest.mark.parametrize("check_vma", [True, False])
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
        return jax.shard_map(
            per_device, mesh=mesh, in_specs=(P(), P("env")), out_specs=out_specs, check_vma=check_vma
        )

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


def test_eval_shape_runs_nothing():
    ran = []

    @fragment
    def f(x):
        jax.debug.callback(lambda: ran.append(1))
        return {"y": x.sum(0), "k": jax.random.key(0)}

    shapes = jax.eval_shape(f, jax.ShapeDtypeStruct((10**6, 10**6), jnp.bfloat16))
    assert shapes["y"].shape == (10**6,) and shapes["y"].dtype == jnp.bfloat16 and shapes["k"].dtype == KEY.dtype
    assert not ran


@pytest.mark.parametrize("size", ["8", "b"])
def test_export_round_trip(size):
    def body(params, x):
        return jax.lax.scan(lambda c, v: (c + fragment(mlp)(params, v), v.sum()), jnp.zeros(2), x)

    batch = jax.export.symbolic_shape(f"{size}, 3")
    args = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), PARAMS), jax.ShapeDtypeStruct(batch, jnp.float32)
    exported = jax.export.export(jax.jit(fragment(body)))(*args)
    assert_same(exported.call(PARAMS, XS), jax.jit(body)(PARAMS, XS))
    pytest.importorskip("flatbuffers", reason="jax.export serialises with flatbuffers")
    restored = jax.export.deserialize(exported.serialize())
    assert_same(restored.call(PARAMS, XS), jax.jit(body)(PARAMS, XS))


def test_disable_jit_shows_concrete_values():
    seen = []

    @fragment(static_argnames="double")
    def f(x, double):
        seen.append(float(x.sum()))  # fails on a tracer
        return 2 * x if double else x

    with jax.disable_jit():
        assert_same(f(X, double=True), 2 * X)
        jax.lax.fori_loop(0, 2, lambda _, x: f(x, True), X)
    assert seen == [1.5, 1.5, 3.0]


def test_no_tracer_leaks():
    def run():
        f = fragment(lambda w, x: (mlp_fragment(PARAMS, x), w))
        jax.jit(jax.vmap(f, (None, 0), (0, None)))(X, XS)
        jax.jit(jax.grad(lambda x: loss(f)(x, X)))(X)
        jax.vmap(jax.grad(lambda x: loss(f)(x, x)))(XS)

    with jax.checking_leaks():
        run()


def test_effects_happen_once_and_in_order():
    seen = []

    @fragment
    def f(x):
        jax.debug.callback(lambda v: seen.append(int(v)), x, ordered=True)
        return x + 1

    @jax.jit
    def loop(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: f(x), x)

    jaxpr = drop_unused(jax.make_jaxpr(lambda x: (f(x), x)[1])(0).jaxpr)
    assert len(jaxpr.eqns) == 1  # nothing needs its result, but its effect stays
    assert loop(0) == 3
    jax.effects_barrier()
    assert seen == [0, 1, 2]
    seen.clear()
    f(7)
    jax.effects_barrier()
    assert seen == [7]


def test_effects_under_vmap_and_grad():
    seen = []

    @fragment
    def f(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x)
        return x * x

    jax.block_until_ready(jax.jit(jax.vmap(f))(X))
    jax.effects_barrier()
    assert sorted(seen) == sorted(X.tolist())
    seen.clear()
    assert jax.jit(jax.grad(f))(3.0) == 6
    jax.effects_barrier()
    assert seen == [3.0]


def test_what_nobody_reads_is_dropped():
    unused = fragment(name="unused")(jnp.sin)
    pair = fragment(name="pair")(lambda x, y: (jnp.sin(x), fragment(name="inner")(jnp.cos)(y)))

    def f(x, y):
        unused(x)
        return pair(x, y)[0]

    jaxpr = drop_unused(jax.make_jaxpr(f)(X, X).jaxpr)
    (eqn,) = jaxpr.eqns
    assert eqn.params["name"] == "pair" and len(eqn.invars) == len(eqn.outvars) == 1
    assert [e.primitive.name for e in equations(eqn.params["call_jaxpr"].jaxpr)] == ["sin"]
    assert len(jaxpr.invars) == 2


def test_callables_other_than_functions():
    class Scale:
        def __call__(self, x):
            return 3 * x

    for f in (Scale(), partial(jnp.multiply, 3.0), jax.jit(lambda x: 3 * x), jax.vmap(lambda x: 3 * x)):
        np.testing.assert_array_equal(fragment(f)(X), 3 * X)
        np.testing.assert_array_equal(jax.jit(fragment(f))(X), 3 * X)


def test_errors_inside_a_fragment_are_the_functions_own():
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        mlp_fragment(PARAMS)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'z'"):
        mlp_fragment(PARAMS, X, z=X)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        fragment(lambda x: x if x.sum() > 0 else -x)(X)


def test_jaxprs_with_fragments_pass_the_checks_of_jax():
    def f(params, xs):
        grads = jax.grad(lambda p: loss(jax.vmap(mlp_fragment, (None, 0)))(p, xs))(params)
        return jax.lax.scan(lambda c, x: (c + 1, mlp_fragment(grads, x) + c), 0, xs)[1]

    with jax.enable_checks(True):
        ours = jax.jit(f)(PARAMS, XS)
    grads = jax.grad(lambda p: loss(jax.vmap(mlp, (None, 0)))(p, XS))(PARAMS)
    np.testing.assert_allclose(ours, mlp(grads, XS) + jnp.arange(8.0)[:, None], rtol=1e-5)
