"""SAC and TD3 with memories: updates against plain formulas along windows, what is stored and sent, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms import SAC, TD3, counted
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.masks import observation_type
from msrl_jax.loops.sequence_replay import sequence_buffer
from msrl_jax.networks.custom_network import CustomNetworks
from tests.support.compiled import collectives
from tests.support.off_policy import adam, assert_close, counting, num_params, one, start, wide
from tests.support.privileged import pendulum
from tests.support.random_walk import RandomWalk
from tests.support.recurrent import plain_core

E, T, B, H, BURN_IN, L, N = 8, 4, 16, 5, 3, 4, 2
SMALL = {
    "num_envs": E,
    "unroll_length": T,
    "num_updates": 1,
    "batch_size": B,
    "replay.capacity": 512,
    "replay.learning_starts": 128,
    "hidden_sizes": (6,),
    "core": f"gru:{H}",
    "burn_in": BURN_IN,
    "trace_length": L,
    "replay.n_step": N,
    "learning_rate": 3e-3,
}
PARTS = ("actor", "critic")


def build(name, env=None, **options):
    config = msrl.algorithms.make(name, SMALL | options)
    return msrl.algorithms.build(config, env or RandomWalk(True)), config


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def plain_head(params, x):
    """A dense layer of ReLUs and a linear layer."""
    p = params["params"]
    return dense(p["Dense_0"], jnp.maximum(dense(p["torso"]["Dense_0"], x), 0))


def remembered(params, obs, begins, carry, xp=jnp):
    """What a memory makes of observations, and its carries, `[T, E, H]`."""
    features = xp.maximum(dense(params["torso"]["params"]["Dense_0"], obs), 0)
    return plain_core("gru", params["core"], features, begins, carry, xp)


def along(name, params, window, constants):
    """What a memory makes of the `L` steps after the burn-in, and of every step's successor; the burn-in has no gradient."""
    ends = window.terminated | window.truncated
    begins = np.concatenate([np.zeros((1, B), bool), ends[:-1]])
    carry = tuple(np.float64(m[0]) for m in window.carry[name])
    _, before = remembered(wide(constants), np.float64(window.obs[:BURN_IN]), begins[:BURN_IN], carry, np)
    start = tuple(m[-1] for m in before)
    outputs, carries = remembered(params, window.obs[BURN_IN:], begins[BURN_IN:], start)
    nothing = np.zeros((1, B), bool)
    after = [
        remembered(params, window.next_obs[BURN_IN + t][None], nothing, tuple(m[t] for m in carries))[0][0]
        for t in range(L + N - 1)
    ]
    return outputs[:L], jnp.stack(after)


def sums(window, discount):
    """Of each step: rewards up to the end of the episode, the weight of the successor's value, and whose successor it is."""
    reward, weight, last = np.zeros((3, L, B))
    for t, b in np.ndindex(L, B):
        weight[t, b] = 1.0
        for k in range(t, t + N):
            reward[t, b] += weight[t, b] * window.reward[BURN_IN + k, b]
            weight[t, b] *= discount * (not window.terminated[BURN_IN + k, b])
            last[t, b] = k
            if window.terminated[BURN_IN + k, b] or window.truncated[BURN_IN + k, b]:
                break
    return reward, weight, last.astype(int)


def values(critic, features, action):
    inputs = jnp.concatenate([features, action], -1)
    return jnp.stack([plain_head(one(critic["heads"], i), inputs)[..., 0] for i in range(2)])


def squashed(outputs, noise):
    """Actions of SAC and their log-probabilities."""
    loc, log_scale = jnp.split(outputs, 2, -1)
    u = loc + jnp.exp(log_scale) * noise
    density = jnp.exp(-(noise**2) / 2) / (jnp.exp(log_scale) * np.sqrt(2 * np.pi))
    return jnp.tanh(u), (jnp.log(density) - jnp.log(1 - jnp.tanh(u) ** 2)).sum(-1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sac", pytest.param("td3", marks=pytest.mark.slow)])
def test_one_update_equals_a_loop_over_the_steps_of_windows(name):
    options = {"initial_temperature": 0.3, "target_entropy": -1.5} if name == "sac" else {"policy_period": 1}
    env = RandomWalk(True)
    agent, config = build(name, env, **options)
    iterate = counting(agent)
    state = start(agent, 9, iterate)
    # Parameters far from those at the start, so that much depends on what is remembered.
    keys = iter(jax.random.split(jax.random.key(1), 99))
    far = lambda params: jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    state = state._replace(params=state.params | {part: far(state.params[part]) for part in PARTS})
    state = state._replace(target_params=far(state.target_params))
    after, metrics = iterate(state, 9)

    types = observation_type(env), action_type(env.action_space)
    carry = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.carry)
    drawn = jax.jit(sequence_buffer(*types, config, carry).sample)(after.replay, jax.random.split(state.replay_key)[1])
    window = jax.tree.map(np.asarray, drawn.experience)
    ends = window.terminated | window.truncated
    assert window.terminated.any() and (window.truncated & ~window.terminated).any() and ends[:BURN_IN].any()
    assert all(window.carry[part][0].any() for part in PARTS)
    reward, weight, last = sums(window, config.discount)
    of_last = lambda x: jnp.take_along_axis(x, last[..., None], 0)

    key, params = jax.random.split(state.key)[1], state.params
    # Steps are in the order of windows.
    by_step = lambda noise: np.asarray(noise).reshape(B, L, 2).swapaxes(0, 1)
    draw = lambda keys: jnp.stack([jax.random.normal(k, (2,)) for k in keys])
    if name == "sac":
        next_noise, noise = (by_step(draw(keys)) for keys in jax.random.split(key, (2, B * L)))
        temperature, target_critic = np.exp(params["log_temperature"]), state.target_params
        policy = lambda actor, features, noise: squashed(plain_head(actor["heads"], features), noise)
        features = of_last(along("actor", params["actor"], window, params["actor"])[1])
        next_action, log_prob = policy(params["actor"], features, next_noise)
    else:
        noise = np.clip(0.2 * by_step(draw(jax.random.split(key, B * L))), -0.5, 0.5)
        temperature, target_critic, target_actor = 0.0, state.target_params["critic"], state.target_params["actor"]
        policy = lambda actor, features, _: (jnp.tanh(plain_head(actor["heads"], features)), 0.0)
        features = of_last(along("actor", target_actor, window, target_actor)[1])
        next_action, log_prob = jnp.clip(policy(target_actor, features, None)[0] + noise, -1, 1), 0.0
    seen = of_last(along("critic", target_critic, window, target_critic)[1])
    target = reward + weight * (values(target_critic, seen, next_action).min(0) - temperature * log_prob)

    def critic_loss(critic):
        q = values(critic, along("critic", critic, window, params["critic"])[0], window.action[BURN_IN : BURN_IN + L])
        return ((q - target) ** 2 / 2).sum(0).mean()

    def actor_loss(actor):
        action, log_prob = policy(actor, along("actor", actor, window, params["actor"])[0], noise)
        q = values(params["critic"], along("critic", params["critic"], window, params["critic"])[0], action)
        return (temperature * log_prob - (q.min(0) if name == "sac" else q[0])).mean()

    for part, loss in zip(PARTS, (actor_loss, critic_loss), strict=True):
        value, gradient = jax.jit(jax.value_and_grad(loss))(params[part])
        np.testing.assert_allclose(metrics[f"{part}_loss"].total, value, rtol=1e-4, atol=1e-5)
        want = adam(params[part], state.opt_state[part], gradient, config)
        assert_close(after.params[part], want)
        changed = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).max(), after.params[part], params[part])
        assert min(jax.tree.leaves(changed)) > 1e-5


