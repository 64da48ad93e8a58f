"""Helpers of the marker's tests: comparison with the plain function, and the fragments of a jaxpr."""

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import sub_jaxprs
from msrl_jax.fragments.graph.marker import fragment, is_fragment

KEY = jax.random.key(0)
PARAMS = {"w": jnp.array([[0.3, -1.2], [0.7, 0.1], [-0.4, 0.9]]), "b": jnp.array([0.2, -0.5])}
X = jnp.array([0.5, -1.0, 2.0])
XS = jnp.linspace(-2.0, 2.0, 24).reshape(8, 3)


def assert_same(marked, plain):
    """Equal structure, shapes, dtypes and weak types; values equal up to rounding, because XLA fuses only under `jit`."""
    assert jax.tree.structure(marked) == jax.tree.structure(plain)
    for a, b in zip(jax.tree.leaves(marked), jax.tree.leaves(plain), strict=True):
        assert jax.typeof(a) == jax.typeof(b) and jax.typeof(a).weak_type == jax.typeof(b).weak_type
        if jnp.issubdtype(jax.typeof(a).dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, complex), np.asarray(b, complex)
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def equations(jaxpr):
    """All equations of a jaxpr, nested ones included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in sub_jaxprs(eqn):
            yield from equations(sub)


def fragments_of(fn, *args):
    """The names of the fragments in the jaxpr of a function."""
    return [e.params["name"] for e in equations(jax.make_jaxpr(fn)(*args).jaxpr) if is_fragment(e)]


def mlp(params, x):
    return jnp.tanh(x @ params["w"] + params["b"])


mlp_fragment = fragment(mlp)


def loss(f):
    """The function that sums the squares of the results of `f`."""
    return lambda *args: sum((y * y).sum() for y in jax.tree.leaves(f(*args)))
