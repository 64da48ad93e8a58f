"""Kernels, interpreted on the CPU and lowered for accelerators, against the plain scan and a loop in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import fragment
from msrl_jax.algorithms.returns.kernels import reverse_scan, reverse_scan_gpu, reverse_scan_tpu

KERNELS = {"gpu": reverse_scan_gpu, "tpu": reverse_scan_tpu}


def example(*shape):
    a, b = jax.random.normal(jax.random.key(0), shape), jax.random.uniform(jax.random.key(1), shape)
    return a, jnp.where(jax.random.bernoulli(jax.random.key(2), 0.1, shape), 0.0, b)


def plain_loop(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    x, after = np.zeros_like(a), np.zeros_like(a[0])
    for t in reversed(range(len(a))):
        x[t] = after = a[t] + b[t] * after
    return x


@pytest.fixture(params=sorted(KERNELS))
def kernel(request):
    return functools.partial(KERNELS[request.param], interpret=True)


# One block and several, in both dimensions, full and ragged.
@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (7, 128), (16, 130), (513, 3), (1024, 2), (5,), (6, 2, 3)], ids=str)
def test_values_and_gradients_equal_a_scan(kernel, shape):
    a, b = example(*shape)
    got = jax.jit(kernel)(a, b)
    assert got.shape == shape and got.dtype == jnp.float32
    np.testing.assert_allclose(got, plain_loop(a, b), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got, reverse_scan(a, b), rtol=1e-6, atol=1e-6)
    weight = jax.random.normal(jax.random.key(3), shape)
    loss = lambda f: lambda a, b: jnp.sum(weight * f(a, b) ** 2)  # noqa: E731
    gradients = [jax.jit(jax.grad(loss(f), (0, 1)))(a, b) for f in (kernel, reverse_scan)]
    for x, y in zip(*gradients, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_members_of_a_batch_are_solved_one_by_one(kernel):
    a, b = example(3, 9, 5)
    got = jax.vmap(kernel)(a, b)
    for i in range(3):
        np.testing.assert_allclose(got[i], plain_loop(a[i], b[i]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "b"),
    [(np.ones((3, 2), np.float32), np.ones((3, 1), np.float32)), (np.ones(3, np.float32), np.ones(3, np.float16)),
     (np.ones((0, 2), np.float32), np.ones((0, 2), np.float32))],
)  # fmt: skip
def test_other_arrays_are_refused(kernel, a, b):
    with pytest.raises(TypeError, match=r"takes two float32 arrays \[T, ...\] of one shape, not .*; convert them, or use"):
        kernel(jnp.asarray(a), jnp.asarray(b))


solve = fragment(role="learner", name="solve", implementations=KERNELS)(reverse_scan)


def lowered(fn, platform):
    a, b = example(20, 300)
    return jax.jit(jax.value_and_grad(lambda a, b: fn(a, b).sum(), (0, 1))).trace(a, b).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(
    ("platform", "target"), [("cuda", "__gpu$xla.gpu.triton"), ("rocm", "__gpu$xla.gpu.triton"), ("tpu", "tpu_custom_call")]
)
def test_a_fragment_lowers_to_two_kernels_on_accelerators(platform, target):
    """One solves the recursion, one its derivative; no loop is left."""
    text = lowered(solve, platform).as_text()
    assert re.findall(r"custom_call @([\w.$]+)\(", text) == [target] * 2
    assert "stablehlo.while" not in text


def test_a_fragment_compiles_to_the_plain_scan_on_cpus():
    def instructions(fn):
        return sorted(re.findall(r" (\w[\w-]*)\(", lowered(fn, "cpu").compile().as_text()))

    assert instructions(solve) == instructions(reverse_scan)
    a, b = example(20, 300)
    np.testing.assert_array_equal(jax.jit(solve)(a, b), jax.jit(reverse_scan)(a, b))
