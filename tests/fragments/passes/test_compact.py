"""Loops that keep their small arrays together carry one and stack one; without XLA's optimisations the bits are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax._compat import equations_in, jaxpr_as_fun, scan_p, scan_parts
from msrl_jax.algorithms import counted
from msrl_jax.fragments.passes import prepare
from msrl_jax.fragments.passes.compact import combine_small_arrays
from msrl_jax.fragments.runtime import fused_loop


def assert_equal_bits(expected, found):
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        raw = [np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in (a, b)]
        assert raw[0].tobytes() == raw[1].tobytes()


def same_bits(fn, *args):
    """The loops of `fn` after the pass, each the numbers of arrays in its carry and of those that it stacks."""
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    new = combine_small_arrays(closed)
    structure, leaves = jax.tree.structure(shapes), jax.tree.leaves(args)
    expected, found = (jax.jit(jaxpr_as_fun(x))(*leaves) for x in (closed, new))
    assert_equal_bits(*(jax.tree.unflatten(structure, x) for x in (expected, found)))
    scans = [(e, scan_parts(e)) for e in equations_in(new.jaxpr) if e.primitive is scan_p]
    return [(scan.num_carry, len(e.outvars) - scan.num_carry) for e, scan in scans]


def loop(start, xs, reverse=False, length=None):
    def step(carry, x):
        key, flag, count, level, half, large = carry
        key, own = jax.random.split(key)
        level = jnp.sin(level) + x + jax.random.uniform(own, level.shape)
        after = key, ~flag, count + 1, level, half + 1, large * 2
        return after, (level.sum(), flag, count, level > 0.5, half, jnp.float32(jnp.nan) * level[0])

    return jax.lax.scan(step, start, xs, reverse=reverse, length=length)


def start():
    small = jnp.array([True, False]), jnp.int32(2**31 - 2), jnp.array([[0.5], [-0.0]], jnp.float32)
    return jax.random.key(0), *small, jnp.float16(0.25), jnp.ones(5000, jnp.float32)


@pytest.mark.parametrize(("length", "reverse"), [(0, False), (3, True), (5, False), (8, True)])
def test_a_loop_of_all_kinds_of_arrays(length, reverse):
    # Keys, halves and what is large stay as they are: 3 of 6 are carried as one, and 5 of the 6 that are stacked are one.
    xs = jnp.arange(length, dtype=jnp.float32)
    expected = (1 + 3, 1 + 1) if length >= 4 else (6, 6)  # of a shorter loop, taking them apart costs more
    assert same_bits(lambda *args: loop(*args, reverse=reverse), start(), xs) == [expected]


def test_no_step_is_simplified_with_the_next_one():
    def step(carry, _):
        a, b, c = carry
        return (a * 1.0001, b / 3, c - 0.1), None

    assert same_bits(lambda x: jax.lax.scan(step, (x, x, x), None, length=16), jnp.float32(1)) == [(1, 0)]


def test_loops_in_loops_branches_and_fragments():
    @msrl.fragment(role="learner")
    def inner(start, xs):
        return jax.lax.cond(xs[0] > 0, lambda s: loop(s, xs), lambda s: loop(s, -xs), start)

    def outer(start, xs):
        return jax.lax.scan(inner, start, jnp.stack([xs, -xs, xs, xs]))

    # Two branches of a fragment in a loop; the one loop that keeps keys and halves apart is around them.
    assert same_bits(outer, start(), jnp.arange(1.0, 5.0)) == [(4, 2)] * 3


def test_what_has_few_arrays_or_calls_the_host_stays_as_it_is():
    def few(x):
        return jax.lax.scan(lambda c, _: ((c[0] + 1, c[1] * 2), c), (x, x), length=11)

    def calls(x):
        def step(c, _):
            jax.debug.callback(lambda: None, ordered=True)
            return c, c

        return jax.lax.scan(step, (x, x, x), length=4)

    for fn in (few, calls):
        closed = jax.make_jaxpr(fn)(1.0)
        assert combine_small_arrays(closed) is closed


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ppo", "dqn"])
def test_an_iteration_is_the_same(algorithm):
    small = {"num_envs": 4, "unroll_length": 8, "hidden_sizes": (8,)}
    if algorithm == "dqn":
        small |= {"replay.learning_starts": 64, "batch_size": 8, "replay.capacity": 1024, "num_updates": 4}
    agent = counted(msrl.algorithms.build(msrl.algorithms.make(algorithm, small), msrl.envs.make("CartPole-v1")), 10)
    state = jax.jit(agent.init)(jax.random.key(0))
    for _ in range(3):  # with a buffer that fills
        same_bits(agent.iteration, state)
        state = jax.jit(agent.iteration)(state)[0]


def test_iterations_that_carry_their_small_arrays_as_one_are_the_same(monkeypatch):
    def iteration(state):
        (key, flag, count, level, half, large), rows = loop(state, jnp.arange(4.0))
        return (key, flag, count, level, half, large), {"rows": rows[0], "flag": flag, "count": count, "half": half}

    def ran(packs):
        for module in (prepare, fused_loop):
            monkeypatch.setattr(module, "is_single_accelerator", lambda placement: packs)
        program = msrl.compile(iteration, start(), policy=msrl.policies.GPUOnly(), devices=jax.devices()[:1])
        whole, parts = program.run(start(), 5), program.run(start(), 5, chunk=2)  # of the last chunk's rows one has a meaning
        return whole, parts, program.compiled(5)[0].as_text().count("get-tuple-element")

    (*expected, many), (*found, few) = ran(False), ran(True)
    assert few < many
    assert_equal_bits(expected, found)
