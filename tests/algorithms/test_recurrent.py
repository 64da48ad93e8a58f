"""Recurrent networks and recurrent PPO, against plain loops; what they exchange between devices; acting with a carry."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms import GRU, LRU, LSTM, GTrXL, MinGRU, RecurrentPPO
from msrl_jax.fragments.support.random_keys import key_for
from msrl_jax.networks.unrolls import reset_carry
from msrl_jax.registry.resolve import objects
from tests.support.agents import make_counted, make_still, still
from tests.support.compiled import collectives
from tests.support.ppo import plain_value_scale
from tests.support.random_walk import RandomWalk
from tests.support.recurrent import plain_core
from tests.support.slow import mostly_slow

T, E, H, INPUTS = 7, 6, 8, 3
SMALL = {"num_envs": 16, "unroll_length": 8, "num_epochs": 2, "num_minibatches": 2, "hidden_sizes": (6,), "core": "gru:5"}


CORES = {"gru": GRU(H), "lstm": LSTM(H), "min_gru": MinGRU(H), "lru": LRU(H), "gtrxl": GTrXL(H, heads=2, context=3)}
differentiated = pytest.mark.parametrize("unrolled", mostly_slow([*CORES], "lru"), indirect=True)


@pytest.fixture(scope="module", params=CORES)
def unrolled(request):
    """A core, parameters without special values, inputs, where episodes start, and a carry from before."""
    core = CORES[request.param].make(INPUTS)
    scale = 0.3 if request.param in ("lru", "gtrxl") else 0.7
    keys_of_carry, *keys = jax.random.split(jax.random.key(0), 64)
    keys = iter(keys)
    shapes = jax.eval_shape(lambda k: core.init(k, INPUTS), jax.random.key(0))
    params = jax.tree.map(lambda x: scale * jax.random.normal(next(keys), x.shape), shapes)
    inputs = jax.random.normal(next(keys), (T, E, INPUTS))
    is_first = jax.random.bernoulli(jax.random.key(1), 0.3, (T, E)).at[0, 2].set(True)
    carry = core.initial_carry((E,))
    step = jax.jit(core.step)
    for x in jax.random.normal(keys_of_carry, (3, E, INPUTS)):
        _, carry = step(params, x, carry)
    assert is_first.any() and not is_first.all() and is_first[0].any()
    return request.param, core, params, inputs, is_first, carry


def test_an_unroll_is_a_loop_over_steps_that_forgets_between_episodes(unrolled):
    name, core, params, inputs, is_first, carry = unrolled
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, inputs, carry))
    want = plain_core(name, *wide[:2], np.asarray(is_first), wide[2], np)
    got = jax.jit(core.unroll)(params, inputs, is_first, carry)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, want)


def test_steps_compute_what_the_unroll_does(unrolled):
    _, core, params, inputs, _, carry = unrolled
    want, step = jax.jit(core.unroll)(params, inputs, jnp.zeros((T, E), bool), carry), jax.jit(core.step)
    for t, x in enumerate(inputs):
        output, carry = step(params, x, carry)
        expected = jax.tree.map(lambda x, t=t: x[t], want)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), (output, carry), expected)


@differentiated
def test_gradients_equal_the_plain_loop(unrolled):
    """The gradients of all outputs with respect to all inputs."""
    name, core, params, inputs, is_first, carry = unrolled

    def by_steps(params, inputs, is_first, carry):
        def step(carry, now):
            outputs, carry = core.step(params, now[0], reset_carry(now[1], carry))
            return carry, (outputs, carry)

        return jax.lax.scan(step, carry, (inputs, is_first))[1]

    # As plain formulas, attention takes minutes to compile; its steps are compared with them above.
    plain = by_steps if name == "gtrxl" else functools.partial(plain_core, name)

    def loss(unroll, params, inputs, carry):
        if name == "gtrxl":  # flags are no numbers to differentiate by
            carry = carry[0], jax.lax.stop_gradient(carry[1])
        found = jax.tree.leaves(unroll(params, inputs, is_first, carry))
        return sum((jax.random.normal(jax.random.key(i), x.shape) * x).sum() for i, x in enumerate(found))

    grad = lambda unroll: jax.jit(jax.grad(lambda *args: loss(unroll, *args), (0, 1, 2)))(params, inputs, carry)
    want = grad(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grad(core.unroll), want)


@pytest.mark.long
@differentiated
def test_batched_gradients_equal_the_gradients_of_each_member(unrolled):
    _, core, params, inputs, is_first, carry = unrolled
    many = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x, -x]), params)
    gradient = jax.grad(lambda params: (core.unroll(params, inputs, is_first, carry)[0] ** 2).sum())
    each = [gradient(jax.tree.map(lambda x, i=i: x[i], many)) for i in range(3)]
    together = jax.vmap(gradient)(many)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), together, stacked)


def test_recurrent_matrices_start_orthogonal_and_the_forget_gate_open():
    params = LSTM(H).make(INPUTS).init(jax.random.key(0), INPUTS)
    for matrix in np.split(params["recurrent"], 4, axis=1):
        np.testing.assert_allclose(matrix @ matrix.T, np.eye(H), atol=1e-5)
    np.testing.assert_array_equal(params["bias"].reshape(4, H), [[0] * H, [1] * H, [0] * H, [0] * H])


def test_units_of_a_new_min_gru_remember_for_2_to_128_steps():
    """A unit that keeps a share `k` at every step remembers for `1 / (1 - k)` steps."""
    core = MinGRU(64).make(INPUTS)
    params = core.init(jax.random.key(0), INPUTS)
    kept, _ = core.step(params, jnp.zeros(INPUTS), (jnp.ones(64),))
    np.testing.assert_allclose(1 / (1 - np.float64(kept)), np.linspace(2, 128, 64), rtol=1e-4)


def test_units_of_a_new_lru_forget_a_thousandth_to_a_tenth_in_a_step_and_turn_by_at_most_18_degrees():
    core = LRU(64).make(INPUTS)
    params = core.init(jax.random.key(0), INPUTS)
    _, (real, imaginary) = core.step(params, jnp.zeros(INPUTS), (jnp.ones(64), jnp.zeros(64)))
    kept, turned = np.hypot(real, imaginary), np.degrees(np.arctan2(imaginary, real))
    assert 0.9 <= kept.min() < 0.92 and 0.99 < kept.max() <= 0.999
    assert 0 < turned.min() < 2 and 16 < turned.max() <= 18


def build(env, **overrides):
    return make_still("recurrent_ppo", env, **SMALL | overrides)


def start(agent, iterations):
    state = jax.jit(agent.init)(jax.random.key(0))
    iterate = jax.jit(agent.iteration)
    for _ in range(iterations):
        state, _ = iterate(state)
    return state


@pytest.fixture(scope="module", params=["gru", *(pytest.param(x, marks=pytest.mark.slow) for x in ("lstm", "min_gru"))])
def walk(request):
    """A recurrent agent after two iterations: episodes have ended within an unroll and go on over its end."""
    over = {"gru": "minibatch", "lstm": "batch", "min_gru": "minibatch"}[request.param]
    config = RecurrentPPO(**SMALL | {"core": f"{request.param}:5"}, clip_value=0.1, normalize_advantage=over)
    agent = still(objects(config).build(RandomWalk()))
    return config, agent, start(agent, 2)


def plain_network(core, params, obs, is_first, carry, xp=jnp):
    """Log-probabilities of all actions, values and carry, written out."""
    dense = lambda p, x: x @ p["kernel"] + p["bias"]
    features = xp.tanh(dense(params["torso"]["params"]["Dense_0"], obs))
    h, carries = plain_core(core, params["core"], features, is_first, carry, xp)
    heads = params["heads"]["params"]
    logits = dense(heads["actor_head"], h)
    log_probs = logits - xp.log(xp.exp(logits).sum(-1, keepdims=True))
    return log_probs, dense(heads["critic_head"], h)[..., 0], tuple(m[-1] for m in carries)


def chosen_of(log_probs, action, xp=jnp):
    return (log_probs * (action[..., None] == xp.arange(log_probs.shape[-1]))).sum(-1)


def plain_rollout(core, agent, state):
    """Steps the environments in Python; everything of the network comes from float64 NumPy."""
    steps = SMALL["unroll_length"]
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), state.params)
    keys = jax.vmap(lambda k: jax.random.split(k, steps + 1))(state.actor_keys)[:, 1:]
    env_state, obs, is_first = state.env_state, state.obs, np.zeros(SMALL["num_envs"], bool)
    carry, columns, step = tuple(np.asarray(m, np.float64) for m in state.carry), [], jax.jit(agent.env.step)
    for t in range(steps):
        one = lambda x, is_first, carry: plain_network(core, params, np.asarray(x, np.float64)[None], is_first[None], carry, np)
        log_probs, value, carry = one(obs, is_first, carry)
        cumulative = np.cumsum(np.exp(log_probs[0]), -1)
        action = np.array([np.searchsorted(c, jax.random.uniform(k)) for c, k in zip(cumulative, keys[:, t], strict=True)])
        env_state, out = step(env_state, jnp.asarray(action))
        bootstrap_value = one(out.final_obs, np.zeros_like(is_first), carry)[1]
        row = (obs, is_first, action, chosen_of(log_probs[0], action, np), value[0], bootstrap_value[0])
        columns.append([np.asarray(x) for x in (*row, out.reward, out.terminated, out.truncated)])
        obs, is_first = out.obs, np.asarray(out.terminated | out.truncated)
    return obs, tuple(np.where(is_first[:, None], 0, m) for m in carry), [np.stack(x) for x in zip(*columns, strict=True)]


def plain_update(config, state, rollout, num_updates=None):
    """Advantages by a loop; then one optax update per minibatch of sequences, from a loss written out here.

    Also returns how far the parameters after `num_updates` diverge from the policy that acted, on each later minibatch.
    """
    obs, is_first, action, log_prob, value, bootstrap_value, reward, terminated, truncated = rollout
    value, bootstrap_value = (x * plain_value_scale(state.value_scale) for x in (value, bootstrap_value))
    advantage, after, future = np.zeros_like(value), 0.0, bootstrap_value[-1]
    for t in reversed(range(len(value))):
        future = np.where(truncated[t], bootstrap_value[t], future) * ~terminated[t]
        after = reward[t] + config.discount * (future + config.gae_lambda * after * ~(terminated[t] | truncated[t])) - value[t]
        advantage[t], future = after, value[t]
    standardize = lambda a: (a - a.mean()) / (a.std() + 1e-8)
    per_minibatch, target = config.normalize_advantage == "minibatch", advantage + value
    value, target = (x / plain_value_scale(state.value_scale, target) for x in (value, target))
    advantage = advantage if per_minibatch else standardize(advantage)
    old = [jnp.asarray(x) for x in (obs, is_first, action, log_prob, value, advantage, target)]

    def loss(params, e):
        o, b, acted, log_prob, value, a, target = (x[:, e] for x in old)
        a = standardize(a) if per_minibatch else a
        log_probs, v, _ = plain_network(config.core.option, params, o, b, [m[e] for m in state.carry])
        ratio = jnp.exp(chosen_of(log_probs, acted) - log_prob)
        clipped = jnp.where(a > 0, jnp.minimum(ratio, 1 + config.clip_ratio), jnp.maximum(ratio, 1 - config.clip_ratio))
        near = jnp.clip(v, value - config.clip_value, value + config.clip_value)
        value_error = jnp.maximum((v - target) ** 2, (near - target) ** 2).mean() / 2
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return -(clipped * a).mean() + config.value_coef * value_error - config.entropy_coef * entropy

    tx = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optax.adam(config.learning_rate, eps=1e-5))
    _, *epoch_keys = jax.random.split(state.key, config.num_epochs + 1)
    params, opt_state = state.params, state.opt_state[:2]
    m = config.num_minibatches
    order = jnp.tile(jnp.arange(m)[:, None], (1, config.num_envs // m))
    shuffled = [jax.random.permutation(key, order, axis=0, independent=True) for key in epoch_keys]
    minibatches = [np.arange(config.num_envs // m) * m + within for epoch in shuffled for within in np.asarray(epoch)]
    every = range(0, len(minibatches), m)
    assert all(set(np.concatenate(minibatches[i : i + m])) == set(range(config.num_envs)) for i in every)
    gradient = jax.jit(jax.grad(loss))
    for e in minibatches[:num_updates]:
        updates, opt_state = tx.update(gradient(params, e), opt_state)
        params = optax.apply_updates(params, updates)

    def divergence(e):
        log_probs, _, _ = plain_network(config.core.option, params, obs[:, e], is_first[:, e], [c[e] for c in state.carry])
        log_ratio = chosen_of(log_probs, action[:, e]) - log_prob[:, e]
        return (jnp.exp(log_ratio) - 1 - log_ratio).mean()

    return params, [divergence(e) for e in minibatches[num_updates:]] if num_updates else []


@pytest.mark.long
def test_one_iteration_equals_an_independent_implementation(walk):
    config, agent, state = walk
    obs, carry, rollout = plain_rollout(config.core.option, agent, state)
    terminated, truncated = rollout[-2:]
    assert terminated.any() and (truncated & ~terminated).any() and state.carry[0].any() and carry[0].any()
    after, _ = jax.jit(agent.iteration)(state)
    close = lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6)
    jax.tree.map(close, (after.obs, after.carry), (obs, carry))
    want, _ = plain_update(config, state, rollout)
    jax.tree.map(close, after.params, want)
    moved = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).max(), after.params, state.params))
    assert min(moved) > 0 and np.median(moved) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("core", ["gru", *(pytest.param(core, marks=pytest.mark.slow) for core in ("lstm", "min_gru"))])
def test_devices_exchange_one_gradient_per_minibatch_and_a_few_scalars(core):
    """Compiled on eight devices, no sequence leaves its device, and nothing is summed step by step."""
    agent = build(RandomWalk(), core=f"{core}:5", num_envs=64, unroll_length=16)
    num_params = sum(x.size for x in jax.tree.leaves(jax.eval_shape(agent.init, jax.random.key(0)).params))
    found = collectives(agent)
    assert {name for name, _ in found} == {"all-reduce"}
    *scalars, gradient = [size for _, size in found]
    assert num_params <= gradient <= num_params + 5
    # One of them is how many values of truncated episodes CPUs compute.
    assert len(scalars) <= 4 and sum(scalars) <= 8


def test_minibatches_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"num_envs=6 cannot be split into num_minibatches=4 .* use num_envs=8"):
        RecurrentPPO(num_envs=6, num_minibatches=4)
    with pytest.raises(ValueError, match=r"num_envs=16 cannot be split over the 8 devices .* in groups of 4.*multiple of 32"):
        policy = msrl.policies.GPUOnly(num_devices=8)
        msrl.train("recurrent_ppo", RandomWalk(), policy=policy, progress=False, **SMALL | {"num_minibatches": 4})


@pytest.mark.slow
def test_a_policy_takes_as_many_devices_as_groups_of_environments_can_be_split_over():
    """Four groups of four environments: four of eight devices work."""
    agent = build(RandomWalk(), num_envs=16, num_minibatches=4, unroll_length=4)
    program = msrl.compile(
        agent.iteration,
        jax.eval_shape(agent.init, jax.random.key(0)),
        policy=msrl.policies.GPUOnly(),
        axes=agent.axes,
        groups={"env": agent.env_group},
    )
    assert len(program.devices) == 4


@pytest.fixture(scope="module")
def trained():
    return msrl.train(
        "recurrent_ppo", RandomWalk(), total_steps=3 * 128, eval_episodes=4, devices=jax.devices()[:1], progress=False, **SMALL
    )


@pytest.mark.slow
def test_evaluation_keeps_the_carry_through_an_episode(trained):
    """Greedy episodes, stepped in Python with the network written out."""
    params = jax.tree.map(np.asarray, trained.state.params)
    env = msrl.envs.vectorize(RandomWalk(), 16)
    env_state, obs = env.reset(key_for("play", jax.random.key(5)))
    carry, running, returns = (jnp.zeros((16, 5)),), np.ones(16, bool), np.zeros(16)
    step = jax.jit(env.step)
    while running.any():
        log_probs, _, carry = plain_network("gru", params, obs[None], jnp.zeros((1, 16), bool), carry)
        env_state, out = step(env_state, jnp.argmax(log_probs[0], -1))
        obs, returns = out.obs, returns + np.where(running, out.reward, 0)
        running &= ~np.asarray(out.terminated | out.truncated)
    np.testing.assert_allclose(trained.evaluate(16, seed=5).returns, returns, rtol=1e-4, atol=1e-5)


def test_acting_with_a_carry(trained):
    obs = np.random.default_rng(0).normal(size=(3, 4, 3)).astype(np.float32)
    memory, network_memory = None, (jnp.zeros((4, 5)),)
    for x in obs:
        action, memory = trained.act_with_carry(x, memory)
        log_probs, _, network_memory = plain_network(
            "gru", trained.state.params, x[None], jnp.zeros((1, 4), bool), network_memory
        )
        np.testing.assert_array_equal(action, np.argmax(log_probs[0], -1))
        np.testing.assert_allclose(memory[0], network_memory[0], rtol=1e-5, atol=1e-6)
    one, _ = trained.act_with_carry(obs[0, 0], None, jax.random.key(0))
    assert one.shape == ()
    with pytest.raises(ValueError, match=r"carry has shapes .* of 2 observations"):
        trained.act_with_carry(obs[0, :2], memory)


@pytest.mark.parametrize("name", mostly_slow(["ppo", "a2c", "a3c", "impala", "pqn", "r2d2", "sac", "td3"], "a2c"))
def test_a_carry_stays_with_the_actors_while_environments_step(name):
    config = {"num_envs": 8, "unroll_length": 4, "hidden_sizes": (4,), "core": "gru:5"}
    config |= {"num_minibatches": 2} if name == "pqn" else {}
    if name in ("r2d2", "sac", "td3"):
        config |= {"burn_in": 1, "trace_length": 2, "replay": "replay:256,learning_starts=32", "batch_size": 8}
    agent = make_counted(name, msrl.envs.make("Pendulum-v1" if name in ("sac", "td3") else "CartPole-v1"), **config)
    state = jax.eval_shape(agent.init, jax.random.key(0))
    policy = msrl.policies.Environments(agents=1)
    plan = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[:2]).explain()
    each_step = [c for c in plan.crossings if c.times == config["unroll_length"]]
    assert len(each_step) == 3 and "carry" not in str(each_step)  # observations, their first ones, and actions
