"""New agents that act, for what does not need training."""

import functools

import jax

import msrl_jax as msrl
from msrl_jax.configs.names import all_fields
from msrl_jax.run.evaluation.evaluate import Behavior
from tests.support.small_runs import ENVS, PARTICULAR, SMALL
from tests.support.transitions import noise


@functools.cache
def acting(name, env, **options):
    """The behavior of a small algorithm, `NAME+VARIANT`, in an environment, or in one of that name, and a new state."""
    algorithm = msrl.algorithms.get(name.partition("+")[0])
    made = msrl.envs.make(env, **ENVS.get(env, {})) if isinstance(env, str) else env
    options = SMALL | PARTICULAR.get(name, {}) | options
    options = {key: x for key, x in options.items() if key in all_fields(algorithm)}
    options |= {"data": noise(made)} if algorithm.offline else {}
    agent = msrl.algorithms.build(msrl.algorithms.make(algorithm, options), made)
    return Behavior(agent, made), agent.with_data(jax.jit(agent.init)(jax.random.key(0)))
