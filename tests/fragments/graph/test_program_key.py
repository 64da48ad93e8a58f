"""Programs are shared if and only if they are equal: everything in an equation is compared by content."""

import dataclasses
import enum
import functools
import gc
import itertools
import math
import struct
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from msrl_jax.fragments.graph.program_key import program_key, value_key
from tests.support.same_run import SEVERAL, Case, assert_same_run
from tests.support.slow import mostly_slow


def key_of(fn, *args):
    return program_key(jax.make_jaxpr(fn)(*args))


FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, ml_dtypes.int4, ml_dtypes.uint4]


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from([*FLOATS, *INTEGERS, np.bool_, np.complex64, np.complex128])))
    shape = draw(st.sampled_from([(), (1,), (3,), (2, 2), (40,)]))
    numbers = draw(st.lists(st.integers(-8, 7), min_size=math.prod(shape), max_size=math.prod(shape)))
    scale = draw(st.sampled_from([1, 1 + 2**-20, 1 + 2**-23, -1]))
    with np.errstate(all="ignore"):
        x = np.asarray(numbers, np.float64).reshape(shape) * (scale if dtype.kind in "fc" else 1)
        return x.astype(dtype) if dtype.kind != "u" else np.abs(x).astype(dtype)


class Pair(NamedTuple):
    a: object
    b: object


class Color(enum.Enum):
    RED = 1
    BLUE = 2


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.floats(allow_nan=True),
    st.complex_numbers(max_magnitude=3),
    st.sampled_from(["a", "b", b"a", Color.RED, Color.BLUE, int, float, np.float32(1), P("a"), P()]),
    st.sampled_from([np.dtype("int8"), np.dtype("uint8"), np.dtype(ml_dtypes.bfloat16)]),
)
values = st.recursive(
    scalars | arrays(),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=5,
)


