"""A2C, IMPALA and A3C against plain Python loops that spell out their order of events."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import msrl_jax as msrl
from msrl_jax import algorithms
from msrl_jax.agents.agent import innermost
from msrl_jax.agents.transformations import Counted
from msrl_jax.algorithms import counted
from msrl_jax.fragments.counters import counter, to_int
from msrl_jax.policies import Layout, Placement, SingleLearnerCoarse
from tests.support.agents import still
from tests.support.compiled import collectives
from tests.support.ppo import plain_log_prob_and_entropy, plain_network
from tests.support.random_walk import RandomWalk
from tests.support.recurrent import plain_core
from tests.support.slow import slow_unless

T, E, W = 6, 16, 4
SMALL = {"num_envs": E, "unroll_length": T, "hidden_sizes": (8, 6), "learning_rate": 0.02}
# Clips on both sides of 1, so that each of them changes something.
VTRACE = {"clip_rho": 1.02, "clip_c": 0.97, "clip_pg_rho": 1.05, "vtrace_lambda": 0.9}
GRU = {"core": "gru:5"}


def build(name, env=None, make_agent=still, **overrides):
    workers = {"num_workers": W} if name == "a3c" else {}
    config = algorithms.get(name)(**SMALL | workers | overrides)
    return make_agent(algorithms.build(config, env or RandomWalk())), config


def start(agent, iterations=1):
    """The state after some iterations, in which the policy is no longer uniform."""
    state = jax.jit(agent.init)(jax.random.key(0))
    for _ in range(iterations):
        state, _ = jax.jit(agent.iteration)(state)
    return state


def wide(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


def log_scale_of(params) -> Any:
    return params["params"].get("log_scale") if "params" in params else None


def plain_outputs(params, obs, is_first=None, carry=(), xp=np):
    """Logits or means, values and the carry after observations `[T, E, ...]`; with a carry, those of a network with a GRU."""
    if not carry:
        return *plain_network(params, obs, False, xp), ()
    x, heads = obs, params["heads"]["params"]
    dense = lambda p, x: x @ p["kernel"] + p["bias"]
    for layer in ("Dense_0", "Dense_1"):
        x = xp.tanh(dense(params["torso"]["params"][layer], x))
    x, (hidden,) = plain_core("gru", params["core"], x, is_first, carry, xp)
    return dense(heads["actor_head"], x), dense(heads["critic_head"], x)[..., 0], (hidden[-1],)


def plain_rollout(agent, acting, env_state, obs, actor_keys, carry=()):
    """Steps the environments in Python; each of the parameters in `acting` acts in its share of them, in float64.

    The rows have besides what is seen the carry before the first step, and are followed by the carry after.
    """
    continuous, acting = agent.env.action_space.shape != (), [wide(params) for params in acting]
    split = jax.vmap(lambda k: jax.random.split(k, T + 1))(actor_keys)
    log_scale = log_scale_of(acting[0])
    is_first, carry = np.zeros(E, bool), tuple(map(np.asarray, carry))

    def network(obs, is_first, carry):
        shares = lambda x: np.split(np.asarray(x), len(acting))
        wide_obs = np.asarray(obs, np.float64)
        each = [
            plain_outputs(params, obs[None], first[None], carry)
            for params, obs, first, *carry in zip(acting, shares(wide_obs), shares(is_first), *map(shares, carry), strict=True)
        ]
        outputs, value, carry = zip(*each, strict=True)
        whole = lambda x: np.concatenate(x, 1)[0]
        return whole(outputs), whole(value), tuple(np.concatenate(x) for x in zip(*carry, strict=True))

    columns, step, before = [], jax.jit(agent.env.step), (is_first, carry)
    for t in range(1, T + 1):
        outputs, _, carry = network(obs, is_first, carry)
        if continuous:
            noise = np.stack([jax.random.normal(k, (2,)) for k in split[:, t]])
            action = (outputs + np.exp(log_scale) * noise).astype(np.float32)
            env_action = np.clip(action, -1, 1) * np.float32([0.5, 0.5]) + np.float32([0, 0.5])
        else:
            total = np.cumsum(np.exp(outputs), -1)
            uniform = np.asarray(jax.vmap(jax.random.uniform)(split[:, t]))
            env_action = action = (total <= uniform[:, None] * total[:, -1:]).sum(-1)
        log_prob, _ = plain_log_prob_and_entropy(outputs, log_scale, action, np)
        env_state, seen = step(env_state, jnp.asarray(env_action))
        bootstrap_value = network(seen.final_obs, np.zeros(len(obs), bool), carry)[1]
        row = (obs, action, log_prob, bootstrap_value, seen.reward, seen.terminated, seen.truncated)
        columns.append([np.asarray(x) for x in row])
        obs, is_first = seen.obs, np.asarray(seen.terminated | seen.truncated)
    rollout = [np.stack(x) for x in zip(*columns, strict=True)], before
    return env_state, obs, split[:, 0], rollout, tuple(np.where(is_first[:, None], 0, x) for x in carry)


def plain_gradient(params, rollout, last_obs, config, corrected=False):
    """Targets and advantages by a loop backwards, then the gradient of a loss written out here."""
    (obs, action, log_prob, bootstrap_value, reward, terminated, truncated), (is_first, carry) = rollout
    exact = wide(params)
    starts = np.concatenate([is_first[None], terminated | truncated])
    outputs, value, _ = plain_outputs(exact, np.concatenate([obs, last_obs[None]]).astype(np.float64), starts, carry)
    if not corrected:  # the actors say what the last observations are worth
        value[-1] = bootstrap_value[-1]
    now, _ = plain_log_prob_and_entropy(outputs[:-1], log_scale_of(exact), action, np)
    ratio = np.exp(now - log_prob) if corrected else np.ones(reward.shape)
    if corrected:
        rho, c = np.minimum(config.clip_rho, ratio), config.vtrace_lambda * np.minimum(config.clip_c, ratio)
        weight, kept = np.minimum(config.clip_pg_rho, ratio), 1.0
    else:
        rho, c, weight, kept = ratio, ratio * config.gae_lambda, ratio, config.gae_lambda
    target, advantage, after = np.zeros(reward.shape), np.zeros(reward.shape), np.zeros(reward.shape[1])
    for t in reversed(range(T)):
        future = np.where(terminated[t], 0, np.where(truncated[t], bootstrap_value[t], value[t + 1]))
        after = np.where(terminated[t] | truncated[t], 0, after)
        error = reward[t] + config.discount * future - value[t]
        advantage[t] = weight[t] * (error + config.discount * kept * after)
        after = rho[t] * error + config.discount * c[t] * after
        target[t] = value[t] + after
    if config.normalize_advantage != "none":
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)

    return wide(plain_slope(params, obs, starts[:-1], carry, action, advantage, target, config)), ratio


@jax.jit
@jax.grad
def plain_slope(params, obs, starts, carry, action, advantage, target, config):
    outputs, value, _ = plain_outputs(params, obs, starts, carry, jnp)
    now, entropy = plain_log_prob_and_entropy(outputs, log_scale_of(params), action)
    value_error = ((value - target) ** 2).mean() / 2
    return -(now * advantage).mean() + config.value_coef * value_error - config.entropy_coef * entropy.mean()


def plain_rmsprop(params, mean_square, gradient, config):
    """One update of RMSProp, with the gradient scaled down to its largest norm."""
    norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    gradient = jax.tree.map(lambda g: g * min(1.0, config.max_grad_norm / norm), gradient)
    mean_square = jax.tree.map(lambda m, g: config.rms_decay * m + (1 - config.rms_decay) * g**2, mean_square, gradient)
    step = lambda p, g, m: (p - config.learning_rate * g / np.sqrt(m + config.epsilon)).astype(np.float32)
    return jax.tree.map(step, params, gradient, mean_square), mean_square


def assert_close(got, want):
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=5e-6)
    jax.tree.map(close, got, want)


@pytest.mark.parametrize(
    ("continuous", "core", "gae_lambda"),
    [
        (False, GRU, 1.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((False, {}, 1.0), (True, {}, 0.9), (False, {}, 0.9), (True, {}, 1.0), (False, GRU, 0.9))
        ),
    ],
)
def test_one_iteration_of_a2c_equals_an_independent_implementation(continuous, core, gae_lambda):
    over = "batch" if gae_lambda < 1 else "none"
    agent, config = build("a2c", RandomWalk(continuous), gae_lambda=gae_lambda, normalize_advantage=over, **core)
    state = start(agent)
    _, obs, _, rollout, carry = plain_rollout(agent, [state.params], state.env_state, state.obs, state.actor_keys, state.carry)
    terminated, truncated = rollout[0][-2:]
    assert terminated.any() and (truncated & ~terminated).any()
    after, _ = jax.jit(agent.iteration)(state)
    np.testing.assert_allclose(after.obs, obs, rtol=1e-5, atol=1e-6)
    assert_close(after.carry, carry)
    gradient, _ = plain_gradient(state.params, rollout, np.asarray(obs), config)
    assert_close(after.params, plain_rmsprop(state.params, wide(state.opt_state[1][0].nu), gradient, config)[0])
    assert min(np.abs(np.asarray(a - b)).max() for a, b in pairs(after.params, state.params)) > 1e-4


def pairs(a, b):
    return zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)


@dataclasses.dataclass(frozen=True)
class Apart:
    """A policy of one's own: environments, actors, learners and server two devices each, the actors some iterations behind."""

    staleness: int

    def layout(self, devices, sizes):
        roles = ("env", "actor", "learner", "server")
        at = {role: Placement.over(role, devices[2 * i : 2 * i + 2]) for i, role in enumerate(roles)}
        return Layout(at, self.staleness)


