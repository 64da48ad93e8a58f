"""A linear recurrence and its gradients, by a loop and by a parallel scan, against float64 NumPy."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.networks.linear_recurrence import associative, linear_recurrence, recurrence, step_by_step


def plain(decay, inputs, start):
    h, steps = start, []
    for a, x in zip(decay, inputs, strict=True):
        h = a * h + x
        steps.append(h)
    return np.stack(steps)


def example(num_steps):
    """Decays, inputs and start; some decays are 0, as where an episode begins."""
    numbers = np.random.default_rng(num_steps)
    decay = numbers.uniform(size=(num_steps, 3)) * (numbers.uniform(size=(num_steps, 3)) > 0.2)
    return decay, numbers.normal(size=(num_steps, 3)), numbers.normal(size=3)


@pytest.mark.parametrize("num_steps", [1, 2, 11])
@pytest.mark.parametrize("scan", [step_by_step, associative])
def test_a_recurrence_and_its_gradients_equal_a_plain_loop(scan, num_steps):
    """A state is affine in every single number, so its derivative is the difference between a 1 and a 0 in its place."""
    wide = example(num_steps)
    weights = np.random.default_rng(0).normal(size=wide[0].shape)
    narrow = [jnp.float32(x) for x in wide]
    np.testing.assert_allclose(recurrence(scan, *narrow), plain(*wide), rtol=1e-5, atol=1e-6)
    gradients = jax.grad(lambda *args: (recurrence(scan, *args) * weights.astype(np.float32)).sum(), (0, 1, 2))(*narrow)
    for i, gradient in enumerate(gradients):
        for place in np.ndindex(gradient.shape):
            ends = []
            for number in (0.0, 1.0):
                changed = [x.copy() for x in wide]
                changed[i][place] = number
                ends.append((plain(*changed) * weights).sum())
            np.testing.assert_allclose(gradient[place], ends[1] - ends[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("platform", "loops"), [("cpu", 2), ("cuda", 0), ("tpu", 0)])
def test_only_a_cpu_computes_step_by_step(platform, loops):
    """One loop forward and one backward; elsewhere none."""
    gradient = jax.jit(jax.grad(lambda *args: linear_recurrence(*args).sum(), (0, 1, 2)))
    arrays = [jnp.float32(x) for x in example(11)]
    lowered = jax.export.export(gradient, platforms=[platform])(*arrays).mlir_module()
    assert lowered.count("stablehlo.while") == loops
