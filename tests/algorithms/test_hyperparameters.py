"""Every number of a config that may be data: members that differ in all of them at once equal the agents with constants."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.agents.agent import innermost
from msrl_jax.algorithms import build, counted
from msrl_jax.configs.names import all_fields, tunable_fields
from msrl_jax.run.experiment.members import members, with_numbers
from tests.support.many_agents import Homes
from tests.support.small_runs import ENVS, OPTIMIZED, PARTICULAR, SMALL, relative_difference
from tests.support.transitions import noise

VALUES = {
    "learning_rate": (1e-3, 3e-4),
    "discount": (0.97, 0.9),
    "entropy_coef": (0.02, 0.0),
    "value_coef": (0.5, 1.0),
    "gae_lambda": (0.9, 1.0),
    "max_grad_norm": (0.3, 2.0),
    "rms_decay": (0.9, 0.99),
    "epsilon": (1e-3, 1e-5),
    "clip_ratio": (0.1, 0.3),
    "clip_value": (0.2, 0.5),
    "target_kl": (0.001, 0.5),
    "tau": (0.01, 0.1),
    "replay.priorities.alpha": (0.5, 0.8),
    "replay.priorities.beta": (0.5, 1.0),
    "exploration.final": (0.1, 0.3),
    "exploration.base": (0.3, 0.5),
    "huber_delta": (1.0, 2.0),
    "returns.huber_delta": (1.0, 2.0),
    "adam_epsilon": (1e-3, 1e-2),
    "returns.v_min": (-5.0, 0.0),
    "returns.v_max": (20.0, 12.5),
    "conservative_weight": (1.0, 2.0),
    "target_gap": (0.5, 1.0),
    "initial_temperature": (0.5, 0.2),
    "target_entropy": (-0.5, 0.3),
    "noise_scale": (0.05, 0.1),
    "weight_decay": (0.0, 0.01),
    "vtrace_lambda": (0.9, 1.0),
    "clip_rho": (1.0, 2.0),
    "clip_c": (1.0, 0.9),
    "clip_pg_rho": (1.0, 1.5),
    "rescale_epsilon": (1e-3, 1e-2),
    "eta": (0.9, 0.5),
    "latest_share": (0.8, 0.3),
    "exploration_noise": (0.1, 0.3),
    "policy_noise": (0.2, 0.1),
    "noise_clip": (0.5, 0.2),
    "critic.expectile": (0.7, 0.9),
    "weighting.inverse_temperature": (3.0, 1.0),
    "weighting.max_weight": (100.0, 5.0),
    "temperature": (1.0, 0.5),
    "output_penalty": (1e-3, 1e-2),
    "q_lambda": (0.65, 0.95),
    "target.scale": (0.9, 0.5),
    "target.temperature": (0.03, 0.1),
    "target.clip": (-1.0, -0.1),
    "intrinsic_coef": (0.5, 2.0),
    "max_exploration_noise": (0.4, 0.3),
    "gumbel_scale": (1.0, 0.5),
    "value_scale": (0.02, 0.1),
    "reward_coef": (1.0, 5.0),
    "random_share": (0.1, 0.3),
}
TEAM = {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (8,)}
REPLAY = {"replay.learning_starts": 128, "batch_size": 16, "num_updates": 2, "replay.capacity": 1024}
MORE = {
    "ppo+normalized": {"num_epochs": 1, "num_minibatches": 2, "normalize_rewards": True, "anneal_learning_rate": True},
    # The position of a return among atoms is rounded to its last digit: among a few, that is a small part of their masses.
    "dqn+c51": PARTICULAR["dqn+c51"] | {"returns": "c51:-10,10,5"},
    "dqn+prioritised": PARTICULAR["dqn"] | {"replay.priorities": "prioritized", "exploration.steps": 600},
    "impala+adam": {"optimizer": "adam"},
    "ippo": TEAM | {"num_minibatches": 2, "num_epochs": 1},
    "mappo": TEAM | {"num_minibatches": 2, "num_epochs": 1},
    "qmix": TEAM | REPLAY | {"trace_length": 4, "burn_in": 0, "replay.priorities": "prioritized"},
    "vdn": TEAM | REPLAY | {"trace_length": 4, "burn_in": 0},
    "maddpg": TEAM | REPLAY,
    "alphazero": TEAM | {"num_simulations": 4, "num_updates": 2, "batch_size": 16, "replay.capacity": 1024, "network": "mlp"},
    "self_play": TEAM | {"num_minibatches": 2, "num_epochs": 1, "num_opponents": 2, "pool_size": 2, "pool_period": 1},
}
TEAMS = ("ippo", "mappo", "qmix", "vdn", "maddpg")
DISCRETE = ("pqn", "dqn", "apex_dqn", "r2d2", "muzero", "cql", "recurrent_ppo", "impala", "ppo", "a2c", "a3c", "es")
OFTEN = ("recurrent_ppo", "dqn+c51")
LENGTH = 100
"""Iterations of the whole run, over which schedules fall or rise."""
CASES = [name for name in {**PARTICULAR, "a2c": {}, **MORE} if name not in OPTIMIZED]


def env_of(name, algorithm):
    if name == "alphazero":
        return msrl.envs.make("pgx:tic_tac_toe")
    if name == "self_play":
        return msrl.envs.make("RockPaperScissors")
    if name.endswith("+goals"):
        return msrl.envs.make("PointMaze")
    if algorithm.name in TEAMS:
        return Homes(2)
    env = "CartPole-v1" if algorithm.name in DISCRETE and name != "cql+lagrange" else "Pendulum-v1"
    return msrl.envs.make(env, **ENVS.get(env, {}))


def unrolled(agent, state):
    def step(state, _):
        state, metrics = agent.iteration(state)
        return state, metrics

    after, metrics = jax.jit(lambda state: jax.lax.scan(step, state, None, length=3))(agent.with_data(state))
    return innermost(after).params, metrics


TRACED = ("recurrent_ppo", "impala+memory", "pqn+memory", "dqn", "sac+gru", "td3", "a2c", "ippo", "bc")
SELDOM = ("ppo+normalized", "dqn+c51", "sac+cross_q", "qmix", "self_play", "muzero")


def traced(name):
    marks = [] if name in TRACED else [pytest.mark.long] if name in SELDOM else [pytest.mark.slow]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [*map(traced, CASES)])
def test_members_can_be_traced(name):
    """Without compiling anything: `-m slow` compares their numbers."""
    algorithm = msrl.algorithms.get(name.partition("+")[0])
    env, options = env_of(name, algorithm), MORE[name] if name in MORE else PARTICULAR.get(name, {})
    options = SMALL | {"num_envs": 16} | options | ({"data": noise(env)} if algorithm.offline else {})
    config = msrl.algorithms.make(algorithm, {k: v for k, v in options.items() if k in all_fields(algorithm)})
    agent = counted(members(build(config, env)), LENGTH)
    state = agent.with_data(jax.eval_shape(agent.init, jax.random.split(jax.random.key(0), 3)))
    after, metrics = jax.eval_shape(agent.iteration, state)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), each) for each in (after, state)]
    assert shapes[0] == shapes[1] and {x.shape for x in jax.tree.leaves(metrics)} <= {(3,), ()}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_members_with_all_numbers_as_data_equal_agents_with_constants(name):
    algorithm = msrl.algorithms.get(name.partition("+")[0])
    env = env_of(name, algorithm)
    options = SMALL | (MORE[name] if name in MORE else PARTICULAR.get(name, {}))
    options |= {"data": noise(env)} if algorithm.offline else {}
    options = {k: v for k, v in options.items() if k in all_fields(algorithm)}
    assert set(tunable_fields(algorithm)) <= set(VALUES), "every field of every algorithm"
    settings = {field: VALUES[field] for field in tunable_fields(msrl.algorithms.make(algorithm, options))}
    if "target_gap" in settings and name != "cql+lagrange":
        settings.pop("target_gap")  # asks for continuous actions
    configs = [msrl.algorithms.make(algorithm, options | {k: v[i] for k, v in settings.items()}) for i in range(2)]
    one = with_numbers(lambda config: build(config, env), configs[0], tuple(settings))
    agent = counted(members(one, {k: np.float32(v) for k, v in settings.items()}), LENGTH)
    params, metrics = unrolled(agent, jax.jit(agent.init)(jax.random.split(jax.random.key(0))))
    for i, config in enumerate(configs):
        alone = counted(build(config, env), LENGTH)
        wanted, measured = unrolled(alone, jax.jit(alone.init)(jax.random.split(jax.random.key(0))[i]))
        for (path, a), b in zip(jax.tree.leaves_with_path(params), jax.tree.leaves(wanted), strict=True):
            assert relative_difference(a[i], b) < 1e-5, jax.tree_util.keystr(path)
        for (path, a), b in zip(jax.tree.leaves_with_path(metrics), jax.tree.leaves(measured), strict=True):
            a = a[:, i] if a.ndim > b.ndim else a  # the age of parameters is that of the run
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=jax.tree_util.keystr(path))
