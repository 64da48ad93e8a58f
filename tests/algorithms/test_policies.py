"""Every algorithm is the same training run under every synchronous policy, on 1, 2, 4 and 8 devices."""

import functools

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.agents.agent import innermost
from msrl_jax.algorithms import counted
from msrl_jax.configs.names import all_fields
from tests.support.small_runs import ENVS, MODULES, OPTIMIZED, PARTICULAR, SMALL, WHOLE, relative_difference
from tests.support.transitions import noise

# Two programs that compute the same torques and dynamics may differ by one unit in the last place: XLA fuses a multiplication
# and an addition, which rounds once instead of twice, in one program and not in the other. Where it does depends on the
# processor's vector length and on the number of environments per device. Speeds reach 8.
ULP_OF_SPEED = np.spacing(np.float32(8))
IMAGE, GRID = "Breakout-MinAtar", "Catch-bsuite"
ITERATIONS = 5
LOCK = "tests.support.lock:Lock"
CART, PENDULUM = "tests.support.privileged:cartpole", "tests.support.privileged:pendulum"  # critics see more than actors
EXACT = ("CartPole-v1", LOCK, CART)
# With actions of several integers.
INTEGERS = ("ppo", "recurrent_ppo", "a2c", "impala", "a3c", "es", "bc")

CASES = [
    ("ppo", "CartPole-v1"),
    ("ppo", "Pendulum-v1"),
    *((name, "CartPole-v1") for name in ("ppo_rnd", "ppo_rnd+memory", "a2c_rnd", "impala_rnd")),
    ("recurrent_ppo", "CartPole-v1"),
    ("recurrent_ppo+min_gru", "CartPole-v1"),
    ("recurrent_ppo+lru", "CartPole-v1"),
    ("recurrent_ppo+gtrxl", "CartPole-v1"),
    ("recurrent_ppo+own", "CartPole-v1"),
    ("r2d2+lru", "CartPole-v1"),
    ("a2c", "Pendulum-v1"),
    ("impala", "CartPole-v1"),
    ("a3c", "CartPole-v1"),
    ("a3c", "Pendulum-v1"),
    ("es", "CartPole-v1"),
    ("es", "Pendulum-v1"),
    ("impala+replay", "CartPole-v1"),
    *((f"{name}+memory", "CartPole-v1") for name in ("a2c", "a3c", "impala", "pqn")),
    ("pqn", "CartPole-v1"),
    ("dqn", "CartPole-v1"),
    ("dqn+c51", "CartPole-v1"),
    ("dqn+qr", "CartPole-v1"),
    ("dqn+munchausen", "CartPole-v1"),
    ("dqn+iqn", "CartPole-v1"),
    ("apex_dqn", "CartPole-v1"),
    ("r2d2", "CartPole-v1"),
    ("muzero", "CartPole-v1"),
    ("sac", "Pendulum-v1"),
    ("sac+qr", "Pendulum-v1"),
    ("td3", "Pendulum-v1"),
    ("td3+c51", "Pendulum-v1"),
    ("ddpg", "Pendulum-v1"),
    ("sac+cross_q", "Pendulum-v1"),
    ("sac+gru", "Pendulum-v1"),
    ("sac+gru", "CartPole-v1"),
    ("sac+goals", "PointMaze"),
    ("td3+lru", "Pendulum-v1"),
    ("bc", "CartPole-v1"),
    ("bc", "Pendulum-v1"),
    ("cql", "CartPole-v1"),
    ("cql", "Pendulum-v1"),
    ("cql+lagrange", "Pendulum-v1"),
    ("iql", "CartPole-v1"),
    ("iql", "Pendulum-v1"),
    ("ppo+privileged", CART),
    ("recurrent_ppo+privileged", CART),
    ("a2c+privileged", CART),
    ("sac+privileged", PENDULUM),
    ("iql+awac", "Pendulum-v1"),
    ("iql+crr", "Pendulum-v1"),
    *((name, LOCK) for name in INTEGERS),
    *((name, "Pendulum-v1" if name.startswith("sac") else "CartPole-v1") for name in (*MODULES, *WHOLE, *OPTIMIZED)),
]


# What runs each time: every policy meets several algorithms, on two, four and eight devices.
OFTEN = {
    ("ppo", "CartPole-v1"): [(8, "Central"), (8, "Environments")],
    ("recurrent_ppo", "CartPole-v1"): [(8, "SingleLearnerCoarse")],
    ("a2c", "Pendulum-v1"): [(4, "SingleLearnerFine")],
    ("es", "Pendulum-v1"): [(2, "Central")],
    ("sac", "Pendulum-v1"): [(4, "Environments")],
    ("bc", "CartPole-v1"): [(8, "MultiLearner")],
}
# What the long tests add. The slow ones are all: a variant, such as TD3 of SAC, meets all policies there.
SELDOM = {
    ("ppo", "CartPole-v1"): [(8, "MultiLearner")],
    ("impala", "CartPole-v1"): [(2, "SingleLearnerCoarse")],
    ("a3c", "CartPole-v1"): [(8, "MultiLearner")],
    ("pqn", "CartPole-v1"): [(4, "SingleLearnerFine")],
    ("dqn", "CartPole-v1"): [(8, "Central")],
    ("iql", "Pendulum-v1"): [(2, "Environments")],
}


