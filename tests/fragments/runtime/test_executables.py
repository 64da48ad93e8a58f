"""Programs are compiled once, cost no more than written by hand, and say what is wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax.fragments.passes.instructions import Run
from msrl_jax.fragments.runtime.executables import Executables, Request
from msrl_jax.fragments.runtime.threefry import lower
from tests.support import toy
from tests.support.compare import assert_close, run_plain


def test_errors_of_programs_whose_arguments_xla_may_split_are_shown():
    def fails(x):
        raise ValueError("no such operation")

    with pytest.raises(ValueError, match="no such operation"):
        Executables().compile(Request("key", fails, [jax.ShapeDtypeStruct((2,), jnp.float32)]))


def test_a_fragment_used_twice_is_compiled_once():
    @msrl.fragment(role="actor")
    def squash(x):
        return jnp.tanh(x) @ jnp.ones((4, 4))

    @msrl.fragment(role="learner")
    def shift(x):
        return x + 1

    def iteration(x):
        return squash(shift(squash(x))), {}

    state = jnp.ones((8, 4))
    program = msrl.compile(iteration, state, policy=msrl.policies.SingleLearnerCoarse(actors=1), axes=P())
    names = [i.name for i in program.instructions if isinstance(i, Run)]
    assert names == ["squash", "shift", "squash"]
    after, metrics = program.run(state, 2)
    assert program.num_compilations == 2 and metrics == {}
    assert_close(after, run_plain(lambda x: (iteration(x)[0], {"_": x[0, 0]}), state, 2)[0])


def test_fused_program_costs_no_more_than_the_handwritten_scan(devices):
    """Invariant: GPUOnly is `jit(scan(iteration))`, in results, FLOPs and bytes."""
    state = toy.initial_state()
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.GPUOnly(), axes=toy.AXES, devices=devices[:1])
    program.warm_up(3)

    @jax.jit
    def handwritten(state):
        return jax.lax.scan(lambda s, _: toy.iteration(s), state, None, length=3)

    reference = lower(handwritten, state).compile()  # with the random bits of programs
    (fused,) = program.compiled(3)
    ours = fused.cost_analysis()
    theirs = reference.cost_analysis()
    assert ours["flops"] <= theirs["flops"]
    assert ours["bytes accessed"] <= theirs["bytes accessed"]
    expected, metrics = reference(state)
    after, stacked = program.run(state, 3)
    for x, y in zip(jax.tree.leaves((after.params, stacked)), jax.tree.leaves((expected.params, metrics)), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
