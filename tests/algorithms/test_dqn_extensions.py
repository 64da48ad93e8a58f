"""DQN with implicit quantiles and with Munchausen's rewards: updates against NumPy, formulas by hand, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms
from msrl_jax.algorithms import DQN, IQN, ApexDQN, Munchausen
from msrl_jax.losses.munchausen import munchausen_reward, soft_target
from msrl_jax.losses.quantiles import quantile_huber_loss
from tests.support import off_policy as reference
from tests.support.maze import Maze
from tests.support.off_policy import B, plain_q, wide
from tests.support.random_walk import RandomWalk

N, TARGET_N, K = 3, 4, 5
MOVING = {"tau": 0.1, "num_updates": 1, "learning_rate": 0.03}
IMPLICIT = {"returns": IQN(N, TARGET_N, K)}
MUNCHAUSEN = {"target": Munchausen(0.8, temperature=0.5, clip=-0.6)}


def plain_quantiles(params, obs, fraction, xp):
    """The quantiles `[B, 3, N]` at fractions `[B, N]`, row by row: one layer, times that of the cosines, one layer, a head."""
    p = params["params"]
    relu = lambda name, x: xp.maximum(x @ p[name]["kernel"] + p[name]["bias"], 0)
    features = xp.maximum(obs @ p["torso"]["Dense_0"]["kernel"] + p["torso"]["Dense_0"]["bias"], 0)
    columns = []
    for j in range(fraction.shape[1]):
        embedded = relu("embedding", xp.stack([xp.cos(np.pi * i * fraction[:, j]) for i in range(64)], -1))
        columns.append(relu("stream", features * embedded) @ p["head"]["kernel"] + p["head"]["bias"])
    return xp.stack(columns, -1)


def plain_soft(values, outputs):
    """Log-probabilities `[B, 3]` of the policy, and the average over actions of outputs `[B, 3, N]` and entropy `[B, N]`."""
    logits = values / 0.5
    log_policy = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_policy, (np.exp(log_policy)[..., None] * (outputs - 0.5 * log_policy[..., None])).sum(1)


def plain_loss(taken, target, fraction):
    """Pair by pair, the Huber loss of every quantile and every sample of its target."""
    total = jnp.zeros(len(taken))
    for i in range(taken.shape[1]):
        for j in range(target.shape[1]):
            error = target[:, j] - taken[:, i]
            huber = jnp.where(jnp.abs(error) < 1, error**2 / 2, jnp.abs(error) - 0.5)
            total += jnp.abs(fraction[:, i] - (error < 0)) * huber / target.shape[1]
    return total


@pytest.mark.long
@pytest.mark.parametrize(
    ("implicit", "munchausen"),
    [
        pytest.param(True, False, id="iqn"),
        pytest.param(False, True, id="m-dqn"),
        pytest.param(True, True, id="m-iqn", marks=pytest.mark.slow),
    ],
)
def test_an_update_equals_an_independent_implementation(implicit, munchausen):
    options = MOVING | (IMPLICIT if implicit else {}) | (MUNCHAUSEN if munchausen else {"target": "double"})
    agent, config = reference.build("dqn", RandomWalk(), **options)
    iterate = reference.counting(agent)
    state = reference.start(agent, 8, iterate)
    state = state._replace(target_params=jax.tree.map(jnp.negative, state.params))  # it would choose otherwise
    after, _ = iterate(state, 8)
    batch, key = reference.drawn(RandomWalk(), config, state, after)
    rows = np.arange(B)

    def outputs(params, obs, fraction, xp=np):
        return plain_quantiles(params, obs, fraction, xp) if implicit else plain_q(params, obs, False, xp)[..., None]

    keys = jax.random.split(key)
    fraction, next_fraction = (np.asarray(jax.random.uniform(k, (B, n))) for k, n in zip(keys, (N, TARGET_N), strict=True))
    midpoints = np.tile((np.arange(K) + 0.5) / K, (B, 1))
    target_params, online = wide(state.target_params), wide(state.params)
    following = outputs(target_params, batch.next_obs, next_fraction)
    reward = batch.reward
    if munchausen:
        values = outputs(target_params, batch.next_obs, midpoints).mean(-1)
        following = plain_soft(values, following)[1]
        log_policy, _ = plain_soft(outputs(target_params, batch.obs, midpoints).mean(-1), np.zeros((B, 3, 1)))
        chosen = 0.5 * log_policy[rows, batch.action]
        assert (chosen < -0.6).any() and (chosen > -0.6).any()
        reward = reward + 0.8 * np.maximum(chosen, -0.6)
    else:
        following = following[rows, outputs(online, batch.next_obs, midpoints).mean(-1).argmax(-1)]
    target = reward[:, None] + batch.discount[:, None] * following

    def loss(params):
        taken = outputs(params, batch.obs, fraction, jnp)[rows, batch.action]
        each = plain_loss(taken, target, fraction) if implicit else (taken - target)[:, 0] ** 2 / 2
        return each.mean(), target.mean(-1) - taken.mean(-1)

    gradient, error = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    reference.assert_close(after.params, reference.adam(state.params, state.opt_state, gradient, config))
    np.testing.assert_allclose(after.pending.td_error[0], error, rtol=1e-4, atol=1e-5)


def test_soft_targets_and_rewards_by_hand():
    """With a temperature of 1 and values log 1 and log 3, the policy is 1/4 and 3/4."""
    value, outputs = jnp.log(jnp.array([1.0, 3.0])), jnp.array([[4.0, 8.0], [0.0, 4.0]])
    entropy = -(0.25 * np.log(0.25) + 0.75 * np.log(0.75))
    np.testing.assert_allclose(soft_target(value, outputs, 1.0), [1 + entropy, 5 + entropy], rtol=1e-6)
    np.testing.assert_allclose(munchausen_reward(value, jnp.int32(1), 0.9, 1.0, -1.0), 0.9 * np.log(0.75), rtol=1e-6)
    np.testing.assert_allclose(munchausen_reward(value, jnp.int32(0), 0.9, 1.0, -1.0), -0.9, rtol=1e-6)  # log(1/4) is clipped
    illegal, more = jnp.append(value, -jnp.inf), jnp.append(outputs, jnp.ones((1, 2)), 0)
    np.testing.assert_allclose(soft_target(illegal, more, 1.0), [1 + entropy, 5 + entropy], rtol=1e-6)


def test_the_loss_at_fractions_by_hand():
    # Errors of the first 2 and -1, of the second 1 and -2; Huber losses 1.5 and 0.5.
    want = (0.1 * 1.5 + 0.9 * 0.5) / 2 + (0.6 * 0.5 + 0.4 * 1.5) / 2
    quantile, target, fraction = jnp.array([0.0, 1.0]), jnp.array([2.0, -1.0]), jnp.array([0.1, 0.6])
    np.testing.assert_allclose(quantile_huber_loss(quantile, target, fraction=fraction), want, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dueling": True}, {"target": "munchausen"}, {"hidden_sizes": (8,), "layer_norm": True}])
def test_implicit_quantiles_take_legal_actions_alone(options):
    agent, _ = reference.build("dqn", Maze(), **IMPLICIT, **options)
    state = reference.start(agent, 12)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    action = np.asarray(agent.act(state, state.obs, None, ())[0])
    assert np.asarray(state.obs.action_mask)[np.arange(len(action)), action].all()


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (DQN, {"replay.n_step": 2}, r"DQN\.target=munchausen adds .* of replay.n_step=2 steps .*; use replay.n_step=1"),
        (ApexDQN, {}, r"ApexDQN\.target=munchausen adds .* of replay.n_step=3 steps .*; use replay.n_step=1"),
        (DQN, {"returns": "c51"}, r"returns='c51' has probabilities; use returns='expected', 'qr' or 'iqn'"),
    ],
)
def test_what_munchausens_targets_have_no_use_for_is_refused(config, options, message):
    with pytest.raises(ValueError, match=message) as error:
        algorithms.make(config, {"target": "munchausen", **options})
    assert "\n" not in str(error.value)
