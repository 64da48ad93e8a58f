"""A state is computed where it is kept, and its memory is counted before that."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import policies
from msrl_jax.fragments.runtime.transfer import LARGE, put

ROWS = 2 * LARGE // 4 // 8  # of eight float32 environments each: twice what counts as large


class State(NamedTuple):
    params: jax.Array
    replay: jax.Array
    obs: jax.Array


AXES = State._make([P(), P(None, "env"), P("env")])


@msrl.fragment(role="actor")
def act(params, obs):
    return obs + params.sum()


@msrl.fragment(role="learner")
def learn(params, replay, obs):
    return params + replay[0].mean(), replay.at[0].set(obs)


def iteration(state):
    obs = act(state.params, state.obs)
    params, replay = learn(state.params, state.replay, obs)
    return State(params, replay, obs), {}


def init(key):
    return State(jax.random.normal(key, (3,)), jnp.arange(ROWS * 8.0).reshape(ROWS, 8), jax.random.normal(key, (8,)))


def make_program(policy):
    key = jax.random.key(0)
    return msrl.compile(iteration, jax.eval_shape(init, key), policy=policy, axes=AXES), key


@pytest.mark.parametrize("policy", [policies.SingleLearnerCoarse(buffers=2), policies.SingleLearnerCoarse(staleness=1)])
def test_initialize_equals_place_of_the_same_state(policy):
    program, key = make_program(policy)
    found, expected = program.initialize(init, key), program.place(jax.jit(init)(key))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.sharding == y.sharding
        np.testing.assert_array_equal(x, y)
    state, _ = program.run(found, 1, donate=True)
    np.testing.assert_array_equal(program.unwrap(state).replay[0], program.unwrap(state).obs)


def test_compiling_the_initial_state_counts_as_compiling():
    program, key = make_program(policies.GPUOnly())
    before = program.compile_seconds
    program.initialize(init, key)
    assert program.compile_seconds > before


def test_no_device_computes_more_than_its_part_of_a_large_leaf():
    program, key = make_program(policies.MultiLearner())
    before = {id(x) for x in jax.live_arrays()}
    compiled = []

    def record(*args):
        compiled.append(args)
        return init(*args)

    state = program.initialize(record, key)
    assert len(compiled) == 1  # one trace for the small leaves and for the large one
    shards = [s for x in jax.live_arrays() if id(x) not in before for s in x.addressable_shards]
    assert max(s.data.nbytes for s in shards) == ROWS * 8 * 4 / 8
    assert state.replay.sharding.spec == P(None, "devices")


def test_states_that_do_not_fit_are_refused_in_bytes():
    def huge(key):
        return State(jax.random.normal(key, (3,)), jnp.zeros((2**30, 512)), jnp.zeros(512))

    state = jax.eval_shape(huge, jax.random.key(0))
    program = msrl.compile(iteration, state, policy=policies.MultiLearner(), axes=AXES)
    total = 2**30 * 512 * 4 + 512 * 4 + 8 * 3 * 4  # the parameters stand on all eight devices
    with pytest.raises(ValueError, match=r"its largest leaf is state\.replay, float32\[1073741824, 512\]") as error:
        program.state.check_memory()
    assert f"takes {total:,} bytes of" in str(error.value)


def test_seeds_count():
    """One buffer fits the host's memory, a thousand do not."""
    with pytest.raises(ValueError, match=r"the state takes [\d,]+ bytes of .* its largest leaf is state\.inner\.replay"):
        msrl.train(
            "dqn",
            "CartPole-v1",
            replay=msrl.algorithms.Replay(2_000_000_000 // 64),
            seeds=1000,
            total_steps=2000,
            eval_episodes=0,
        )


def test_one_array_in_two_leaves_gets_memory_for_each(devices):
    at = jax.sharding.NamedSharding(jax.sharding.Mesh(devices[:1], ("d",)), P())
    x = jax.device_put(jnp.arange(4.0), at)
    ((a,), (b,)) = put([x, x], [(at,), (at,)], copy=False)
    assert a is x and b.unsafe_buffer_pointer() != a.unsafe_buffer_pointer()
    np.testing.assert_array_equal(a, b)
