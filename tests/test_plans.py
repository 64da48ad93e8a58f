"""Execution plans of other systems as pairs of an algorithm and a policy."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.algorithms import PPO, counted, get, names
from msrl_jax.policies import Central, GPUOnly, MultiLearner, SingleLearnerCoarse
from tests.support import ppo
from tests.support.agents import make_counted
from tests.support.program import dependencies
from tests.support.random_walk import RandomWalk

SMALL = {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (16, 16)}
PARTICULAR = {
    "ppo": {"num_epochs": 1, "num_minibatches": 2},
    "recurrent_ppo": {"num_epochs": 1, "num_minibatches": 2, "core.size": 8},
    "pqn": {"num_epochs": 1, "num_minibatches": 2},
    "dqn": {"replay.learning_starts": 128},
    "apex_dqn": {"replay.learning_starts": 256, "actor_period": 1},
    "r2d2": {"replay.learning_starts": 128, "burn_in": 0, "trace_length": 4, "replay.n_step": 1, "core.size": 8},
    "muzero": {
        "replay.learning_starts": 128,
        "model_steps": 2,
        "replay.n_step": 2,
        "num_simulations": 4,
        "batch_size": 16,
        "num_updates": 2,
    },
    "sac": {"replay.learning_starts": 128, "batch_size": 64, "num_updates": 2},
    "td3": {"replay.learning_starts": 128, "batch_size": 64, "num_updates": 2},
    "ddpg": {"replay.learning_starts": 128, "batch_size": 64, "num_updates": 2},
}


def plan(algo, policy, num_devices=8, **options):
    env = "Pendulum-v1" if algo in ("ddpg", "td3") else "CartPole-v1"
    agent = make_counted(algo, msrl.envs.make(env), **SMALL | options)
    state = jax.jit(agent.init)(jax.random.key(0))
    devices = jax.devices()[:num_devices]
    return msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=devices), state


@pytest.mark.slow
def test_sync_samples_is_the_gradient_step_of_one_device():
    workers, state = plan("a2c", SingleLearnerCoarse(actors=4))
    alone, _ = plan("a2c", GPUOnly(), num_devices=1)
    a, b = (program.run(state, 1)[0].inner for program in (workers, alone))
    moved = 0.0
    for x, y, before in zip(*map(jax.tree.leaves, (a.params, b.params, state.inner.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
        moved += float(np.abs(np.asarray(x) - np.asarray(before)).sum())
    assert moved > 0


def sums(program, state):
    """How often per iteration gradients are summed over devices, and how often how many other numbers, and nothing else."""
    described = program.explain()
    assert described.bytes_crossing == 0
    found = [(c.kind, c.nbytes, c.times * p.runs) for p in described.programs for c in p.collectives]
    assert {kind for kind, *_ in found} == {"all-reduce"}
    parameters = 4 * sum(x.size for x in jax.tree.leaves(state.inner.params))
    gradients = [times for _, nbytes, times in found if nbytes >= parameters]
    others = [(times, nbytes // 4) for _, nbytes, times in found if nbytes < parameters]
    return gradients, others


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", [pytest.param(GPUOnly(), marks=pytest.mark.slow), MultiLearner()], ids=lambda p: type(p).__name__
)
def test_local_multi_gpu_standardizes_the_batch_once_and_makes_epochs_of_it_where_it_lies(policy):
    config = PPO(**ppo.SMALL, clip_value=0.1, normalize_advantage="batch")
    agent = counted(config.build(RandomWalk()))
    start = jax.jit(agent.init)(jax.random.key(0))
    program = msrl.compile(agent.iteration, start, policy=policy, axes=agent.axes)
    state = jax.device_put(program.run(start, 1)[0], jax.devices()[0])
    _, rollout = ppo.plain_rollout(agent, state.inner)
    want, _ = ppo.plain_update(agent, config, state.inner, rollout)
    after = program.run(state, 1)[0].inner
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6), after.params, want)
    gradients, others = sums(program, start)
    assert gradients == [config.num_epochs * config.num_minibatches]
    # Mean and deviation of the advantages; number, returns and lengths of the episodes that ended; whether one was cut; the
    # squares of the value targets, in two scales.
    assert {times for times, _ in others} == {1} and sum(numbers for _, numbers in others) == 8


ACTING = [n for n in names() if not (get(n).multi_agent or get(n).offline)]


@pytest.mark.parametrize("algo", [pytest.param(a, marks=pytest.mark.long if a == "ppo" else pytest.mark.slow) for a in ACTING])
def test_async_samples_bounds_and_reports_the_age_of_parameters(algo):
    """Of every algorithm, whichever of the two parts that run at once is the faster: the same seed is the same run."""
    program, state = plan(algo, SingleLearnerCoarse(actors=2, staleness=2), num_devices=3, **PARTICULAR.get(algo, {}))
    first, again = program.run(state, 5), program.run(state, 5)
    np.testing.assert_array_equal(first[1]["parameter_age"], [0, 1, 2, 2, 2])
    for a, b in zip(*map(jax.tree.leaves, (first, again)), strict=True):
        assert bool((a == b).all())
    numbers = [c for c in program.explain().crossings if c.shape == () and c.dtype in ("int32", "uint32")]
    assert sorted((c.destination, c.times) for c in numbers) == [("actors", 1), ("learners", 1)]


@pytest.mark.long
def test_a_sharded_server_keeps_parameters_and_optimizer_state_in_parts():
    program, state = plan("a2c", Central(workers=4, shards=2))
    after = program.run(state, 1)[0].inner
    for tree in (after.params, after.opt_state):
        large = [x for x in jax.tree.leaves(tree) if x.size >= 64]
        assert large and all(s.data.size == x.size // 2 for x in large for s in x.addressable_shards)


@pytest.mark.long
def test_es_sends_seeds_and_returns_only():
    program, state = plan("es", SingleLearnerCoarse(actors=4), unroll_length=16)
    described = program.explain()
    parameters = 4 * sum(x.size for x in jax.tree.leaves(state.inner.params))
    up = sum(c.nbytes * c.times for c in described.crossings if c.destination == "learners")
    assert up <= 16 * SMALL["num_envs"] < parameters


@pytest.mark.slow
def test_sync_replay_is_one_run_wherever_the_buffer_lies():
    options = {"replay.priorities": "prioritized", "replay.learning_starts": 256, "num_updates": 2, "batch_size": 32}
    apart, state = plan("dqn", SingleLearnerCoarse(actors=2, buffers=2), num_devices=5, **options)
    alone, _ = plan("dqn", GPUOnly(), num_devices=1, **options)
    (a, measured), (b, _) = apart.run(state, 5, chunk=1), alone.run(state, 5, chunk=1)
    a, b = a.inner, b.inner
    for x, y in zip(jax.tree.leaves(a.replay.items), jax.tree.leaves(b.replay.items), strict=True):
        np.testing.assert_array_equal(x, y)
    for x, y in zip(jax.tree.leaves((a.params, a.pending)), jax.tree.leaves((b.params, b.pending)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    counts = {int(x) for x in jax.tree.leaves(a.opt_state) if x.shape == ()}
    assert counts == {2 * 4} and not measured["parameter_age"].any()


@pytest.mark.long
def test_async_replay_shards_delays_and_refreshes_as_declared():
    """Ape-X: buffers in parts, priorities and parameters late by the staleness, parameters taken every `actor_period`."""
    policy = SingleLearnerCoarse(actors=2, buffers=2, staleness=1)
    options = {"actor_period": 2, "replay.learning_starts": 256, "num_updates": 2, "batch_size": 32}
    program, state = plan("apex_dqn", policy, num_devices=5, **options)
    run_state, metrics = program.run(state, 6)
    np.testing.assert_array_equal(metrics["parameter_age"], [0, 1, 2, 1, 2, 1])
    after = program.unwrap(run_state).inner
    split = [x for x in jax.tree.leaves((after.replay.items, after.replay.priorities)) if x.ndim]
    assert len(split) > len(after.replay.items)
    for x in split:
        assert all(s.data.shape[0] == x.shape[0] // 2 for s in x.addressable_shards)
    late = {name for name in program.registers if name.startswith(".inner.pending")}
    assert late == {".inner.pending.indices.step", ".inner.pending.indices.env", ".inner.pending.td_error"}
    depends = dependencies(program, 1)
    for iteration in range(4):
        for fragment in ("explore", "insert", "sample_batches"):
            assert {i for i, name in depends[iteration, fragment] if name == "learn"} == set(range(iteration - 1))
    # 6 iterations of 128 steps: updates from the second one on, when 256 steps are held.
    counts = {int(x) for x in jax.tree.leaves(after.opt_state) if x.shape == ()}
    assert counts == {2 * 5}


@pytest.mark.slow
def test_sync_batch_replay_draws_whole_batches_uniformly_at_the_declared_ratio():
    """Every update draws one of the 4 newest batches uniformly; the age of the acting parameters identifies the batch."""
    options = {"replay_batches": 4, "num_updates": 2, "optimizer": "adam"}
    apart, state = plan("impala", SingleLearnerCoarse(actors=4, buffers=2), **options)
    alone, _ = plan("impala", GPUOnly(), num_devices=1, **options)
    (a, measured), (b, expected) = apart.run(state, 6, chunk=1), alone.run(state, 6, chunk=1)
    a, b = a.inner, b.inner
    for x, y in zip(jax.tree.leaves((a.params, measured)), jax.tree.leaves((b.params, expected)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    held = np.asarray(a.replay.batches.version)
    assert sorted(held.tolist()) == [2, 3, 4, 5] and int(a.replay.refused) == 0  # the oldest gave way
    np.testing.assert_array_equal(a.replay.batches.last_obs[held.tolist().index(5)], a.obs)
    counts = [int(x) for x in jax.tree.leaves(a.opt_state) if x.shape == ()]
    assert counts == [2 * 6]

    _, measured = alone.run(state, 600, chunk=1)
    ages = 2 * measured["parameter_age"][3:]  # the sum of two draws from 0, 1, 2, 3
    found = np.bincount(ages.astype(int), minlength=7) / len(ages)
    np.testing.assert_allclose(found, np.array([1, 2, 3, 4, 3, 2, 1]) / 16, atol=5 * np.sqrt(0.25 * 0.75 / len(ages)))
