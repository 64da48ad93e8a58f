import functools

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import msrl_jax as msrl
from msrl_jax.envs import Box, Dict
from msrl_jax.networks.modules import as_network
from msrl_jax.networks.torso import make_torso
from tests.support import modules

KEY = jax.random.key(3)
OBS = jax.random.normal(jax.random.key(4), (5, 4))


def called(form, params):
    """What the library itself computes with the parameters."""
    if form == "linen":
        return modules.linen_module.apply({"params": params}, OBS)
    if form == "pair":
        return modules.PAIR[1](params, OBS)
    if form == "nnx":
        module = modules.nnx_module(jax.random.key(0), OBS)
        for layer, values in zip(module.layers, params["layers"].values(), strict=True):
            layer.kernel[...], layer.bias[...] = values["kernel"], values["bias"]
        return module(OBS)
    module = modules.equinox_module(jax.random.key(0), OBS)
    for i in (0, 1):
        for part in ("weight", "bias"):
            new = params[f".layers[{i}].{part}"]
            module = equinox.tree_at(lambda m, i=i, part=part: getattr(m.layers[i], part), module, new)
    return jnp.stack([module(row) for row in OBS])


def initialized(form):
    """What the library itself starts with."""
    if form == "linen":
        return modules.linen_module.init(KEY, OBS)["params"]
    if form == "pair":
        return modules.PAIR[0](KEY, OBS)
    if form == "nnx":
        return nnx.state(modules.nnx_module(KEY, OBS), nnx.Param)
    found = jax.tree.leaves_with_path(equinox.filter(modules.equinox_module(KEY, OBS), equinox.is_array))
    return {jax.tree_util.keystr(path): leaf for path, leaf in found}


@pytest.mark.parametrize("form", modules.FORMS)
def test_a_module_starts_and_computes_as_its_library_does(form):
    network = as_network(modules.FORMS[form])
    params = network.init(KEY, OBS)
    for mine, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(initialized(form)), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    params = jax.tree.map(lambda x: x + 0.1, params)
    np.testing.assert_allclose(network.apply(params, OBS), called(form, params), rtol=1e-5, atol=1e-6)


class Parts(linen.Module):
    """Of observations of two parts."""

    @linen.compact
    def __call__(self, obs):
        assert obs["picture"].dtype == jnp.uint8
        assert obs["picture"].ndim == 4
        return linen.Dense(3)(obs["speed"]) + linen.Dense(3)(obs["picture"].reshape(len(obs["picture"]), -1) / 255)


def test_observations_reach_a_module_as_they_are_with_one_dimension_before():
    space = Dict({"speed": Box(-1, 1, (2,)), "picture": Box(0, 255, (3, 3, 1), jnp.uint8)})
    torso = make_torso(space, msrl.algorithms.PPO(network=as_network(Parts())))
    rng = np.random.default_rng(0)
    obs = {
        "speed": rng.normal(size=(7, 2, 2)).astype(np.float32),
        "picture": rng.integers(0, 256, (7, 2, 3, 3, 1), dtype=np.uint8),
    }
    params = torso.init(KEY, obs)
    features = torso.apply(params, obs)
    assert features.shape == (7, 2, torso.num_features) == (7, 2, 3)
    one = torso.apply(params, jax.tree.map(lambda x: x[4, 1], obs))
    np.testing.assert_allclose(one, features[4, 1], rtol=1e-6)


def test_actions_join_the_features_and_dense_layers_follow():
    torso = make_torso(Box(-1, 1, (4,)), msrl.algorithms.SAC(network=as_network(modules.PAIR), hidden_sizes=(6,)))
    action = jnp.ones((5, 2))
    params = torso.init(KEY, OBS, action)
    joined = jnp.concatenate([modules.PAIR[1](params["params"]["module"], OBS), action], axis=-1)
    layer = params["params"]["Dense_0"]
    expected = jax.nn.relu(joined @ layer["kernel"] + layer["bias"])
    np.testing.assert_allclose(torso.apply(params, OBS, action), expected, rtol=1e-5, atol=1e-6)


