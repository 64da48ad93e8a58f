"""CrossQ, batch normalization of critics: updates against implementations written out here, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms
from msrl_jax.algorithms import counted
from msrl_jax.networks.custom_network import CustomNetworks
from msrl_jax.networks.modules import as_network
from tests.support.modules import FORMS, Head
from tests.support.off_policy import B, adam, assert_close, build, counting, drawn, one, plain_policy, wide
from tests.support.privileged import pendulum
from tests.support.random_walk import RandomWalk


def plain_critic(params, x, given=None):
    """A critic written out: values, by given statistics or by those of `x`, and the statistics of `x`."""
    torso, found = params["params"]["torso"], {}

    def norm(i, x):
        found[f"BatchNorm_{i}"] = {"mean": x.mean(0), "var": ((x - x.mean(0)) ** 2).mean(0)}
        use, p = (found if given is None else given["torso"])[f"BatchNorm_{i}"], torso[f"BatchNorm_{i}"]
        return (x - use["mean"]) / (use["var"] + 1e-3) ** 0.5 * p["scale"] + p["bias"]

    x = norm(0, x)
    for i in range(2):
        x = x @ torso[f"Dense_{i}"]["kernel"] + torso[f"Dense_{i}"]["bias"]
        x = norm(i + 1, x * (x > 0))
    return x @ params["params"]["Dense_0"]["kernel"] + params["params"]["Dense_0"]["bias"], {"torso": found}


def plain_critics(params, x, given=None):
    """Those of two critics `[2, B]`, and the statistics of both."""
    found = [plain_critic(one(params, i), x, None if given is None else one(given, i)) for i in range(2)]
    values = [values[:, 0] for values, _ in found]
    stack = np.stack if isinstance(x, np.ndarray) else jnp.stack
    return values, jax.tree.map(lambda *x: stack(x), *(statistics for _, statistics in found))


def together(batch, next_action):
    """What a joint pass sees, `[2 B, ...]`: the steps of a batch, and the steps after them."""
    steps = [batch.obs, batch.action], [batch.next_obs, next_action]
    return jnp.concatenate([jnp.concatenate(step, -1) for step in steps])


def moved(old, new, share=0.01):
    return jax.tree.map(lambda old, new: (1 - share) * old + share * new, wide(old), new)


@pytest.mark.long
def test_updates_of_sac_equal_an_independent_implementation():
    env = RandomWalk(True)
    options = {"max_grad_norm": 0.7, "replay.n_step": 2, "initial_temperature": 0.3, "learn_temperature": False, "tau": 0.01}
    agent, config = build("sac", env, num_updates=1, target="cross_q", **options)
    iterate, state, updates = counting(agent), jax.jit(agent.init)(jax.random.key(0)), 0
    for layer in state.target_params["torso"].values():
        np.testing.assert_array_equal(layer["mean"], np.zeros_like(layer["mean"]))
        np.testing.assert_array_equal(layer["var"], np.ones_like(layer["var"]))
    for i in range(4):
        before, (state, metrics) = state, iterate(state, i)
        if metrics["q"].count:
            updates += 1
        else:
            assert_close(state.target_params, wide(before.target_params))
    assert updates == 3
    compare_update_of_sac(env, config, before, state, metrics)


def compare_update_of_sac(env, config, state, after, metrics):
    batch, key = drawn(env, config, state, after)
    keys = jax.random.split(key, (2, B))
    noises = np.asarray(jax.vmap(jax.vmap(lambda k: jax.random.normal(k, (2,))))(keys))
    params, temperature = state.params, np.exp(state.params["log_temperature"])
    next_action, next_log_prob = plain_policy(params, batch.next_obs, noises[0], True)

    def target(next_q):
        return batch.reward + batch.discount * (np.minimum(*map(np.asarray, next_q)) - temperature * next_log_prob)

    values, statistics = plain_critics(wide(params["critic"]), wide(together(batch, next_action)))
    fixed = target([v[B:] for v in values])
    # Not what successors alone give, normalized by their own statistics.
    alone = plain_critics(params["critic"], jnp.concatenate([batch.next_obs, next_action], -1))[0]
    assert np.abs(fixed - target(alone)).max() > 1e-3
    assert_close(after.target_params, moved(state.target_params, statistics))

    def critic_loss(critic):  # the statistics depend on the parameters, and so do gradients
        values, _ = plain_critics(critic, together(batch, next_action))
        return sum(((v[:B] - fixed) ** 2).mean() / 2 for v in values)

    def actor_loss(actor):
        action, log_prob = plain_policy({"actor": actor}, batch.obs, noises[1], True)
        inputs = jnp.concatenate([batch.obs, action], -1)
        q, _ = plain_critics(params["critic"], inputs, state.target_params)  # running statistics
        return (temperature * log_prob - jnp.minimum(*q)).mean()

    for name, loss in {"critic": critic_loss, "actor": actor_loss}.items():
        value, gradient = jax.jit(jax.value_and_grad(loss))(params[name])
        np.testing.assert_allclose(metrics[f"{name}_loss"].total, value, rtol=1e-4, atol=1e-5)
        assert_close(after.params[name], adam(params[name], state.opt_state[name], gradient, config))


@pytest.mark.parametrize(
    "options",
    [
        {"returns": "tqc", "num_critics": 3},
        {"returns": "c51:num_atoms=11", "layer_norm": True},
        {"network": as_network(FORMS["linen"]), "normalize_observations": True},
    ],
    ids=["qr", "c51", "module"],
)
def test_whatever_else_critics_are_all_their_dense_layers_are_normalized(options):
    # The critics see more than the actor, which is not normalized.
    agent = counted(algorithms.make(algorithms.SAC, {"target": "cross_q", "hidden_sizes": (16, 8)} | options).build(pendulum()))
    state = jax.eval_shape(agent.init, jax.random.key(0))
    inputs = 8 + 1 if "network" in options else 3 + 1
    shapes = {name: layer["mean"].shape for name, layer in state.inner.target_params["torso"].items()}
    assert shapes == {f"BatchNorm_{i}": (options.get("num_critics", 2), n) for i, n in enumerate((inputs, 16, 8))}
    params = getattr(state.inner.params, "params", state.inner.params)
    assert [name for name in ("actor", "critic") if "BatchNorm" in str(jax.tree.structure(params[name]))] == ["critic"]


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        ({"core": "gru"}, RandomWalk(True), r"SAC\.target='cross_q' normalizes .* core=GRU learns from windows of steps"),
        ({"network": "simba", "hidden_sizes": (8,)}, RandomWalk(True), r"network='simba' has other layers; use 'mlp'"),
        ({"network": as_network(CustomNetworks(Head(4), Head(1)))}, RandomWalk(True), r"network=Custom.* has other layers"),
        ({}, RandomWalk(False), r"those of discrete actions see none; use layer_norm=True"),
    ],
    ids=["core", "simba", "whole", "discrete"],
)
def test_what_cannot_be_normalized_is_refused(options, env, message):
    with pytest.raises(ValueError, match=message):
        algorithms.make(algorithms.SAC, {"target": "cross_q"} | options).build(env)
