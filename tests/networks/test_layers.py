"""Layers with custom gradients equal the usual layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax.kernels.convolution import convolve
from msrl_jax.kernels.networks import matmul


def normal(*shapes):
    return [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]


def test_matmul_and_its_gradients_equal_a_plain_product():
    x, w, g = normal((3, 4, 5), (5, 6), (3, 4, 6))
    out, vjp = jax.vjp(matmul, x, w)
    wide = [np.asarray(a, np.float64) for a in (x, w, g)]
    np.testing.assert_allclose(out, wide[0] @ wide[1], rtol=1e-5, atol=1e-5)
    dx, dw = vjp(g)
    np.testing.assert_allclose(dx, wide[2] @ wide[1].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw, np.einsum("tbi,tbo->io", wide[0], wide[2]), rtol=1e-5, atol=1e-5)


def test_gradients_keep_the_types_of_what_is_multiplied():
    """Environments give observations of 64 bits where those are on, and parameters have 32."""
    with jax.enable_x64(True):
        x, w = jnp.arange(6, dtype=jnp.float64).reshape(2, 3), jnp.ones((3, 2), jnp.float32)
        product, pullback = jax.vjp(matmul, x, w)
        dx, dw = pullback(jnp.ones_like(product))
        assert product.dtype == dx.dtype == jnp.float64 and dw.dtype == jnp.float32
        np.testing.assert_array_equal(dw, np.asarray(x).sum(0)[:, None].repeat(2, axis=1))


@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_and_its_gradients_are_sums_over_patches(stride):
    x, w, g = normal((4, 6 + 3 * (stride - 1), 7 + 5 * (stride - 1), 3), (3, 2, 3, 5), (4, 4, 6, 5))
    out, vjp = jax.vjp(lambda x, w: convolve(x, w, stride), x, w)
    x, w, wide_g = (np.asarray(a, np.float64) for a in (x, w, g))
    want, dx, dw = np.zeros(g.shape), np.zeros(x.shape), np.zeros(w.shape)
    for i in range(3):
        for j in range(2):
            part = np.s_[:, i : i + 4 * stride - (stride - 1) : stride, j : j + 6 * stride - (stride - 1) : stride]
            want += x[part] @ w[i, j]
            dx[part] += wide_g @ w[i, j].T
            dw[i, j] = np.einsum("bhwc,bhwd->cd", x[part], wide_g)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    for got, wanted in zip(vjp(g), (dx, dw), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_batched_gradients_equal_the_gradients_of_each_member():
    x, w = normal((4, 6, 6, 2), (5, 3, 3, 2, 3))
    gradient = jax.grad(lambda w: (convolve(x, w, 1) ** 2).sum())
    each = np.stack([gradient(one) for one in w])
    np.testing.assert_allclose(jax.vmap(gradient)(w), each, rtol=1e-4, atol=1e-3)
