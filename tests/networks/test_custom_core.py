"""The cores of configs; custom cores: what they compute, and what of them is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from msrl_jax import envs
from msrl_jax.algorithms import GRU, LRU, LSTM, PPO, R2D2, GTrXL, MinGRU, make
from msrl_jax.configs.fields import is_option
from msrl_jax.networks.custom_core import as_core
from msrl_jax.registry.resolve import objects
from msrl_jax.run.experiment.plain_data import plain_fields
from msrl_jax.search.space import read_axes
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
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_in_words(what):
    given, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=message):
        as_core(given)(INPUTS)


CORES = [GRU(8), LSTM(), MinGRU(3), LRU(), GTrXL(128, context=8), "tests.support.modules:Fading", nn.GRUCell(8), Fading(), None]


@pytest.mark.parametrize("core", CORES)
def test_the_core_of_a_config_is_an_option_a_custom_object_its_name_or_none(core):
    config, from_files = PPO(core=core), [plain_fields({"core": core})["core"]]
    if isinstance(core, str | None) or is_option(core):
        from_files += [str(core)]
    else:
        assert "object" in from_files.pop()
    for text in from_files:
        assert make("ppo", {"core": text}).core == core
    again = jax.tree.unflatten(jax.tree.structure(config), jax.tree.leaves(config))
    assert again == config and hash(jax.tree.structure(config)) == hash(jax.tree.structure(again))
    assert jax.tree.leaves(config) == jax.tree.leaves(PPO())


def test_the_size_of_a_core_has_a_dotted_name():
    assert make("ppo", {"core": "gtrxl", "core.size": 128}).core == GTrXL(128)
    assert make("r2d2", {"core.size": 8}).core == GRU(8)
    assert make(PPO(core=LSTM(4)), {"core.size": 8}).core == LSTM(8)
    axes, _ = read_axes(R2D2, {"core.size": "16,32", "core": ["lru", "gru"]})
    assert [(axis.field, axis.values.numbers) for axis in axes] == [("core.size", (16, 32)), ("core", ("lru", "gru"))]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"core": "gruu:8"}, r"PPO.core='gruu:8': use one of gru, .* None, your own .* \(did you mean 'gru'\?\)"),
        ({"core": 8}, "PPO.core=8: use one of gru, lstm, min_gru, lru, gtrxl, None, your own object, or MODULE:NAME of one$"),
        ({"core": "gru:layers=2"}, "PPO.core: gru takes size=64$"),
        ({"core": "lstm:wide"}, "PPO.core.size='wide': use an integer of at least 1$"),
        ({"core": "gtrxl:context=0"}, "PPO.core.context=0: use an integer of at least 1$"),
        ({"core": "gtrxl:8,heads=3"}, "PPO.core.size=8 is not an even multiple of heads=3; use 6$"),
        ({"core.size": 8}, "PPO.core.size=8: core is None, which has no size; leave it out, or give core='gru' or .* too"),
        ({"core": nn.GRUCell(8), "core.size": 8}, r"PPO.core.size=8: core is GRUCell\(.*\), which has no size; leave it out"),
        ({"core": "cores:own", "core.size": 8}, "PPO.core.size=8: core is cores:own, which has no size; leave it out"),
    ],
)
def test_what_is_no_core_is_refused_with_its_place_and_a_remedy(fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        make("ppo", fields)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"R2D2\.core=None: use one of gru"):
        R2D2(core=None)


def test_a_config_alone_makes_no_core():
    for core, message in (("cores:own", r"core='cores:own' is not resolved yet; call"), ("gru", "core=GRU is made by")):
        with pytest.raises(ValueError, match=rf"{message} msrl_jax\.algorithms\.build"):
            PPO(core=core).build(envs.make("CartPole-v1"))
    resolved = objects(PPO(core="gru")).core
    assert PPO(core=resolved).core is resolved  # so that the build of one config may make another
