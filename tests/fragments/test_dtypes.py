"""States and metrics of every dtype and form."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from msrl_jax.fragments.runtime.memory import array_bytes
from tests.support.compare import as_numpy
from tests.support.same_run import ENVS, SEVERAL, Case, assert_same_run
from tests.support.slow import mostly_slow

apart_or_not = pytest.mark.parametrize("where", mostly_slow(SEVERAL, "SingleLearnerCoarse-4"), ids=str)

act = msrl.fragment(role="actor")(lambda tree: jax.tree.map(lambda x: x[::-1], tree))
learn = msrl.fragment(role="learner")(lambda tree: jax.tree.map(lambda x: x + x[:1], tree))

DTYPES = (
    *("int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32"),
    *("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32", "complex64"),
)


def every_dtype():
    def iteration(s):
        numbers = learn(act(s["numbers"]))
        flags = act(s["flags"])
        return {"numbers": numbers, "flags": ~flags}, {"first": {d: x[0] for d, x in numbers.items()}, "flags": flags}

    def init():
        return {"numbers": {d: jnp.arange(ENVS).astype(d) for d in DTYPES}, "flags": jnp.arange(ENVS) % 3 == 0}

    return Case(iteration, init, {"numbers": P("env"), "flags": P("env")})


@apart_or_not
def test_every_dtype_is_the_same_run(where):
    assert_same_run(every_dtype, where)


def wide():
    def iteration(s):
        tree = learn(act({"x": s["x"], "n": s["n"], "z": s["z"]}))
        return s | tree | {"w": s["w"] * 1.0000000001}, {"sum": tree["x"].sum(), "w": s["w"]}

    def init():
        x, z = jnp.arange(8) + 1, jnp.complex128(1e-20 + 1j)
        return {"x": x * jnp.float64(1.0000000001), "n": x + 2**40, "z": x * z, "w": 1.5, "u": np.uint64(2**63)}

    return Case(iteration, init, {"x": P("env"), "n": P("env"), "z": P("env"), "w": P(), "u": P()})


@apart_or_not
def test_64_bit_types_are_the_same_run(where):
    with jax.enable_x64(True):
        program = assert_same_run(wide, where)
        after, metrics = program.run(wide().init(), 1)
    assert after["n"].dtype == np.int64 and metrics["sum"].dtype == np.float64 and after["z"].dtype == np.complex128


IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")


def typed_keys():
    @msrl.fragment(role="actor")
    def draw(keys):
        return jax.vmap(lambda k: jax.random.uniform(k))(keys), jax.vmap(lambda k: jax.random.fold_in(k, 1))(keys)

    @msrl.fragment(role="learner")
    def update(key, noise):
        return jax.random.split(key)[0], noise.mean()

    def iteration(s):
        after, metrics = {}, {}
        for name, (keys, key) in s.items():
            noise, keys = draw(keys)
            key, mean = update(key, noise)
            after[name], metrics[name] = (keys, key), {"mean": mean, "key": key, "keys": keys}
        return after, metrics

    def init():
        pairs = {n: jax.random.key(3, impl=n) for n in IMPLEMENTATIONS}
        return {n: (jax.random.split(k, ENVS), k) for n, k in pairs.items()}

    return Case(iteration, init, {n: (P("env"), P()) for n in IMPLEMENTATIONS}, 3)


@apart_or_not
def test_typed_keys_are_the_same_run_as_states_and_metrics(where):
    case = typed_keys()
    state = case.init()
    program = msrl.compile(case.iteration, state, policy=where.policy, axes=case.axes, devices=jax.devices()[: where.devices])
    found, metrics = program.run(state, 3, chunk=2)
    step = jax.jit(case.iteration)
    for i in range(3):
        state, expected = step(state)
        row = jax.tree.map(lambda x, i=i: x[i], metrics)
        jax.tree.map(np.testing.assert_allclose, as_numpy(row), as_numpy(expected))
    jax.tree.map(np.testing.assert_array_equal, as_numpy(found), as_numpy(state))
    assert metrics["rbg"]["keys"].shape == (3, ENVS) and jax.random.key_impl(metrics["rbg"]["keys"]) == "rbg"


@pytest.mark.parametrize(("impl", "each"), [("threefry2x32", 8), ("rbg", 16), ("unsafe_rbg", 16)])
def test_bytes_of_keys_are_those_that_they_take(impl, each):
    keys = jax.random.split(jax.random.key(0, impl=impl), 5)
    assert array_bytes(keys) == array_bytes(jax.eval_shape(lambda: keys)) == 5 * each == jax.random.key_data(keys).nbytes


class Named(NamedTuple):
    """A part of a state without a leaf, and one of size zero."""

    none: None
    empty: jax.Array
    x: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Data:
    """A dataclass that is a registered pytree."""

    w: jax.Array
    nothing: tuple = ()


@struct.dataclass
class Struct:
    """A dataclass of Flax, with a field that is not an array."""

    x: jax.Array
    name: str = struct.field(pytree_node=False, default="a")


def forms():
    """Containers of all kinds, empty ones, one array in three places, and resets to literals."""

    def iteration(s):
        x = act(s["named"].x)
        same = learn(s["once"])
        after = {
            "named": Named(None, s["named"].empty, learn(x)),
            "data": Data(s["data"].w * 0.5),
            "struct": s["struct"].replace(x=x),
            "once": same,
            "twice": same,
            "thrice": same,
            "reset": jnp.zeros(ENVS),
            "one": jnp.float32(1),
            "swap": (s["swap"][1], s["swap"][0]),
            "nothing": {},
        }
        return after, {"x": x, "empty": s["named"].empty, "none": None, "constant": jnp.int32(3), "old": s["reset"]}

    def init():
        x = jnp.arange(8.0)
        return {
            "named": Named(None, jnp.zeros((0, 3)), x),
            "data": Data(jnp.float32(2)),
            "struct": Struct(x),
            "once": x,
            "twice": x,
            "thrice": x,
            "reset": x,
            "one": jnp.float32(0),
            "swap": (x, 2 * x),
            "nothing": {},
        }

    return Case(iteration, init, None, 3)


@apart_or_not
def test_every_form_of_state_is_the_same_run(where):
    program = assert_same_run(forms, where)
    state = forms().init()
    program.run(state, 1, donate=True)  # one array in three places is given away once


def test_a_state_without_leaves_and_metrics_without_any_run():
    for policy in (policies.GPUOnly(), policies.SingleLearnerCoarse()):
        program = msrl.compile(lambda s: (s, {"one": learn(act(jnp.arange(3.0)))}), {}, policy=policy)
        state, metrics = program.run({}, 2)
        assert state == {}
        np.testing.assert_array_equal(metrics["one"], [[4, 3, 2]] * 2)
        program = msrl.compile(lambda s: (learn(act(s)), ()), jnp.arange(3.0), policy=policy)
        np.testing.assert_array_equal(program.run(jnp.arange(3.0), 1)[0], [4, 3, 2])
