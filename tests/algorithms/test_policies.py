"""Every algorithm is the same training run under every synchronous policy, on 1, 2, 4 and 8 devices."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl

SMALL = {"num_envs": 64, "unroll_length": 8, "hidden_sizes": (16, 16)}
PARTICULAR = {
    "ppo": {"num_epochs": 2, "num_minibatches": 2},
    "recurrent_ppo": {"num_epochs": 2, "num_minibatches": 2, "memory_size": 16},
    "a3c": {"num_workers": 8},
    "es": {"unroll_length": 24},
    "apex_dqn": {"learning_starts": 512, "batch_size": 64, "num_updates": 2, "capacity": 4096},
    "sac": {"num_updates": 2, "batch_size": 64, "capacity": 4096, "learning_starts": 512},
}
ITERATIONS = 5
# Under these a step is a program of its own, in which XLA may contract a multiplication and an addition into one rounding
# where the program of a whole rollout does not.
STEPWISE = ("Environments", "SingleLearnerFine")
CASES = [
    ("ppo", "CartPole-v1"),
    ("ppo", "Pendulum-v1"),
    ("recurrent_ppo", "CartPole-v1"),
    ("a2c", "Pendulum-v1"),
    ("impala", "CartPole-v1"),
    ("a3c", "CartPole-v1"),
    ("es", "CartPole-v1"),
    ("apex_dqn", "CartPole-v1"),
    ("sac", "Pendulum-v1"),
]


# PPO runs on every number of devices each time, the others on the least and the most; `-m slow` runs the rest.
MATRIX = [
    pytest.param(
        case, num_devices, id=f"{case[0]}-{case[1]}-{num_devices}",
        marks=[pytest.mark.slow] if case[0] != "ppo" and num_devices in (2, 4) else [],
    )
    for case in CASES for num_devices in (1, 2, 4, 8)
]  # fmt: skip


@pytest.fixture(scope="module")
def run(request):
    """The agent, its initial state and the reference: GPUOnly on one device, which is plain jit(scan)."""
    algorithm = msrl.algorithms.get(request.param[0])
    config = algorithm.config(**SMALL | PARTICULAR.get(algorithm.name, {}), total_steps=100_000)
    agent = algorithm.build(msrl.envs.make(request.param[1]), config)
    state = jax.jit(agent.init)(jax.random.key(0))
    after, metrics = jax.jit(lambda s: jax.lax.scan(lambda s, _: agent.iteration(s), s, None, length=ITERATIONS))(state)
    one, _ = jax.jit(agent.iteration)(state)
    return request.param[1], agent, state, jax.device_get(one.obs), jax.device_get((after.params, after.obs, metrics))


@pytest.mark.parametrize("name", sorted(msrl.policies.POLICIES))
@pytest.mark.parametrize(("run", "num_devices"), MATRIX, indirect=["run"])
def test_the_same_training_run(name, num_devices, run):
    env, agent, state, first_obs, (params, obs, metrics) = run
    program = msrl.compile(
        agent.iteration, state, policy=msrl.policies.get(name), axes=agent.axes, devices=jax.devices()[:num_devices]
    )
    one, first = program.run(state, 1, chunk=1)
    if env == "CartPole-v1" or name not in STEPWISE:
        np.testing.assert_array_equal(one.obs, first_obs)
    else:
        np.testing.assert_allclose(one.obs, first_obs, rtol=1e-6, atol=1e-6)
    after, measured = program.run(one, ITERATIONS - 1, chunk=1)
    measured = jax.tree.map(lambda a, b: np.concatenate([a, b]), first, measured)
    if env == "CartPole-v1":
        np.testing.assert_array_equal(after.obs, obs)
    else:
        # Continuous actions carry the rounding of the gradient's sum (it is added up per device) into the dynamics.
        np.testing.assert_allclose(after.obs, obs, rtol=1e-5, atol=1e-5)
    pairs = zip(jax.tree.leaves(after.params), jax.tree.leaves(params), strict=True)
    assert max(relative_difference(a, b) for a, b in pairs) < 1e-5
    for a, b in zip(jax.tree.leaves(measured), jax.tree.leaves(metrics), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def relative_difference(a, b):
    """Largest deviation of a tensor, relative to its norm per element."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.abs(a - b).max() / max(np.sqrt((b**2).mean()), 1e-3)
