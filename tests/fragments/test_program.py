"""What a program takes and refuses, and what it leaves alone."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from tests.support import toy

COARSE = msrl.policies.SingleLearnerCoarse()


@msrl.fragment(role="actor")
def act(x):
    return x + 1


@msrl.fragment(role="learner")
def fit(x):
    return x * 2


def compile_(iteration, state, policy=COARSE, **options):
    return msrl.compile(iteration, state, policy=policy, **options)


@pytest.mark.parametrize("policy", [msrl.policies.GPUOnly(), COARSE], ids=lambda p: type(p).__name__)
def test_runs_are_positive_and_states_fit(policy):
    program = toy.program(policy)
    for iterations in (0, -3, 2.5):
        with pytest.raises(ValueError, match=r"iterations=.* must be an integer of at least 1"):
            program.run(toy.initial_state(), iterations)
    with pytest.raises(ValueError, match=r"state\.x is float32\[4, 2\], but the program was compiled for float32\[16, 2\]"):
        program.run(toy.initial_state()._replace(x=jnp.ones((4, 2))), 1)
    with pytest.raises(ValueError, match="compiled for a state"):
        program.run({"x": jnp.ones(2)}, 1)


def test_plans_need_no_data():
    """A state of shapes is enough to compile and to explain."""
    assert toy.program(COARSE).explain().bytes_crossing > 0


def test_numpy_states_run():
    state = toy.initial_state()._replace(x=np.zeros((toy.ENVS, 2), np.float32))
    for policy in (msrl.policies.GPUOnly(), COARSE):
        program = toy.program(policy)
        kept, _ = program.run(state, 1)
        given, _ = program.run(program.place(state)._replace(x=state.x), 1, donate=True)
        np.testing.assert_array_equal(kept.x, given.x)
        assert not state.x.any()  # the caller's memory is not written to


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad])
def test_programs_are_no_traced_functions(transform):
    program = compile_(lambda s: (fit(act(s)), {"m": s.sum()}), jnp.ones(8), msrl.policies.GPUOnly(1))
    with pytest.raises(TypeError, match=r"a program is not a function of traced arrays: .*Call it on arrays"):
        transform(lambda s: program(s)[0].sum())(jnp.ones((2, 8)) if transform is jax.vmap else jnp.ones(8))
    with pytest.raises(TypeError, match="not a function of traced arrays"):
        transform(lambda s: program.run(s, 1)[0].sum())(jnp.ones((2, 8)) if transform is jax.vmap else jnp.ones(8))


@pytest.mark.parametrize(("policy", "chunk"), [(msrl.policies.GPUOnly(), 3), (COARSE, 1)], ids=str)
def test_metrics_may_be_written_to(policy, chunk):
    program = compile_(lambda s: (fit(act(s)), {"m": s.sum(), "key": jax.random.key(0)}), jnp.ones(8), policy, axes=P("env"))
    _, metrics = program.run(jnp.ones(8), 3, chunk=chunk)
    metrics["m"] *= 2
    np.testing.assert_array_equal(metrics["m"], [16, 64, 160])


def test_a_state_that_was_deleted_says_so():
    program = compile_(lambda s: (fit(act(s)), {}), jnp.ones(8))
    state = program.place(jnp.ones(8))
    state.delete()
    with pytest.raises(RuntimeError, match=r"state no longer has memory.*donate_argnums or delete"):
        program.run(state, 1)


def test_a_program_keeps_no_state_alive():
    state = toy.initial_state()
    alive = weakref.ref(state.x)
    program = msrl.compile(toy.iteration, state, policy=msrl.policies.GPUOnly(), axes=toy.AXES)
    del state
    gc.collect()
    assert alive() is None and program.devices
