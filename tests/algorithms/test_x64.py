"""Under `jax_enable_x64`, what is 32 bits wide stays so: states and metrics have the types that they have without it."""

import dataclasses

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax._compat import equations_in
from msrl_jax.algorithms import C51, TQC
from msrl_jax.configs.names import all_fields
from msrl_jax.envs.base import to_32_bit
from msrl_jax.run.prepare import make_experiment
from tests.support.many_agents import Homes
from tests.support.slow import mostly_slow
from tests.support.transitions import noise

SIZES = {
    "num_envs": 8,
    "unroll_length": 4,
    "num_epochs": 1,
    "num_minibatches": 2,
    "hidden_sizes": (8,),
    "core.size": 4,
    "replay.learning_starts": 64,
    "batch_size": 16,
    "replay.capacity": 512,
    "num_simulations": 2,
    "model_steps": 2,
    "num_workers": 4,
    "latent_size": 4,
    "num_opponents": 2,
    "pool_size": 2,
}
WINDOWS = {"trace_length": 4, "replay.n_step": 1}
PARTICULAR = {
    "r2d2": {"burn_in": 0, **WINDOWS},
    "qmix": {"trace_length": 4, "mixing_size": 4, "hyper_size": 4},
    "vdn": {"trace_length": 4},
    "dqn": {"replay.priorities": "prioritized", "replay.n_step": 3, "returns": "iqn"},
    "apex_dqn": {"returns": "c51"},
    "sac": {"returns": "tqc", "normalize_observations": True},
    "mappo": {"normalize_values": True},
    "impala": {"core": "lru:4"},
    "a2c": {"core": "gru:4"},
    "muzero": {"model_steps": 2, "replay.n_step": 2},
    "teams": {"teams": {"walker": "ippo:num_epochs=1,num_minibatches=2,hidden_sizes=[8]"}},
}
ENVS = dict.fromkeys(("sac", "td3", "ddpg", "cql", "iql"), "Pendulum-v1") | {"self_play": "KuhnPoker"}
NAMES = sorted({*algorithms.names()} - {"alphazero"})  # pgx's games do not run under it


@dataclasses.dataclass(frozen=True)
class Narrow(Homes):
    def reset(self, key):
        return to_32_bit(super().reset(key))

    def step(self, key, state, action):
        return to_32_bit(super().step(key, state, action))


def options(name):
    config = algorithms.get(name)
    env = ENVS.get(name) or (Narrow() if config.multi_agent else "CartPole-v1")
    known = all_fields(config())
    if config.offline:
        return env, {"data": noise(envs.make(env)), "hidden_sizes": (8,), "num_updates": 2, "batch_size": 16}
    fields = {k: v for k, v in SIZES.items() if k in known}
    return env, fields | PARTICULAR.get(name, {})


def types(name):
    """Of the state, and of what an iteration returns; and the types of the results of all matrix products."""
    env, fields = options(name)
    agent = make_experiment(name, env, total_steps=10_000, **fields).agent
    state = jax.eval_shape(lambda key: agent.with_data(agent.init(key)), jax.random.key(0))
    program, results = jax.make_jaxpr(agent.iteration, return_shape=True)(state)
    products = [eqn for eqn in equations_in(program.jaxpr) if eqn.primitive.name == "dot_general"]
    described = jax.tree.map(lambda x: (x.shape, x.dtype), (state, *results))
    return jax.tree.leaves_with_path(described, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 2), {
        eqn.outvars[0].aval.dtype.name for eqn in products
    }


@pytest.mark.parametrize("name", mostly_slow(NAMES, "dqn"))
def test_states_and_metrics_have_the_types_of_32_bits(name):
    expected = types(name)
    with jax.enable_x64(True):
        assert types(name) == expected
    assert expected[1] <= {"float32"}


@pytest.mark.parametrize("returns", [C51(-1.0, 1.0, 5), TQC(5, 1)])
def test_returns_losses_and_errors_of_critics_have_32_bits(returns):
    prediction = returns.of_critics(0.9)
    outputs = jax.ShapeDtypeStruct((2, 3, 5), np.float32)

    def every(outputs):
        target = prediction.target(outputs, lambda returns: np.float32(0.9) * returns)
        scores = prediction.loss(outputs, target), prediction.error(outputs, target)
        return target, prediction.expected(outputs), prediction.value(outputs), *scores

    with jax.enable_x64(True):
        assert {x.dtype.name for x in jax.eval_shape(every, outputs)} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(NAMES, "dqn"))
def test_a_run_trains_and_is_evaluated(name, tmp_path):
    env, fields = options(name)
    with jax.enable_x64(True):
        steps = 4 if algorithms.get(name).offline else 128
        result = msrl.train(
            name,
            env,
            total_steps=steps,
            chunk=1,
            eval_episodes=2,
            devices=jax.devices()[:1],
            progress=False,
            out=tmp_path,
            **fields,
        )
        assert result.status == "finished" and np.isfinite(result.evaluation.returns).all()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(result.state.params)))
