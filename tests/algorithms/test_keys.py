"""No algorithm uses a random key twice, within an iteration or in two of them."""

import jax
import pytest

import msrl_jax as msrl
from msrl_jax import algorithms
from msrl_jax.algorithms import GRU, LRU, LSTM, GTrXL, MinGRU
from msrl_jax.configs.names import all_fields
from tests.support.agents import make_counted
from tests.support.keys import key_uses, reused_keys
from tests.support.many_agents import Homes
from tests.support.transitions import noise

ITERATIONS = 3
SMALL = {
    "num_envs": 4,
    "unroll_length": 4,
    "num_minibatches": 2,
    "num_epochs": 2,
    "hidden_sizes": (4,),
    "num_updates": 2,
    "batch_size": 8,
    "replay.capacity": 64,
    "replay.learning_starts": 16,
    "replay.shards": 2,
    "replay.priorities": "prioritized",
    "core.size": 4,
    "burn_in": 0,
    "trace_length": 2,
    "replay.n_step": 1,
    "model_steps": 1,
    "latent_size": 4,
    "num_simulations": 2,
    "mixing_size": 4,
    "hyper_size": 4,
    "num_opponents": 2,
    "pool_size": 2,
    "pool_period": 1,
    "num_workers": 2,
    "replay_batches": 2,
    "num_samples": 1,
}
PARTICULAR = {
    "teams": {"teams": "player_0=ippo:num_minibatches=2 player_1=ippo:num_minibatches=2"},
    "impala_rnd": {"replay_batches": 0, "num_updates": 1},
}
CONTINUOUS = ("sac", "td3", "ddpg")
OFTEN = ("ppo", "sac")
SELDOM = ("dqn", "es", "ippo", "ppo_rnd", "qmix", "r2d2", "self_play")  # others share most of a loop with them


def environment(name):
    if name == "alphazero":
        return msrl.envs.make("pgx:tic_tac_toe")
    if name in ("self_play", "teams"):
        return msrl.envs.make("KuhnPoker")
    if algorithms.get(name).multi_agent:
        return Homes(2, horizon=5)
    return msrl.envs.make("Pendulum-v1" if name in CONTINUOUS else "CartPole-v1", max_steps_in_episode=5)


def uses_of(name):
    """The uses of keys in the first iterations of a small run."""
    kind, env = algorithms.get(name), environment(name)
    fields = all_fields(kind())
    given = {field: x for field, x in SMALL.items() if field in fields} | PARTICULAR.get(name, {})
    # Windows need a core where hindsight is possible, and a sum has no sizes.
    unused = ("burn_in", "trace_length") if "hindsight" in fields else ("mixing_size", "hyper_size") if name == "vdn" else ()
    given = {field: x for field, x in given.items() if field not in unused}
    if "data" in fields:
        given["data"] = noise(env, 64)
    agent = make_counted(name, env, ITERATIONS, **given)

    def run(key):
        state = agent.with_data(agent.init(key))
        return jax.lax.scan(lambda state, _: agent.iteration(state), state, length=ITERATIONS)

    return key_uses(run, jax.random.key(0))


def without(uses, *places):
    return [use for use in uses if not any(place in use.where for place in places)]


def marked(name):
    marks = [] if name in OFTEN else [pytest.mark.long] if name in SELDOM else [pytest.mark.slow]
    return pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", [*map(marked, algorithms.names())])
def test_no_key_is_used_twice(name):
    uses = uses_of(name)
    if name == "es":  # the learner makes the noise of the actors again
        drawn = [use for use in uses if "draw_noise" in use.where]
        assert len(drawn) == 2 * len({*drawn})
        uses = [*without(uses, "draw_noise"), *{*drawn}]
    # Where each action is either random or the policy's, both are drawn with one key.
    if name in (*CONTINUOUS, "maddpg"):
        assert reused_keys(without(uses, ".noise.", "distributions.py")) == []
        uses = without(uses, "uniform_actions")
    assert reused_keys(uses) == []
    assert sum(use.kind == "drawn from" for use in uses) > 30


def test_first_states_of_a_pool_have_keys_of_their_own():
    """The maze splits the key of a reset, so a spare's key must not be one of these halves."""
    venv = msrl.envs.vectorize(msrl.envs.ResetPool(msrl.envs.make("PointMaze"), 4), 4)
    uses = key_uses(venv.reset, jax.random.key(0))
    assert reused_keys(uses) == [] and sum(use.kind == "drawn from" for use in uses) == 2 * 4 * 3


@pytest.mark.parametrize("core", [GRU(4), LSTM(4), MinGRU(4), LRU(4), GTrXL(4, heads=2, context=4)], ids=str)
def test_each_parameter_of_a_core_has_a_key_of_its_own(core):
    uses = key_uses(lambda key: core.make(3).init(key, 3), jax.random.key(0))
    assert reused_keys(uses) == [] and uses


def test_reused_keys_are_found():
    """In loops, branches and batches, and by any name of the operation."""

    def found(function):
        return reused_keys(key_uses(function, jax.random.key(0)))

    def step(key, _):
        return key, jax.random.normal(key)

    split, fold_in, normal = jax.random.split, jax.random.fold_in, jax.random.normal
    assert found(lambda key: [normal(k) for k in split(key, 3)]) == []
    assert found(lambda key: [normal(key), normal(split(key)[0])][1]) == []  # the first is not needed
    assert len(found(lambda key: normal(key) + jax.random.uniform(key))) == 1
    assert len(found(lambda key: normal(key) + normal(split(key)[0]))) == 1
    assert len(found(lambda key: normal(split(key)[0]) + normal(split(key)[1]))) == 1
    assert len(found(lambda key: jax.lax.scan(step, key, length=2)[1])) == 1
    assert len(found(lambda key: jax.vmap(lambda i: normal(fold_in(key, i // 2)))(jax.numpy.arange(3)))) == 2
    assert len(found(lambda key: jax.lax.cond(normal(key) > 9, lambda: 0.0, lambda: normal(key)))) == 1
    assert len(found(lambda key: jax.lax.while_loop(lambda x: x < 9, lambda x: x + abs(normal(key)), 0.0))) == 1
    # Folding in a small number is splitting.
    assert "made 2 times" in found(lambda key: normal(split(key)[0]) + normal(fold_in(key, 1)))[0]