def same(a, b):
    """The reference: equal in type, structure, dtype, shape and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, P):
        return a == b
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@settings(max_examples=100, deadline=None)
@given(values, values)
@example(0.0, np.float64(0.0))
@example(1j, np.complex128(1j))
def test_parameters_have_equal_keys_exactly_if_they_are_the_same(a, b):
    assert (value_key(a) == value_key(b)) == same(a, b)
    if same(a, b):
        assert hash(value_key(a)) == hash(value_key(b))


def copied(x):
    if isinstance(x, np.ndarray):
        return x.copy()
    if isinstance(x, dict):
        return {k: copied(v) for k, v in x.items()}
    if isinstance(x, tuple):
        return type(x)(*map(copied, x)) if hasattr(x, "_fields") else tuple(map(copied, x)) if type(x) is tuple else x
    return [copied(v) for v in x] if isinstance(x, list) else x


@settings(max_examples=100, deadline=None)
@given(values)
def test_parameters_of_equal_content_have_equal_keys(a):
    assert value_key(a) == value_key(copied(a))


@settings(max_examples=25, deadline=None)
@given(arrays(), arrays())
def test_programs_are_shared_exactly_if_their_constants_are_the_same(a, b):
    """The constants that JAX holds, with and without 64-bit types, in glue and inside of a called function."""

    def held(x):
        return x if jax.config.jax_enable_x64 or x.dtype.itemsize < 8 else x.astype(jax.dtypes.canonicalize_dtype(x.dtype))

    for wide in (False, True):
        with jax.enable_x64(wide):
            x, y = held(a), held(b)
            for wrap in (lambda f: f, jax.jit):
                keys = [key_of(wrap(lambda s, c=c: (s, jnp.asarray(c))), jnp.int8(1)) for c in (x, y)]
                assert (keys[0] == keys[1]) == same(np.asarray(x), np.asarray(y))


def one_ulp_apart(seed, count):
    x = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return zip(x, np.nextafter(x, np.float32(np.inf)), strict=True)


def test_literals_one_ulp_apart_are_different_programs():
    with np.printoptions(precision=3):
        for a, b in one_ulp_apart(0, 200):
            assert key_of(lambda x, c=a: x * c, 1.0) != key_of(lambda x, c=b: x * c, 1.0)
            assert key_of(lambda x, c=a: x * c, 1.0) == key_of(lambda x, c=a: x * c, 1.0)


KEYS = [jax.random.key(seed, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg") for seed in (0, 1)]


def closes_over(c):
    return lambda x: (x, c)


def with_literal(c):
    return lambda x: x * c


def python_callback(c):
    return lambda x: jax.pure_callback(lambda v: v + c, x, x)


def shared_callback(v):
    return v


X = jnp.ones((4, 4))
DEVICES = jax.devices()
MESH = Mesh(np.array(jax.devices()[:2]), ("a",))
DIFFERENT = {
    "python numbers": [with_literal(c) for c in (0.0, -0.0, 0.1, 0.1 + 2**-24, 1, 2, float("nan"))],
    "shapes": [with_literal(np.full(shape, 0.25, np.float32)) for shape in ((), (1,), (4,), (1, 4), (4, 1), (4, 4))],
    "typed keys": [closes_over(k) for k in KEYS],
    "keys in use": [lambda x, k=k: x + jax.random.normal(k) for k in KEYS],
    "weak arrays": [closes_over(jnp.asarray(3)), closes_over(jnp.int32(3))],
    "long arrays": [closes_over(np.arange(1000.0)), closes_over(np.arange(1000.0) + (np.arange(1000) == 999))],
    "axes": [lambda x: x.sum(0), lambda x: x.sum(1), lambda x: x.sum((0, 1)), lambda x: x.max(0)],
    "dtypes": [lambda x, d=d: x.astype(d) for d in (jnp.int8, jnp.int16, jnp.bfloat16, jnp.float8_e5m2, jnp.int4)],
    "enumerations": [lambda x, m=m: x.at[jnp.array([0, 9])].set(2.0, mode=m) for m in ("drop", "clip", "promise_in_bounds")],
    "precisions": [lambda x, p=p: jnp.dot(x, x, precision=p) for p in ("default", "high", "highest")],
    "dimension numbers": [lambda x, d=d: jax.lax.dot_general(x, x, ((d, d), ((), ()))) for d in ((0,), (1,))],
    "branches": [lambda x, c=c: jax.lax.cond(x.sum() > 0, lambda x: x * c, lambda x: x, x) for c in (2.0, 3.0)],
    "loops": [lambda x, n=n: jax.lax.fori_loop(0, n, lambda _, x: x * 0.5, x) for n in (2, 3)],
    "directions": [lambda x, r=r: jax.lax.scan(lambda c, y: (c * y, c), x[0], x, reverse=r) for r in (False, True)],
    "arrays of called functions": [jax.jit(closes_over(jnp.asarray([1.0, c]))) for c in (2.0, 2.0 + 2**-22)],
    "callbacks": [python_callback(1), python_callback(2)],
    "partial functions": [lambda x, c=c: jax.pure_callback(functools.partial(np.multiply, c), x, x) for c in (1, 2)],
    "shardings": [lambda x, s=s: jax.lax.with_sharding_constraint(x, NamedSharding(MESH, s)) for s in (P("a"), P(None, "a"))],
    "meshes": [
        lambda x, m=m: jax.shard_map(
            lambda y: y * 2, mesh=Mesh(np.array(jax.devices()[m : m + 2]), ("a",)), in_specs=P("a"), out_specs=P("a")
        )(x)
        for m in (0, 2)
    ],
    "derivatives of custom rules": [jax.grad(lambda x, c=c: jax.nn.relu(x * c).sum()) for c in (2.0, 4.0)],
    "texts": [lambda x, t=t: jax.debug.print(t, x[0, 0]) for t in ("{}", "x = {}")],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_programs_that_differ_have_different_keys(kind):
    for f, g in itertools.combinations(DIFFERENT[kind], 2):
        assert key_of(f, X) != key_of(g, X)


def test_programs_that_differ_in_settings_have_different_keys():
    def draw(x):
        return jax.random.normal(jax.random.key(0), x.shape)

    found = []
    for partitionable in (False, True):
        with jax.threefry_partitionable(partitionable):
            found.append(key_of(draw, X))
    assert found[0] != found[1]


EQUAL = {
    "literals": lambda: with_literal(np.float32(0.1)),
    "long arrays": lambda: closes_over(np.arange(1000.0)),
    "arrays on devices": lambda: closes_over(jnp.arange(5.0)),
    "typed keys": lambda: closes_over(jax.random.key(7)),
    "closures in loops": lambda: lambda x: jax.lax.scan(lambda c, y: (c * y + np.float32(0.1), None), x[0], x),
    "custom rules": lambda: lambda x: jax.nn.relu(x) + jax.nn.silu(x),
    "names": lambda: jax.jit(functools.wraps(with_literal)(lambda x: x * 2)),
    "callbacks of one function": lambda: lambda x: jax.pure_callback(shared_callback, x, x),
    "shardings": lambda: lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(Mesh(np.array(DEVICES), "a"), P("a"))),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_programs_that_are_equal_have_equal_keys(kind):
    first, second = key_of(EQUAL[kind](), X), key_of(EQUAL[kind](), X)
    assert first == second and hash(first) == hash(second)


def test_a_key_keeps_objects_that_it_compares_by_identity_alive():
    class Opaque:
        __hash__ = None

    key = value_key(Opaque())
    gc.collect()
    assert all(value_key(Opaque()) != key for _ in range(100))


def alike():
    """Fragments that differ only in a constant, with a learner between them that makes them separate programs."""
    act = [msrl.fragment(role="actor", name="act")(lambda x, c=c: x * c) for c in map(np.float32, (0.9991, 0.9994, 0.9991))]
    learn = msrl.fragment(role="learner")(lambda x: x + 1)

    def iteration(s):
        x = s["x"]
        for f in act:
            x = learn(f(x))
        return {"x": x}, {"sum": x.sum()}

    return Case(iteration, lambda: {"x": jnp.arange(8.0)}, {"x": P("env")})


@pytest.mark.parametrize("where", mostly_slow(SEVERAL, "SingleLearnerCoarse-4"), ids=str)
def test_fragments_with_different_constants_are_the_same_run(where):
    with np.printoptions(precision=3):
        assert_same_run(alike, where)


def test_equal_programs_are_compiled_once():
    case = alike()
    program = msrl.compile(
        case.iteration, case.init(), policy=policies.SingleLearnerCoarse(), axes=case.axes, devices=jax.devices()[:2]
    )
    assert len(program.compiled()) == 4  # two actors that differ, the learner, and the one that sums the metric as well


OPENED = []


@dataclasses.dataclass(frozen=True)
class Simulator:
    """Equal to any other of its name, but each has a handle of its own."""

    name: str

    def __post_init__(self):
        OPENED.append(self)

    def __call__(self, x):
        return np.float32(1 + next(i for i, opened in enumerate(OPENED) if opened is self))


@pytest.mark.parametrize("call", [jax.pure_callback, jax.experimental.io_callback])
def test_callbacks_that_compare_equal_are_called_each(call):
    OPENED.clear()
    first, second = Simulator("CartPole-v1"), Simulator("CartPole-v1")
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    act = msrl.fragment(role="actor")(lambda x: call(first, kind, x))
    learn = msrl.fragment(role="learner")(lambda x: call(second, kind, x))

    state = {"first": jnp.float32(0), "second": jnp.float32(0)}
    program = msrl.compile(
        lambda s: ({"first": act(s["first"]), "second": learn(s["second"])}, {}),
        state,
        policy=msrl.policies.SingleLearnerCoarse(),
        devices=jax.devices()[:1],
    )
    after, _ = program.run(state, 1)
    assert (after["first"], after["second"]) == (1, 2)


def twice(f):
    return jax.jit(lambda x: f(x) + f(x))


def nested(depth):
    """A function that calls a function twice, which calls a function twice, and so on."""
    f = jax.jit(jnp.sin)
    for _ in range(depth):
        f = twice(f)
    return f


def test_keys_of_programs_do_not_repeat_what_they_share():
    first, again = (program_key(jax.make_jaxpr(nested(60))(jnp.ones(8))) for _ in range(2))
    other = program_key(jax.make_jaxpr(nested(59))(jnp.ones(8)))
    assert [first == again, first == other] == [True, False]
    two = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + jax.jit(lambda y: jnp.sin(y))(x))(jnp.ones(8))
    one = jax.make_jaxpr(lambda x: nested(1)(x))(jnp.ones(8)).jaxpr.eqns[0].params["jaxpr"]
    assert [program_key(two) == program_key(one)] == [True]