@pytest.mark.long
def test_actions_and_stored_carries_are_those_of_the_whole_history():
    agent, _ = build("td3", exploration_noise=0.0, learning_rate=1e-30)
    iterate, rounds = counting(agent), 8
    state = jax.jit(agent.init)(jax.random.key(3))
    bigger = {part: jax.tree.map(lambda x: 3 * x, state.params[part]) for part in PARTS}
    after = state = state._replace(params=bigger)
    for i in range(rounds):
        after, _ = iterate(after, i)
    for a, b in zip(*(jax.tree.leaves(s.params) for s in (state, after)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-25)

    def history(leaf):  # [G, steps, E / G, ...] of a buffer that is not full
        x = np.moveaxis(np.asarray(leaf)[:, : rounds * T], 0, 1)
        return x.reshape(rounds * T, E, *x.shape[3:])

    obs, action, _, terminated, truncated, _, *carries = map(history, after.replay.items)
    begins = np.concatenate([np.ones((1, E), bool), (terminated | truncated)[:-1]])
    for part, stored in zip(PARTS, carries, strict=True):
        nothing = (np.zeros((E, H)),)
        outputs, (computed, *_) = remembered(wide(state.params[part]), np.float64(obs), begins, nothing, np)
        before = np.concatenate([np.zeros((1, E, H)), computed[:-1]]) * ~begins[..., None]
        np.testing.assert_allclose(stored, before, rtol=1e-4, atol=1e-5)
        if part == "actor":
            best = np.tanh(plain_head(wide(state.params["actor"]["heads"]), outputs))
            np.testing.assert_allclose(action[128 // E :], best[128 // E :], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_devices_exchange_gradients_once_and_actors_receive_the_actor_and_what_critics_remember():
    agent = counted(build("sac")[0])
    found = [size for kind, size in collectives(agent) if kind == "all-reduce"]
    assert len(found) == len(collectives(agent)) <= 2
    assert num_params(agent) <= found[-1] <= num_params(agent) + 8 and all(size <= 8 for size in found[:-1])
    agent = counted(build("sac", pendulum())[0])  # whose critics see more than actors
    state = jax.jit(agent.init)(jax.random.key(0))
    program = msrl.compile(agent.iteration, state, policy=msrl.policies.SingleLearnerCoarse(actors=2), axes=agent.axes)
    down = {c.value for c in program.explain().crossings if c.destination == "actors"}
    params = state.inner.params
    sent = {"actor": params["actor"], "critic": {part: params["critic"][part] for part in ("torso", "core")}}
    names = {"state.inner.params" + jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(sent)}
    assert down == names | {"state.version"}


@pytest.mark.parametrize("name", ["sac", "td3"])
def test_critics_join_what_they_remember_the_action_and_what_they_alone_see(name):
    agent, _ = build(name, pendulum())
    params = jax.eval_shape(agent.init, jax.random.key(0)).params
    inputs = lambda part: params[part]["heads"]["params"]["torso"]["Dense_0"]["kernel"].shape[-2]
    assert (inputs("actor"), inputs("critic")) == (H, H + 3 + 1)


def test_what_does_not_fit_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match=r"SAC\.core learns from sequences .* use core=None, or leave data out"):
        SAC(core="gru", data="steps.npz")
    with pytest.raises(ValueError, match=r"SAC\.core='gruu': use one of gru, .* \(did you mean 'gru'\?\)"):
        SAC(core="gruu")
    with pytest.raises(ValueError, match=r"TD3: .*learning_starts=1000: a batch of 256 windows.*\(burn_in \+ trace_length"):
        msrl.algorithms.build(TD3(core="gru"), RandomWalk(True))
    with pytest.raises(ValueError, match=r"network=CustomNetworks\(\.\.\.\) has no place for a core"):
        build("sac", network=CustomNetworks())
