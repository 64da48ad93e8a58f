"""Arguments and results of a marked function, its name and role, its effects, and the arguments that it refuses."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from msrl_jax._compat import drop_unused
from msrl_jax.fragments.graph.marker import fragment, fragment_scope
from tests.support.marking import KEY, PARAMS, XS, X, assert_same, equations, fragments_of, loss, mlp, mlp_fragment


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


def test_a_key_may_be_passed_next_to_a_differentiated_argument():
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


def test_a_scope_is_in_the_names_of_the_calls_inside():
    @fragment(role="actor")
    def act(x):
        return inner(x) + 1

    @fragment
    def inner(x):
        return x * 2

    def f(x):
        with fragment_scope("red"):
            y = act(x)
            with fragment_scope("blue"):
                y = act(y)
        return inner(y)

    assert fragments_of(f, 1.0) == ["act/red", "inner/red", "act/blue", "inner/blue", "inner"]


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
        (("relu", X, "adam"), {}, r"argument optimizer is a str, not an array"),
        (("relu", {"a": [X, len]}, X), {}, r"argument batch\['a'\]\[1\] is a builtin_function_or_method"),
        ((), {"kind": "relu", "batch": X, "optimizer": np.array(["a"])}, r"argument optimizer is a ndarray of <U1"),
        (("relu", X, X), {"tag": "x"}, r"argument more\['tag'\] is a str"),
    ],
)
def test_arguments_that_are_no_arrays_are_named(args, kwargs, where):
    marked = fragment(name="learn", static_argnames="kind")(lambda kind, batch, optimizer, **more: batch)
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


def test_eval_shape_runs_nothing():
    ran = []

    @fragment
    def f(x):
        jax.debug.callback(lambda: ran.append(1))
        return {"y": x.sum(0), "k": jax.random.key(0)}

    shapes = jax.eval_shape(f, jax.ShapeDtypeStruct((10**6, 10**6), jnp.bfloat16))
    assert shapes["y"].shape == (10**6,) and shapes["y"].dtype == jnp.bfloat16 and shapes["k"].dtype == KEY.dtype
    assert not ran


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


def test_unread_results_are_dropped():
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


class Dropout(nnx.Module):
    """Counts its calls, as dropout does, and keeps a running mean."""

    def __init__(self):
        self.count, self.mean = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.float32(0))

    def __call__(self, x):
        self.count[...] += 1
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * x.mean()
        return x + self.count[...]


def test_a_module_argument_that_changes_in_place_is_refused():
    with pytest.raises(TypeError, match=r"fragment 'apply' changes its argument module\.count\.value in place.*nnx\.state"):
        jax.jit(fragment(lambda x, module: module(x), name="apply"))(X, Dropout())


def test_a_module_that_is_merged_inside_may_change():
    definition, state = nnx.split(Dropout())

    def apply(x, state):
        module = nnx.merge(definition, state)
        return module(x), nnx.state(module)

    marked = jax.jit(fragment(apply))
    y, once = marked(X, state)
    _, twice = marked(X, once)
    assert twice["count"][...] == 2 and jnp.array_equal(y, X + 1)


@pytest.mark.parametrize("change", [lambda d: d.update(a=d["a"] + 1), lambda d: d.update(c=1.0), lambda d: d.pop("b")])
def test_a_dict_argument_that_changes_in_place_is_refused(change):
    def body(x, *, table):
        change(table)
        return x * table["a"]

    with pytest.raises(TypeError, match=r"changes its argument table\['(a|b|c)'\] in place"):
        jax.jit(fragment(body))(X, table={"a": X, "b": X})


def test_arguments_that_make_their_leaves_on_demand_are_no_change():
    class Halves:
        def __init__(self, x):
            self.x = x

    jax.tree_util.register_pytree_node(Halves, lambda h: ((h.x / 2,), None), lambda _, xs: Halves(xs[0] * 2))
    assert jnp.array_equal(jax.jit(fragment(lambda h: h.x))(Halves(X)), X)