def module(function, **fields):
    """A flax.linen module of a function."""
    return type("Own", (linen.Module,), {"__annotations__": fields, "__call__": linen.compact(function)})()


class Dropping(nnx.Module):
    def __init__(self, key):
        self.drop = nnx.Dropout(0.1, rngs=nnx.Rngs(key))

    def __call__(self, obs):
        return self.drop(obs)


class EquinoxDropping(equinox.Module):
    drop: equinox.nn.Dropout = equinox.nn.Dropout(0.1)

    def __call__(self, obs):
        return self.drop(obs)


def unused(self, obs):
    linen.Dense(2, name="lost")(obs)
    return linen.Dense(3)(obs)


REFUSED = {
    "dropout of flax.linen": (module(lambda self, x: linen.Dropout(0.1, deterministic=False)(x)), "no random numbers"),
    "dropout of flax.nnx": (Dropping, r"\['drop'\]\['rngs'\].*not an nnx.Param.*no random numbers"),
    "dropout of Equinox": (lambda key: EquinoxDropping(), "requires a key.*no random numbers"),
    "state of flax.linen": (module(lambda self, x: linen.BatchNorm(use_running_average=False)(x)), "'batch_stats'.*no state"),
    "two arrays": (module(lambda self, x: (x, x)), r"\(\(3, 4\), \(3, 4\)\) for 3 observations.*\[B, F\]"),
    "a value": (module(lambda self, x: x.sum(-1)), r"returns \(3,\) for 3 observations"),
    "integers": (module(lambda self, x: x.astype(int)), "dtype int32; return floats"),
    "an unused layer": (module(unused), r"the parameter \['lost'\]\['bias'\], on which no feature depends"),
    "a coarse parameter": (linen.Dense(3, param_dtype=jnp.bfloat16), r"\['bias'\] of dtype bfloat16.*float32 \(param_dtype\)"),
    "actor and critic": ((linen.Dense(2), linen.Dense(1)), r"give CustomNetworks\(actor=..., critic=...\)"),
    "another argument": (module(lambda self, x, train: x), "missing 1 required positional argument: 'train'"),
    "random numbers of Haiku": ((lambda key, obs: {}, lambda params, rng, x: x), r"apply\(params, rng, x\).*without_apply_rng"),
    "nothing for a key": (lambda key: None, "returns NoneType for a key"),
    "a class": (modules.Linen, r"Linen is a class; give a module, such as Linen\(...\)"),
    "a number": (3, "int is not a module; give a module of flax.linen"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_in_words(what):
    given, message = REFUSED[what]
    with pytest.raises((TypeError, ValueError), match=message):
        as_network(given).init(KEY, OBS)


def test_configs_take_names_and_modules_and_nothing_misspelt():
    for network in (modules.linen_module, modules.PAIR, "tests.support.modules:linen_module", "cnn"):
        assert msrl.algorithms.PPO(network=network).network is network
    with pytest.raises(ValueError, match="use 'mlp'"):
        msrl.algorithms.PPO(network="mpl")
    with pytest.raises(TypeError, match=r"network=\w+ is a module that has its parameters; give a function of a key that"):
        msrl.algorithms.PPO(network=modules.equinox_module(KEY, OBS))
    with pytest.raises(TypeError, match=r"is not a network yet; msrl_jax\.algorithms\.build"):
        make_torso(Box(-1, 1, (4,)), msrl.algorithms.PPO(network=modules.nnx_module))


@pytest.mark.parametrize(
    "make", [functools.partial(equinox.nn.Linear, 4, 8), lambda obs, *, key: equinox.nn.Linear(obs.shape[-1], 8, key=key)]
)
def test_functions_may_take_their_key_by_name(make):
    network = as_network(make)
    want = jax.vmap(equinox.nn.Linear(4, 8, key=KEY))(OBS)
    np.testing.assert_array_equal(network.apply(network.init(KEY, OBS), OBS), want)


def test_a_module_without_parameters_passes():
    assert as_network((lambda key, obs: {}, lambda params, obs: obs)).init(KEY, OBS) == {}
