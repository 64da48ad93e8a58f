"""Optimizers by name are those of optax, and custom transformations are applied as they are."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import msrl_jax as msrl
from msrl_jax._compat import jaxpr_as_fun
from msrl_jax.agents.optimizers import for_each_network, make_optimizer
from msrl_jax.algorithms import PPO
from msrl_jax.kernels.networks import global_norm
from msrl_jax.registry import resolve
from tests.support import transformations

PARAMS = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[3.0, 1.0], [0.5, -1.0]])}
OPTAX = {
    "adam": optax.adam(0.1, eps=1e-5),
    "adam:b1=0.5,eps=1e-3,nesterov=True": optax.adam(0.1, b1=0.5, eps=1e-3, nesterov=True),
    "adamw:weight_decay=0.1": optax.adamw(0.1, eps=1e-5, weight_decay=0.1),
    "rmsprop": optax.rmsprop(0.1, 0.9, eps=1e-5),
    "rmsprop:decay=0.5,centered=True,momentum=0.8": optax.rmsprop(0.1, 0.5, eps=1e-5, centered=True, momentum=0.8),
    "sgd": optax.sgd(0.1),
    "sgd:momentum=0.9,nesterov=True": optax.sgd(0.1, 0.9, nesterov=True),
    "lion:weight_decay=0.01": optax.lion(0.1, weight_decay=0.01),
    "muon:ns_steps=3": optax.contrib.muon(0.1, ns_steps=3),
}


@pytest.mark.parametrize("name", OPTAX)
def test_directions_and_descent_are_the_optimizers_of_optax(name):
    """Two steps on gradients longer than the norm that they are scaled down to."""
    reference = optax.chain(optax.clip_by_global_norm(0.5), OPTAX[name])
    optimizer = make_optimizer(resolve.objects(PPO(optimizer=name, max_grad_norm=0.5)), epsilon=1e-5, rms_decay=0.9)
    params, state, want, want_state = PARAMS, optimizer.init(PARAMS), PARAMS, reference.init(PARAMS)
    for _ in range(2):
        updates, want_state = reference.update(want, want_state, want)
        want = optax.apply_updates(want, updates)
        updates, state = optimizer.update(params, state, params, learning_rate=jnp.float32(0.1))
        params = optax.apply_updates(params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, want)


def test_a_transformation_of_ones_own_is_applied_to_each_network_as_it_is():
    own = optax.adamw(0.1, weight_decay=0.2)
    optimizer = for_each_network(make_optimizer(types.SimpleNamespace(optimizer=own, max_grad_norm=1e-9), epsilon=1.0))
    networks = {"actor": PARAMS, "critic": jax.tree.map(lambda x: 2 * x, PARAMS)}
    updates, _ = optimizer.update(networks, optimizer.init(networks), networks, learning_rate=None)
    for name, params in networks.items():
        want, _ = own.update(params, own.init(params), params)
        jax.tree.map(np.testing.assert_array_equal, updates[name], want)


Own = optax.GradientTransformation
LINESEARCH = optax.scale_by_backtracking_linesearch(3)
WRONG = {
    "misspelt": ("addam", "PPO.optimizer='addam': use 'adam'"),
    "parameter": ("adamw:weigth_decay=0.1", r"use parameters that adamw of optax has \(did you mean 'weight_decay'\?\): b1, "),
    "value": ("adamw:b1=1", "use a finite number of at least 0 and below 1 for b1"),
    "word": ("sgd:nesterov=1", "use True or False for nesterov"),
    "text": ("adamw:0.1", "use adamw:parameter=value"),
    "number": (3, r"PPO.optimizer=3: use one of \['adam', .*, your own object, or MODULE:NAME of one"),
    "a function behind a name": ("optax:sgd", "optimizer 'optax:sgd' is not an optax.GradientTransformation, or a function"),
    "extra arguments": (LINESEARCH, "fails: TypeError: .* missing 3 required .*; it gets gradients, .* nothing else"),
    "state": (Own(lambda p: {"a": "text"}, lambda g, s, p=None: (g, s)), "its state, a pytree of arrays"),
    "states": (Own(lambda p: (), lambda g, s, p=None: (g, p)), "returns a state of another structure"),
    "several": (["adam", "sgd"], "members of a run cannot differ in it"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_optimizer_is_refused_in_words_before_anything_compiles(case, monkeypatch):
    given, message = WRONG[case]
    monkeypatch.setattr(msrl.fragments.Program, "run", None)
    with pytest.raises((TypeError, ValueError), match=message):
        msrl.train("ppo", optimizer=given, total_steps=32 * 128, progress=False)


def test_the_norm_of_one_vector_is_that_of_the_leaves():
    tree = {"a": jnp.arange(12.0).reshape(3, 4), "b": (jnp.float32(-2.0), jnp.zeros((0, 3)))}
    branches = jax.make_jaxpr(global_norm)(tree).eqns[-1].params["branches"]
    found = [jaxpr_as_fun(branch)(*jax.tree.leaves(tree))[0] for branch in branches]
    np.testing.assert_allclose(found, [np.sqrt(506 + 4)] * 2, rtol=1e-6)
    mixed = {"a": jnp.ones(3), "b": jnp.ones(1, jnp.float16)}
    assert global_norm(mixed) == 2.0  # leaves of several dtypes
    assert global_norm({}) == 0.0 and global_norm([3.0, 4.0]) == 5.0


@pytest.mark.parametrize(("name", "value"), [("learning_rate", 0.1), ("max_grad_norm", None), ("anneal_learning_rate", True)])
def test_what_has_no_effect_on_a_transformation_of_ones_own_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"PPO.{name} has no effect on your optimizer"):
        msrl.algorithms.make("ppo", {"optimizer": transformations.falling, name: value})
