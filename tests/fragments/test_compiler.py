"""Partitioning takes time in proportion to what JAX traces: code that doubles or recurs per line would not end here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.plan.cost import flops
from msrl_jax.fragments.runtime.memory import largest_array, temporary_bytes

STATE = {"params": jnp.full(8, 0.5), "x": jnp.ones(8), "key": jax.random.key(0)}
AXES = {"params": P(), "x": P("env"), "key": P()}

act = msrl.fragment(role="actor")(lambda params, x: 0.5 * x + params.sum())
learn = msrl.fragment(role="learner")(lambda params, x: 0.9 * params - 0.01 * x.mean())


def loop_with(glue):
    def iteration(s):
        key, params, x = glue(s["key"], s["params"], s["x"])
        x = act(params, x)
        return {"params": learn(s["params"], x), "x": x, "key": key}, {"x": x}

    return iteration


def compiled(glue, **options):
    return msrl.compile(loop_with(glue), STATE, policy=msrl.policies.SingleLearnerCoarse(**options), axes=AXES)


def shared(lines):
    """Between a learner and an actor; every line reads the one before it three times."""

    def glue(key, params, x):
        for _ in range(lines):
            params = params * params * 0.1 - params
        return key, params, x

    return glue


def twice(f):
    return jax.jit(lambda x: f(x) + f(x))


def nested(depth):
    """A function that calls a function twice, which calls a function twice, and so on."""
    f = jax.jit(jnp.sin)
    for _ in range(depth):
        f = twice(f)
    return f


def test_values_that_many_lines_share_are_delayed_once():
    graph = compiled(shared(200), staleness=1).graph
    assert len(graph.region.nodes) <= 2 * 3 * 200 + 10


def test_shared_values_that_are_delayed_are_right():
    state, metrics = compiled(shared(3), staleness=1).run(STATE, 4)
    params, x, old = STATE["params"], STATE["x"], STATE["params"]
    for i in range(4):
        for _ in range(3):
            old = old * old * 0.1 - old
        x = 0.5 * x + old.sum()
        old, params = params, 0.9 * params - 0.01 * x.mean()
        np.testing.assert_allclose(metrics["x"][i], x, 1e-5)
    np.testing.assert_allclose(state.state["params"], params, 1e-5)


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_thousands_of_operations_in_a_row_compile(staleness):
    def glue(key, params, x):
        for _ in range(1500):
            params = params * 0.999 + 0.001
        return key, params, x

    compiled(glue, staleness=staleness)
    with pytest.raises(ValueError, match=r"state\['a'\] is updated by fragment 'one'.*'two'"):
        one, two = (msrl.fragment(role=f"learner:{n}", name=n)(lambda x: x + 1) for n in ("one", "two"))
        msrl.compile(
            lambda s: ({"a": two(glue(None, one(s["a"]), None)[1])}, {}), {"a": jnp.ones(8)}, policy=msrl.policies.GPUOnly()
        )


def test_functions_that_are_called_twice_are_visited_once():
    graph = compiled(lambda key, params, x: (key, params, nested(60)(x))).graph
    assert len(graph.region.nodes) <= 10
    jaxpr = jax.make_jaxpr(nested(60))(jnp.ones(8)).jaxpr
    operations, nbytes, largest = flops(jaxpr, "cpu"), temporary_bytes(jaxpr), largest_array(jaxpr)  # printed, it is endless
    assert operations == 8 * (2**61 - 1)
    assert nbytes <= 32 * 3 * 61 and "float32[8]" in largest