def named(policy):
    return f"{type(policy).__name__}-{policy.staleness}"


STALE = [*(SingleLearnerCoarse(2, staleness=k) for k in (0, 1, 3)), Apart(2)]


@pytest.mark.parametrize(
    ("policy", "core"),
    [slow_unless(p.staleness == 1, p, {}, id=named(p)) for p in STALE]
    + [pytest.param(p, GRU, id=f"{named(p)}-gru", marks=pytest.mark.slow) for p in STALE],
)
def test_impala_acts_with_old_parameters_and_corrects_for_them(policy, core):
    """Iteration i acts with the parameters of iteration i - staleness, and updates the newest ones, from the actors' memory."""
    staleness, over = policy.staleness, "batch" if policy.staleness == 1 else "none"
    agent, config = build("impala", make_agent=counted, **VTRACE, **core, normalize_advantage=over)
    state = start(agent, 0)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes)
    after, metrics = program.run(state, 6, chunk=1)
    state = state.inner
    params, mean_square = state.params, wide(state.opt_state[1][0].nu)
    history, ratios = [params] * (staleness + 1), []
    env_state, obs, keys, carry = state.env_state, state.obs, state.actor_keys, state.carry
    for _ in range(6):
        env_state, obs, keys, rollout, carry = plain_rollout(agent, history[:1], env_state, obs, keys, carry)
        gradient, ratio = plain_gradient(params, rollout, np.asarray(obs), config, corrected=True)
        params, mean_square = plain_rmsprop(params, mean_square, gradient, config)
        history = [*history[1:], params]
        ratios.append(ratio)
    if staleness:
        assert np.min(ratios) < VTRACE["clip_c"] and np.max(ratios) > VTRACE["clip_pg_rho"]
    assert_close(program.unwrap(after).inner.params, params)
    np.testing.assert_array_equal(metrics["parameter_age"], np.minimum(np.arange(6), staleness))


