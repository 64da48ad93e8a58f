"""Learning rates against exact fractions, far beyond where counters of 32 bits wrap, and steps of descent."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from msrl_jax.algorithms import Progress
from msrl_jax.algorithms.loops.updates import annealed, descend, make_optimizer
from msrl_jax.fragments.counters import counter


@pytest.mark.parametrize("iteration", [0, 1, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 6 * 10**9, 10**10])
def test_the_learning_rate_falls_linearly_over_a_run_of_many_iterations(iteration):
    iterations = 5 * 10**9
    want = float(Fraction(3, 10**4) * max(Fraction(iterations - iteration, iterations), 0))
    got = jax.jit(lambda count: annealed(3e-4, Progress(count, iterations), True))(counter(iteration))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=3e-4 * 2**-22)
    assert got.dtype == jnp.float32 and not got.weak_type


@pytest.mark.parametrize(("total", "falls"), [(100, False), (None, True)])
def test_the_learning_rate_stays_without_annealing_or_a_length_of_the_run(total, falls):
    rate = annealed(0.5, Progress(counter(50), total), falls)
    assert rate == 0.5 and rate.dtype == jnp.float32 and not rate.weak_type


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_directions_and_descent_are_the_optimizers_of_optax(name):
    """Two steps on gradients longer than the norm that they are scaled down to."""
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array([[3.0]])}
    usual = {"adam": optax.adam(0.1, eps=1e-5), "rmsprop": optax.rmsprop(0.1, 0.9, eps=1e-5, eps_in_sqrt=True)}[name]
    reference = optax.chain(optax.clip_by_global_norm(0.5), usual)
    optimizer = make_optimizer(name, max_grad_norm=0.5, epsilon=1e-5, rms_decay=0.9)
    want, want_state, state = params, reference.init(params), optimizer.init(params)
    for _ in range(2):
        updates, want_state = reference.update(want, want_state)
        want = optax.apply_updates(want, updates)
        directions, state = optimizer.update(params, state)
        params = descend(params, directions, jnp.float32(0.1))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), params, want)
