"""Cores of one's own: what they compute, and what of them is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from msrl_jax import algorithms, envs
from msrl_jax.networks.cores import as_core, named_core
from tests.support.modules import Fading

T, E, INPUTS = 5, 4, 3
KEY = jax.random.key(0)
IS_FIRST = np.random.default_rng(2).random((T, E)) < 0.3
XS = np.random.default_rng(1).normal(size=(T, E, INPUTS)).astype(np.float32)


def test_a_core_of_functions_is_its_formula_and_forgets_between_episodes():
    core = as_core(Fading())(INPUTS)
    params = core.init(KEY, INPUTS)
    outputs, carries = jax.jit(core.unroll)(params, XS, IS_FIRST, core.initial_carry((E,)))
    kernel = np.asarray(params["kernel"], np.float64)
    for e in range(E):
        start = 0
        for t in range(T):
            start = t if IS_FIRST[t, e] else start
            weights = 0.8 ** np.arange(t - start, -1, -1)
            want = weights @ np.tanh(XS[start : t + 1, e] @ kernel) / weights.sum()
            np.testing.assert_allclose(outputs[t, e], want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(carries[1][t, e], weights.sum(), rtol=1e-6)
    assert core.num_outputs == Fading.size


def test_batches_of_a_core_have_any_dimensions():
    core = as_core(Fading())(INPUTS)
    params, carry = core.init(KEY, INPUTS), core.initial_carry((T, E))
    outputs, after = core.step(params, jnp.asarray(XS), carry)
    flat, _ = Fading().step(params, XS.reshape(T * E, INPUTS), Fading().initial(T * E))
    np.testing.assert_array_equal(outputs, flat.reshape(T, E, -1))
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, carry)


@pytest.mark.parametrize("cell", [nn.GRUCell(6), nn.OptimizedLSTMCell(6)], ids=["gru", "lstm"])
def test_a_cell_of_flax_is_unrolled_as_flax_does(cell):
    core = as_core(cell)(INPUTS)
    params = core.init(KEY, INPUTS)
    outputs, _ = core.unroll(params, XS, np.zeros((T, E), bool), core.initial_carry((E,)))
    rnn = nn.RNN(cell, time_major=True)
    start = cell.initialize_carry(KEY, (E, INPUTS))
    want = rnn.apply({"params": {"cell": params["params"]}}, XS, initial_carry=start)
    np.testing.assert_allclose(outputs, want, rtol=1e-5, atol=1e-6)


class Unrolled(Fading):
    """With an unroll of its own, which its outputs betray."""

    def unroll(self, params, inputs, is_first, carry):
        return inputs[..., :1], jax.tree.map(lambda x: jnp.broadcast_to(x, (len(inputs), *x.shape)), carry)


def test_an_unroll_of_its_own_is_used():
    core = as_core(Unrolled())(INPUTS)
    outputs, carries = core.unroll(core.init(KEY, INPUTS), XS, IS_FIRST, core.initial_carry((E,)))
    np.testing.assert_array_equal(outputs, XS[..., :1])
    assert [x.shape for x in carries] == [(T, E, 6), (T, E)]


def changed(**functions):
    return type("Changed", (Fading,), {name: staticmethod(f) for name, f in functions.items()})()


def unused(key, inputs):
    return {"kernel": jnp.ones((INPUTS, 6)), "lost": jnp.ones(2)}


FADING = Fading()
REFUSED = {
    "no step": (type("NoStep", (), {"init": 1, "initial": FADING.initial})(), "NoStep has no init"),
    "a class": (Fading, "is a class"),
    "a number": (3, "int has no init"),
    "no zeros": (changed(initial=lambda n: {"sum": jnp.ones((n, 6)), "weight": jnp.zeros(n)}), r"\['sum'\] is not 0"),
    "integers": (changed(initial=lambda n: {"sum": jnp.zeros((n, 6)), "weight": jnp.zeros(n, int)}), r"\['weight'\].*int32"),
    "another carry": (changed(step=lambda p, x, c: (x @ p["kernel"], c["sum"])), "a step turns the carry"),
    "no outputs": (changed(step=lambda p, x, c: ((x @ p["kernel"]).sum(), c)), "returns outputs .* for a batch of 3"),
    "an unused parameter": (changed(init=unused), r"the parameter \['lost'\]"),
    "a failure": (changed(step=lambda p, x, c: (x @ p["kernel"][:2], c)), r"fails for inputs \[3, 3\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_in_words(what):
    given, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=message):
        as_core(given)(INPUTS)


@pytest.mark.parametrize(
    ("core", "message"),
    [
        ("gtrxl:heads=3", "memory_size=8 must be an even multiple of the 3 heads.*use 6"),
        ("gtrxl:context=0", "gtrxl:context=0.*at least 1"),
        ("gtrxl:depth=2", "has no depth; gtrxl has layers, heads and context"),
        ("gru:layers=2", "has no layers; gtrxl has"),
        ("gtrlx:heads=2", "unknown core 'gtrlx'.*gtrxl"),
    ],
)
def test_parameters_of_a_core_are_checked(core, message):
    with pytest.raises(ValueError, match=message):
        named_core(core, 8)


@pytest.mark.parametrize(
    ("core", "message"),
    [
        ("gru:3", "A2C.core='gru:3': use core='gru', memory_size=3$"),
        ("gtrxl:wide", "A2C.core='gtrxl:wide': use core='gtrxl', with its size as memory_size$"),
    ],
)
def test_a_size_behind_the_name_of_a_core_is_no_module(core, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make("a2c", {"core": core})
    with pytest.raises(ValueError, match=message):
        algorithms.build(algorithms.A2C(core=core), envs.make("CartPole-v1"))
    algorithms.make("a2c", {"core": "gtrxl:context=8"})


def test_a_config_alone_makes_no_core():
    with pytest.raises(ValueError, match=r"core='gru' is made by msrl_jax\.algorithms\.build"):
        algorithms.PPO(core="gru").build(envs.make("CartPole-v1"))
