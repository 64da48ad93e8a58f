"""R2D2: windows against the acting network, targets and updates against plain loops, communication, and bad input."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import msrl_jax as msrl
from msrl_jax import cli, envs, replay
from msrl_jax.algorithms import R2D2, Prioritized, counted, r2d2
from msrl_jax.envs.actions import action_type
from msrl_jax.envs.masks import observation_type
from msrl_jax.loops.sequence_replay import sequence_buffer
from msrl_jax.losses.sequences import rescale, sequence_priority, unrescale
from msrl_jax.networks.q_network import value_heads
from msrl_jax.networks.recurrent import recurrent_network
from msrl_jax.registry.resolve import objects
from tests.support.off_policy import adam, assert_close, counting, start, wide
from tests.support.random_walk import RandomWalk
from tests.support.recurrent import plain_core

E, T, B, H, BURN_IN, L, N = 8, 6, 16, 5, 3, 4, 3
SMALL = {
    "num_envs": E,
    "unroll_length": T,
    "num_updates": 1,
    "batch_size": B,
    "replay.capacity": 480,
    "replay.learning_starts": 96,
    "burn_in": BURN_IN,
    "trace_length": L,
    "replay.n_step": N,
    "hidden_sizes": (6,),
    "core.size": H,
    "exploration.steps": 96,
    "exploration.final": 1e-6,
    "learning_rate": 3e-3,
}
TOTAL = 1000  # iterations of the run
# A squared loss of the return with importance weights; and a Huber loss of squeezed returns without, in a plain head.
OPTIONS = {
    "gru": {"core": "gru", "replay.priorities": Prioritized(0.9, 0.5), "max_grad_norm": 0.3},
    "lstm": {"core": "lstm", "rescale_epsilon": 1e-2, "huber_delta": 0.1, "dueling": False, "eta": 0.6, "tau": 0.1},
    "min_gru": {"core": "min_gru"},
}


def plain_values(core, params, obs, begins, memory, xp=np):
    """Action values `[T, E, A]` and memories `[T, E, H]`, written out."""
    dense = lambda p, x: x @ p["kernel"] + p["bias"]
    features = xp.maximum(dense(params["torso"]["params"]["Dense_0"], obs), 0)
    _, memories = plain_core(core.option, params["core"], features, begins, memory, xp)
    p, h = params["heads"]["params"], memories[0]
    if "head" in p:
        return dense(p["head"], h), memories
    relu = lambda p: xp.maximum(dense(p, h), 0)
    value, advantage = dense(p["value_head"], relu(p["value_stream"])), dense(p["advantage_head"], relu(p["advantage_stream"]))
    return value + advantage - advantage.mean(-1, keepdims=True), memories


def plain_rescale(x, epsilon):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + epsilon * x


def plain_targets(reward, next_value, terminated, truncated, discount, n, epsilon):
    """n-step targets, step by step in float64; the inverse of the squeezing function by bisection."""
    if epsilon is not None:
        low, high = np.full_like(next_value, -1e7), np.full_like(next_value, 1e7)
        for _ in range(100):
            middle = (low + high) / 2
            above = plain_rescale(middle, epsilon) > next_value
            low, high = np.where(above, low, middle), np.where(above, middle, high)
        next_value = low
    targets = np.zeros((len(reward) - n + 1, reward.shape[1]))
    for t, e in np.ndindex(*targets.shape):
        factor = 1.0
        for k in range(t, t + n):
            targets[t, e] += factor * reward[k, e]
            factor *= discount
            if terminated[k, e]:
                factor = 0.0
            if terminated[k, e] or truncated[k, e] or k == t + n - 1:
                targets[t, e] += factor * next_value[k, e]
                break
    return targets if epsilon is None else plain_rescale(targets, epsilon)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from([1, 3, 5]),
    epsilon=st.sampled_from([None, 1e-3, 0.1]),
    discount=st.sampled_from([0.0, 0.9, 1.0]),
    ends=st.sampled_from([0.0, 0.3, 0.8]),
)
def test_targets_equal_a_loop_across_the_ends_of_episodes(seed, n, epsilon, discount, ends):
    numbers = np.random.default_rng(seed)
    reward, next_value = numbers.normal(size=(2, 9, 2)).astype(np.float32) * np.float32([[[1]], [[5]]])
    terminated, truncated = numbers.uniform(size=(2, 9, 2)) < ends / 2
    window = replay.Transition(None, None, reward, terminated, truncated, None)
    got = r2d2.sequence_target(jnp.asarray(next_value), window, discount=discount, num_steps=n, epsilon=epsilon)
    wanted = (np.asarray(x, np.float64) for x in (reward, next_value))
    want = plain_targets(*wanted, terminated, truncated, discount, n, epsilon)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(value=st.floats(-1e5, 1e5, width=32), epsilon=st.sampled_from([1e-3, 1e-2, 1.0]))
def test_rescaling_is_the_formula_and_has_an_inverse(value, epsilon):
    squeezed = rescale(jnp.float32(value), epsilon)
    np.testing.assert_allclose(squeezed, plain_rescale(np.float64(value), epsilon), rtol=1e-5, atol=1e-12)
    np.testing.assert_allclose(unrescale(squeezed, epsilon), value, rtol=1e-5, atol=1e-30)


def test_rescaling_by_hand():
    np.testing.assert_allclose(rescale(jnp.float32([-8.0, 0.0, 3.0]), 0.5), [-6.0, 0.0, 2.5])
    np.testing.assert_allclose(unrescale(jnp.float32([-6.0, 0.0, 2.5]), 0.5), [-8.0, 0.0, 3.0], rtol=1e-6)


def test_the_error_of_a_sequence_is_between_the_mean_and_the_largest():
    error = jnp.array([[1.0, 0.0], [-4.0, 0.0], [1.0, -3.0]])
    np.testing.assert_allclose(sequence_priority(error, 0.9), [0.9 * 4 + 0.1 * 2, 0.9 * 3 + 0.1 * 1], rtol=1e-6)
    np.testing.assert_allclose(sequence_priority(error, 0.0), [2.0, 1.0], rtol=1e-6)


@pytest.fixture(scope="module", params=["gru", *(pytest.param(core, marks=pytest.mark.slow) for core in ("lstm", "min_gru"))])
def walk(request):
    """An agent, its config, network and buffer, and its iteration, compiled."""
    config = msrl.algorithms.make(R2D2, SMALL | OPTIONS[request.param])
    env, ready = RandomWalk(), objects(config)
    agent = ready.build(env)
    heads = lambda torso: value_heads(torso, env.action_space, ready, dueling=config.dueling)
    network = recurrent_network(env.observation_space, heads, ready)
    buffer = sequence_buffer(observation_type(env), action_type(env.action_space), config, network.initial_carry(()))
    return agent, config, network, buffer, counting(agent, TOTAL)


@pytest.fixture(scope="module")
def walked(walk):
    """The states before and after an update, with parameters far from those at the start."""
    agent, *_, iterate = walk
    state = start(agent, 9, iterate)
    keys = iter(jax.random.split(jax.random.key(1), 64))
    far = lambda params: jax.tree.map(lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), params)
    state = state._replace(params=far(state.params), target_params=far(state.target_params))
    after, _ = iterate(state, 9)
    return state, after


def sampled(buffer, state, key):
    """A batch of windows as NumPy arrays, `[S, B, ...]`, and their probabilities."""
    batch = jax.jit(buffer.sample)(state, key)
    assert isinstance(batch.experience, replay.Transition)
    assert batch.experience.reward.shape == (BURN_IN + L + N - 1, B)
    return jax.tree.map(np.asarray, batch)


@pytest.mark.long
def test_replayed_values_equal_the_values_while_acting(walk):
    """Values replayed from a window's stored carry equal the values of the whole history.

    After the random steps, nearly all actions are the best by the actor's values.
    """
    agent, config, network, buffer, iterate = walk
    state = jax.jit(agent.init)(jax.random.key(3))
    # Parameters larger than they start, so that values depend on what is remembered; the learning rate has fallen to 0.
    state = state._replace(params=jax.tree.map(lambda x: 3 * x, state.params))
    after = state
    for i in range(9):
        after, _ = iterate(after, TOTAL + i)
    for a, b in zip(*(jax.tree.leaves(s.params) for s in (state, after)), strict=True):
        np.testing.assert_array_equal(a, b)

    def history(leaf):  # [G, steps, E / G, ...] of a buffer that is not full
        x = np.asarray(leaf)[:, : 9 * T]
        return np.moveaxis(x, 0, 1).reshape(9 * T, E, *x.shape[3:])

    tree = jax.tree.structure(sampled(buffer, after.replay, jax.random.key(0)).experience)
    held = jax.tree.unflatten(tree, map(history, after.replay.items))
    ends = held.terminated | held.truncated
    begins = np.concatenate([np.ones((1, E), bool), ends[:-1]])
    zeros = tuple(np.zeros((E, H)) for _ in held.carry)
    params = wide(state.params)
    values, memories = plain_values(config.core, params, np.float64(held.obs), begins, zeros)
    acted = slice(2 * T, None)
    best = values[acted].argmax(-1)
    assert (held.action[acted] == best).mean() > 0.99 and len(set(best.ravel())) > 1
    for stored, computed in zip(held.carry, memories, strict=True):
        before = np.concatenate([np.zeros((1, E, H)), computed[:-1]]) * ~begins[..., None]
        np.testing.assert_allclose(stored, before, rtol=1e-4, atol=1e-5)

    checked, replayed = 0, jax.jit(lambda window: r2d2.replay_values(network, state.params, window, BURN_IN))
    for seed in range(4):
        window, indices, *_ = sampled(buffer, after.replay, jax.random.key(seed))
        got, got_memories = replayed(window)
        for i, (step, e) in enumerate(zip(indices.step, indices.env, strict=True)):
            steps = slice(step + BURN_IN, step + BURN_IN + L + N - 1)
            np.testing.assert_allclose(got[:, i], values[steps, e], rtol=1e-4, atol=1e-5)
            for m, computed in zip(got_memories, memories, strict=True):
                np.testing.assert_allclose(m[:, i], computed[steps, e], rtol=1e-4, atol=1e-5)
            checked += ends[step : steps.stop, e].any() and not begins[step, e]
    assert checked > 10


@pytest.mark.long
def test_one_update_equals_an_independent_implementation(walk, walked):
    """Burn-in from the stored memory is a constant of the gradient; targets look across the ends of episodes."""
    (_, config, _, buffer, _), (state, after) = walk, walked
    window, indices, probability, _ = sampled(buffer, after.replay, jax.random.split(state.replay_key)[1])
    ends = window.terminated | window.truncated
    assert window.terminated.any() and (window.truncated & ~window.terminated).any() and ends[:BURN_IN].any()
    begins = np.concatenate([np.zeros((1, B), bool), ends[:-1]])
    late = jax.tree.map(lambda x: x[BURN_IN:], window)

    def plain(params, xp):
        """Values after the burn-in, and of successors. The burn-in itself is in float64, so it has no gradient."""
        memory = tuple(np.float64(m[0]) for m in window.carry)
        constants = wide(state.params) if xp is jnp else params
        _, memories = plain_values(config.core, constants, np.float64(window.obs[:BURN_IN]), begins[:BURN_IN], memory)
        memory = tuple(m[-1] for m in memories)
        values, memories = plain_values(config.core, params, late.obs, begins[BURN_IN:], memory, xp)
        successors = [
            plain_values(config.core, params, late.next_obs[t][None], np.zeros((1, B), bool), tuple(m[t] for m in memories), xp)
            for t in range(L + N - 1)
        ]
        return values, xp.concatenate([value for value, _ in successors])

    _, next_target = plain(wide(state.target_params), np)
    _, chooser = plain(wide(state.params), np)
    best = np.take_along_axis(next_target, chooser.argmax(-1)[..., None], -1)[..., 0]
    assert (chooser.argmax(-1) != next_target.argmax(-1)).any()
    target = plain_targets(
        np.float64(late.reward), best, late.terminated, late.truncated, config.discount, N, config.rescale_epsilon
    )
    weight = np.ones(B)
    if (beta := config.replay.priorities.beta) is not None:
        weight = (np.float64(probability).min() / probability) ** (beta + (1 - beta) * 9 / 1000)

    def loss(params):
        values, _ = plain(params, jnp)
        error = target - jnp.take_along_axis(values, late.action[..., None], -1)[:L, :, 0]
        size, d = abs(error), config.huber_delta
        losses = error**2 / 2 if d is None else jnp.where(size <= d, error**2 / 2, d * (size - d / 2))
        return (weight * losses).mean(), error

    gradient, error = jax.jit(jax.grad(loss, has_aux=True))(state.params)
    annealed = dataclasses.replace(config, learning_rate=config.learning_rate * (1 - 9 / 1000))
    want = adam(state.params, state.opt_state, gradient, annealed)
    assert_close(after.params, want)
    size = np.abs(np.float64(error))
    wanted = config.eta * size.max(0) + (1 - config.eta) * size.mean(0)
    np.testing.assert_allclose(after.pending.td_error[0], wanted, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after.pending.indices.step[0], indices.step)
    moved = jax.tree.map(lambda old, new: (1 - config.tau) * old + config.tau * new, wide(state.target_params), want)
    assert_close(after.target_params, moved)
    changed = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).max(), after.params, state.params)
    assert min(jax.tree.leaves(changed)) > 1e-5


@pytest.mark.long
def test_stale_actors_keep_their_own_carry():
    agent = counted(msrl.algorithms.build(msrl.algorithms.make(R2D2, SMALL), RandomWalk()))
    state = jax.jit(agent.init)(jax.random.key(0))
    policy = msrl.policies.SingleLearnerCoarse(actors=2, staleness=1)
    program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[:3])
    after, metrics = program.run(state, 4, chunk=1)
    np.testing.assert_array_equal(metrics["parameter_age"], [0, 1, 1, 1])
    assert any(np.abs(np.asarray(m)).max() > 0 for m in program.unwrap(after).inner.carry)
    assert "memory" not in {c.value for c in program.explain().crossings if c.destination == "actors"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"replay.capacity": 640},
            r"holds 32 steps of each .* a window is length=44 steps long; use a capacity of at least \d+, or",
        ),
        ({"batch_size": 4096}, r"fewer than batch_size=4096; use a capacity of at least \d+, or smaller batches"),
        ({"replay.learning_starts": 256}, r"learning_starts=256: a batch of 32 windows of length=44 needs \d+ steps"),
    ],
)
def test_a_window_longer_than_the_buffer_is_refused_in_one_line(options, message, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with pytest.raises(ValueError, match=rf"R2D2: .*{message}.* \(burn_in \+ trace_length \+ n_step - 1 are") as error:
        msrl.algorithms.build(msrl.algorithms.make(R2D2, options), envs.make("CartPole-v1"))
    assert "\n" not in str(error.value)
    assert cli.main(["train", "--algo", "r2d2", "--env", "CartPole-v1", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(message, line)
