"""Execution plans of other systems are pairs of an algorithm and a policy: what each of them means."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.policies import Central, GPUOnly, MultiLearner, SingleLearnerCoarse

SMALL = {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (16, 16), "total_steps": 100_000}
PARTICULAR = {
    "ppo": {"num_epochs": 1, "num_minibatches": 2},
    "recurrent_ppo": {"num_epochs": 1, "num_minibatches": 2, "memory_size": 8},
}


def plan(algo, policy, num_devices=8, **options):
    algorithm = msrl.algorithms.get(algo)
    agent = algorithm.build(msrl.envs.make("CartPole-v1"), algorithm.config(**SMALL | options))
    state = jax.jit(agent.init)(jax.random.key(0))
    devices = jax.devices()[:num_devices]
    return msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=devices), state


def test_sync_samples_is_the_gradient_step_of_one_device():
    workers, state = plan("a2c", SingleLearnerCoarse(actors=4))
    alone, _ = plan("a2c", GPUOnly(), num_devices=1)
    (a, _), (b, _) = workers.run(state, 1), alone.run(state, 1)
    moved = 0.0
    for x, y, before in zip(*map(jax.tree.leaves, (a.params, b.params, state.params)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
        moved += float(np.abs(np.asarray(x) - np.asarray(before)).sum())
    assert moved > 0


@pytest.mark.parametrize("policy", [GPUOnly(), MultiLearner()], ids=lambda p: type(p).__name__)
def test_local_multi_gpu_keeps_the_batch_where_it_was_made(policy):
    program, _ = plan("ppo", policy, num_epochs=2, num_minibatches=2)
    described = program.explain()
    assert described.bytes_crossing == 0
    parameters = 4 * sum(c.size for c in jax.tree.leaves(plan("ppo", GPUOnly(), 1, num_epochs=2, num_minibatches=2)[1].params))
    sums = [(c.kind, c.nbytes, c.times * p.runs) for p in described.programs for c in p.collectives]
    assert {kind for kind, *_ in sums} == {"all-reduce"}
    assert sum(times for _, nbytes, times in sums if nbytes >= parameters) == 4  # 2 epochs of 2 minibatches
    assert all(nbytes < 64 for _, nbytes, _ in sums if nbytes < parameters)


@pytest.mark.parametrize("algo", sorted(msrl.algorithms.ALGORITHMS))
def test_async_samples_bounds_and_reports_the_age_of_parameters(algo):
    """Of every algorithm, whichever of the two parts that run at once is the faster: the same seed is the same run."""
    program, state = plan(algo, SingleLearnerCoarse(actors=2, staleness=2), num_devices=3, **PARTICULAR.get(algo, {}))
    first, again = program.run(state, 5), program.run(state, 5)
    np.testing.assert_array_equal(first[1]["parameter_age"], [0, 1, 2, 2, 2])
    for a, b in zip(*map(jax.tree.leaves, (first, again)), strict=True):
        assert bool((a == b).all())
    numbers = [c for c in program.explain().crossings if c.shape == () and c.dtype == "int32"]
    assert sorted((c.destination, c.times) for c in numbers) == [("actors", 1), ("learners", 1)]


def test_a_sharded_server_keeps_parameters_and_optimiser_state_in_parts():
    program, state = plan("a2c", Central(workers=4, shards=2))
    after, _ = program.run(state, 1)
    for tree in (after.params, after.opt_state):
        large = [x for x in jax.tree.leaves(tree) if x.size >= 64]
        assert large and all(s.data.size == x.size // 2 for x in large for s in x.addressable_shards)


def test_es_sends_seeds_and_returns_only():
    program, state = plan("es", SingleLearnerCoarse(actors=4), unroll_length=16)
    described = program.explain()
    parameters = 4 * sum(x.size for x in jax.tree.leaves(state.params))
    up = sum(c.nbytes * c.times for c in described.crossings if c.destination == "learners")
    assert up <= 16 * SMALL["num_envs"] < parameters