@pytest.mark.long
@pytest.mark.parametrize("core", [pytest.param({}, id="none"), pytest.param(GRU, id="gru", marks=pytest.mark.slow)])
def test_impala_learns_from_the_batches_that_are_kept(core):
    """Every update draws one of the newest batches, which keeps log-probabilities, values and memory of its actors."""
    agent, config = build("impala", make_agent=counted, **VTRACE, **core, replay_batches=3, num_updates=2)
    state, iteration = start(agent, 0), jax.jit(agent.iteration)
    own = state.inner
    params, mean_square, kept, drawn = own.params, wide(own.opt_state[1][0].nu), [], []
    env_state, obs, keys, replay_key, carry = own.env_state, own.obs, own.actor_keys, own.replay_key, own.carry
    for i in range(5):
        state, metrics = iteration(state)
        env_state, obs, keys, rollout, carry = plain_rollout(agent, [params], env_state, obs, keys, carry)
        kept = [*kept[-2:], (i, rollout, np.asarray(obs))]
        replay_key, *draws = jax.random.split(replay_key, 3)
        batches = [kept[int(jax.random.randint(key, (), 0, len(kept)))] for key in draws]
        for _, *batch in batches:
            gradient, _ = plain_gradient(params, *batch, config, corrected=True)
            params, mean_square = plain_rmsprop(params, mean_square, gradient, config)
        drawn.append([i - made for made, *_ in batches])
        assert_close(state.inner.params, params)
        assert metrics["parameter_age"] == np.mean(drawn[-1])
    assert {age for ages in drawn[2:] for age in ages} == {0, 1, 2} and any(a != b for a, b in drawn[3:])


