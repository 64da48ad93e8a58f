"""A marked function computes what the plain one does, under every transformation of JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.fragments.graph.marker import fragment
from tests.support.marking import KEY, PARAMS, XS, X, assert_same, loss, mlp
from tests.support.slow import mostly_slow

# Bodies: (params, x [3]) -> pytree of floats.


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


BODIES = [
    mlp,
    returns_inputs,
    with_scan,
    with_cond,
    with_loop,
    with_custom_jvp,
    with_custom_vjp,
    with_stop_gradient,
    with_random,
    with_jit_and_remat,
    with_nested,
    with_numpy_constant,
    with_weak_types,
]
EVERYWHERE = (mlp, with_cond)  # the others: only the usual transformations


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


def linearized(f):
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
    "fori_loop": lambda f: lambda p, x: jax.lax.fori_loop(0, 3, lambda i, x: jnp.cos(x * i) + loss(f)(p, x), x),
    "checkpoint": jax.checkpoint,
    "jvp": pushed_forward,
    "linearize": linearized,
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
    "nested vmap": lambda f: (
        lambda p, xs: jax.vmap(jax.vmap(f, (None, 0)), (0, None))(jax.tree.map(lambda v: jnp.stack([v, 2 * v, -v]), p), xs)
    ),
    "other axes": lambda f: (
        lambda p, xs: jax.vmap(f, ({"w": 1, "b": None}, 1), -1)({"w": jnp.stack([p["w"]] * 8, 1), "b": p["b"]}, xs.T)
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


OUTSIDE = [
    "eager",
    "checkpoint",
    "jvp",
    "linearize",
    "vjp",
    "grad",
    "grad of jit of checkpoint",
    "vmap",
    "grad of vmap",
    "scan",
]


@pytest.mark.parametrize("transform", mostly_slow(OUTSIDE, "eager", "grad", "vmap", "scan"))
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