def case(algorithm, env, num_devices, policy):
    """A run of the matrix, slow unless it is one of those above."""
    runs = {"often": OFTEN, "long": SELDOM}
    kind = next((kind for kind, table in runs.items() if (num_devices, policy) in table.get((algorithm, env), ())), "slow")
    marks = [] if kind == "often" else [getattr(pytest.mark, kind)]
    id = f"{algorithm}-{env.rpartition(':')[2]}-{num_devices}-{policy}"
    return pytest.param(algorithm, env, num_devices, policy, marks=marks, id=id)


def places(index, algorithm, env):
    """Numbers of devices and policies: all of them for PPO.

    Others run on eight devices under all policies, on fewer under one, and variants on eight under three. These take turns, so
    all algorithms together see every number of devices under every policy.
    """
    policies = msrl.policies.names()
    if (algorithm, env) == CASES[0]:
        return [(n, policy) for n in (1, 2, 4, 8) for policy in policies]
    turned = policies[index % len(policies) :] + policies[: index % len(policies)]
    if "+" in algorithm:
        return [(8, policy) for policy in turned[:3]]
    chosen = [*OFTEN.get((algorithm, env), ()), *SELDOM.get((algorithm, env), ())]
    return dict.fromkeys([*zip((1, 2, 4), turned, strict=False), *((8, policy) for policy in policies), *chosen])


MATRIX = [case(*kind, num_devices, policy) for index, kind in enumerate(CASES) for num_devices, policy in places(index, *kind)]


def build(name, env, **overrides):
    algorithm = msrl.algorithms.get(name.partition("+")[0])
    made = msrl.envs.make(env, **ENVS.get(env, {}))
    options = SMALL | PARTICULAR.get(name, {}) | overrides
    if algorithm.offline:
        fields = all_fields(algorithm)
        options = {key: value for key, value in options.items() if key in fields} | {"data": noise(made)}
    return counted(msrl.algorithms.build(msrl.algorithms.make(algorithm, options), made), 200)


def seen(state):
    """What is acted on next, which tells whether all that was done before is the same; nothing if data are all there is."""
    return jax.tree.leaves(getattr(innermost(state), "obs", np.zeros(0)))[-1]


@functools.cache
def reference(name, env):
    """The agent, its initial state, and the result of plain jit(scan)."""
    agent = build(name, env)

    def step(state, _):
        state, metrics = agent.iteration(state)
        return state, (seen(state), metrics)

    state = agent.with_data(jax.jit(agent.init)(jax.random.key(0)))
    after, (obs, metrics) = jax.jit(lambda state: jax.lax.scan(step, state, None, length=ITERATIONS))(state)
    return agent, state, *jax.device_get((innermost(after).params, obs, metrics))


@pytest.mark.parametrize(("algorithm", "env", "num_devices", "policy"), MATRIX)
def test_the_same_training_run(algorithm, env, num_devices, policy):
    agent, state, params, obs, metrics = reference(algorithm, env)
    program = msrl.compile(
        agent.iteration, state, policy=msrl.policies.get(policy), axes=agent.axes, devices=jax.devices()[:num_devices]
    )
    one, first = program.run(state, 1, chunk=1)
    if env in EXACT:
        np.testing.assert_array_equal(seen(one), obs[0])
    else:
        np.testing.assert_allclose(seen(one), obs[0], rtol=0, atol=ULP_OF_SPEED)
    after, measured = program.run(one, ITERATIONS - 1, chunk=1)
    measured = jax.tree.map(lambda a, b: np.concatenate([a, b]), first, measured)
    if env in EXACT:
        np.testing.assert_array_equal(seen(after), obs[-1])
    else:
        # Continuous actions carry the rounding of the gradient's sum (it is added up per device) into the dynamics.
        np.testing.assert_allclose(seen(after), obs[-1], rtol=1e-5, atol=1e-5)
    pairs = zip(jax.tree.leaves(innermost(after).params), jax.tree.leaves(params), strict=True)
    assert max(relative_difference(a, b) for a, b in pairs) < 1e-5
    for a, b in zip(jax.tree.leaves(measured), jax.tree.leaves(metrics), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "recurrent_ppo", "a2c", "a3c", "impala", "impala+memory", "es", "pqn"])
@pytest.mark.parametrize("env", [IMAGE, GRID])
def test_images_and_grids(algorithm, env):
    agent = build(algorithm, env, num_envs=8, unroll_length=24, hidden_sizes=(8,))
    state, outcomes = jax.jit(agent.init)(jax.random.key(0)), []
    # With two learners each: a gradient of a convolution's bias is a sum of thousands of terms that cancel, which rounds to
    # other bits, up to 3e-5 after Adam, if it is added up over another number of devices.
    for policy in (msrl.policies.GPUOnly(2), msrl.policies.SingleLearnerCoarse(2, learners=2)):
        program = msrl.compile(agent.iteration, state, policy=policy, axes=agent.axes, devices=jax.devices()[:4])
        outcomes.append(program.run(state, 2, chunk=1))
    (split, metrics), (apart, others) = outcomes
    np.testing.assert_array_equal(seen(split), seen(apart))
    for a, b, before in zip(*map(jax.tree.leaves, (s.inner.params for s in (split, apart, state))), strict=True):
        assert relative_difference(a, b) < 1e-5 < relative_difference(a, before)
    for a, b in zip(*map(jax.tree.leaves, (metrics, others)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)