@pytest.mark.slow
@pytest.mark.parametrize("iterations", [2**24, 2**31, 2**32])
@pytest.mark.parametrize("name", ["impala", "a3c"])
def test_ages_are_right_where_counts_would_wrap(name, iterations):
    """A version of the parameters is a word of 32 bits; its age is a difference, which does not care."""
    program, state = aged(name)
    own = state.inner
    if name == "a3c":
        updates = [(iterations - 2) * W - W + worker + 1 for worker in range(W)]
        own = own._replace(fetched=jnp.array(np.array(updates) % 2**32, jnp.uint32))
    after, metrics = program.run(Counted(own, counter(iterations - 2), jnp.uint32((iterations - 2) % 2**32)), 4)
    np.testing.assert_array_equal(metrics["parameter_age"], [0, 1, 2, 2])
    assert to_int(program.unwrap(after).count) == iterations + 2
    assert name != "a3c" or np.all(metrics["gradient_age"][2:] == W - 1)


@functools.cache
def aged(name):
    agent, _ = build(name, make_agent=counted)
    state = start(agent, 0)
    return msrl.compile(agent.iteration, state, policy=SingleLearnerCoarse(2, staleness=2), axes=agent.axes), state


@pytest.mark.slow
@pytest.mark.parametrize(("room", "options"), [("", {}), ("_rnd", {}), ("", GRU)], ids=["plain", "rnd", "gru"])
def test_on_policy_impala_is_a2c(room, options):
    states, metrics = {}, {}
    for name, trace in (("a2c", "gae_lambda"), ("impala", "vtrace_lambda")):
        agent, _ = build(name + room, **options, **{trace: 1.0})
        run = jax.jit(lambda s, agent=agent: jax.lax.scan(lambda s, _: agent.iteration(s), s, None, length=5))
        states[name], metrics[name] = run(start(agent, 0))
    assert_close(*(innermost(state).params for state in states.values()))
    np.testing.assert_allclose(metrics["impala"]["approx_kl"], 0, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "core"),
    [
        *(slow_unless(p.staleness == 2, p, {}, id=named(p)) for p in (SingleLearnerCoarse(2, staleness=2), Apart(1))),
        slow_unless(False, SingleLearnerCoarse(2), {}, id=named(SingleLearnerCoarse(2))),
        slow_unless(False, Apart(1), GRU, id="gru"),
    ],
)
def test_a3c_applies_gradients_in_turn_and_workers_fetch_after_their_own(policy, core):
    staleness = policy.staleness
    agent, config = build("a3c", make_agent=counted, normalize_advantage="worker" if staleness == 1 else "none", **core)
    state = start(agent, 0)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes)
    after, metrics = program.run(state, 4, chunk=1)
    state = state.inner
    server, mean_square, copies = state.params, wide(state.opt_state[1][0].nu), [state.params] * W
    history, ages, fetched, count = [copies] * (staleness + 1), [], [0] * W, 0
    env_state, obs, keys, carry = state.env_state, state.obs, state.actor_keys, state.carry
    for _ in range(4):
        env_state, obs, keys, rollout, carry = plain_rollout(agent, history[0], env_state, obs, keys, carry)
        gradients = []
        for worker in range(W):
            own = slice(worker * E // W, (worker + 1) * E // W)
            mine = [x[:, own] for x in rollout[0]], jax.tree.map(lambda x, own=own: x[own], rollout[1])
            gradients.append(plain_gradient(copies[worker], mine, np.asarray(obs)[own], config)[0])
        copies = list(copies)
        ages.append([])
        for worker in range(W):
            ages[-1].append(count - fetched[worker])
            server, mean_square = plain_rmsprop(server, mean_square, gradients[worker], config)
            count += 1
            copies[worker], fetched[worker] = server, count
        history = [*history[1:], copies]
    got = program.unwrap(after).inner
    assert_close(got.params, server)
    assert_close(got.worker_params, jax.tree.map(lambda *x: np.stack(x), *copies))
    np.testing.assert_array_equal(got.fetched, fetched)
    np.testing.assert_allclose(metrics["gradient_age"], np.mean(ages, -1))
    assert set(ages[-1]) == {W - 1}
    np.testing.assert_array_equal(metrics["parameter_age"], np.minimum(np.arange(4), staleness))


def test_acting_goes_on_from_a_carry():
    agent, _ = build("a2c", **GRU)
    state, carry = start(agent, 0), agent.initial_carry(10)
    params, memory = wide(state.params), (np.zeros((10, 5)),)
    for obs in np.linspace(-1, 1, 60).reshape(2, 10, 3):
        action, carry = agent.act(state, jnp.asarray(obs), None, carry)
        logits, _, memory = plain_outputs(params, obs[None], np.zeros((1, 10), bool), memory)
        np.testing.assert_array_equal(action, logits[0].argmax(-1))
        assert_close(carry, memory)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"core.size": 8}, "A2C.core.size=8: core is None, which has no size; leave it out, or give core='gru'"),
        ({"core": nn.GRUCell(8), "core.size": 8}, "A2C.core.size=8: core is GRUCell("),
        ({"core": "gru", "shared_torso": True}, "A2C.shared_torso has no effect with core=GRU; leave it out"),
    ],
)
def test_fields_that_a_memory_leaves_without_effect_are_refused(options, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        msrl.train("a2c", RandomWalk(), **options)


LARGE = {"num_envs": 4 * E, "unroll_length": 2 * T}  # more steps and environments than scalars are allowed


@pytest.mark.long
def test_devices_exchange_every_gradient_of_a3c_once_and_a_few_scalars():
    agent, _ = build("a3c", num_workers=8, **LARGE)
    found = collectives(agent)
    assert {kind for kind, _ in found} == {"all-gather", "all-reduce"}
    # With each gradient goes a number: how many updates the server had made when its worker fetched the parameters.
    assert sum(size for kind, size in found if kind == "all-gather") == 8 * (num_params(agent) + 1)
    assert sum(size for kind, size in found if kind == "all-reduce") <= 8


def num_params(agent):
    return sum(x.size for x in jax.tree.leaves(jax.eval_shape(agent.init, jax.random.key(0)).params))
