"""Operations of `jax.lax`, and of `jax.lax.linalg`, whose last bits depend on how an array is split.

Each case is a function of `Inputs` and of the dimension `d` along which it works. The first word of its name is the operation;
the rest tells cases of one operation apart.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.fragments.passes.lax_inputs import moved, scatter_rows, window

_UNARY = (
    *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "cos", "cosh"),
    *("digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "is_finite", "lgamma", "log", "log1p", "logistic"),
    *("neg", "reciprocal", "round", "rsqrt", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "tan", "tanh"),
    *(name for name in ("log2", "one_minus_square") if hasattr(lax, name)),  # from JAX 0.12 on
)
_BINARY = ("add", "atan2", "div", "eq", "ge", "gt", "le", "lt", "max", "min", "mul", "ne", "nextafter", "pow", "rem", "sub")


def _conv(width=3, stride=1, padding="SAME", groups=1, batch_groups=1, lhs=1, rhs=1):
    """Along `d`, with the other dimension as features; along the features, with `d` as the batch."""

    def f(s, d):
        x = jnp.moveaxis(s.y, d, 1)[None]  # [1, C, W]
        if batch_groups > 1:
            x = jnp.stack([x[0], 2 * x[0]])
        features = x.shape[1]
        if features % groups:
            return ()
        kernel = jnp.resize(s.w, (4, features // groups, width))
        more = {
            "feature_group_count": groups,
            "batch_group_count": batch_groups,
            "lhs_dilation": (lhs,),
            "rhs_dilation": (rhs,),
        }
        return lax.conv_general_dilated(x, kernel, (stride,), padding, **more)

    return f


def _image(stride, padding):
    """Images whose rows or columns are the split dimension, and a batch of rows."""

    def f(s, d):
        kernel = jnp.resize(s.w, (2, 1, 3, 3))
        images = lax.conv_general_dilated(s.y[None, None], kernel, stride, padding)
        rows = lax.conv_general_dilated(jnp.moveaxis(s.y, d, 0)[:, None, :], kernel[:, :, 0], stride[:1], padding)
        return images, rows

    return f


def _moderate(x):
    """Without finite numbers so large that their sums depend on the order of the terms; with nan and infinities."""
    return jnp.where(jnp.isfinite(x) & (abs(x) > 1e30), 2.0, x)


def _square(s, d):
    """A well-conditioned symmetric matrix of the size of dimension `d`, and a batch of 3 x 3 along it."""
    y = jnp.moveaxis(s.y, d, 0)
    whole = y @ y.T + 3 * jnp.eye(y.shape[0])
    few = y[:, :3]
    return whole, few[:, :, None] * few[:, None, :] + 2 * jnp.eye(3)


def _both(f):
    return lambda s, d: [f(a) for a in _square(s, d)]


def _tangent(s, d):
    return jax.jvp(lambda y: window(lax.max, -np.inf, 3, of="y")(s._replace(y=y), d), (s.y,), (s.i * 0.1,))


def _loop(s, d):
    y = jnp.moveaxis(s.y, d, 0)
    step = lambda c, row: (c * 0.5 + row, jnp.maximum(c, row))
    return lax.scan(step, y[0], y), lax.scan(step, y[0], y, reverse=True)


CLOSE = {
    **{n: lambda s, d, n=n: getattr(lax, n)(s.x) for n in _UNARY},
    **{n: lambda s, d, n=n: getattr(lax, n)(s.x, s.y) for n in _BINARY},
    "add y": lambda s, d: jnp.tanh(s.y) + lax.sin(s.y) * lax.exp(s.y),
    "associative_scan add": lambda s, d: lax.associative_scan(jnp.add, s.y, axis=d),
    "associative_scan pair": lambda s, d: lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (s.y, s.y), axis=d
    ),
    "batch_matmul": lambda s, d: lax.batch_matmul(*(2 * [_square(s, d)[1]])),
    "betainc": lambda s, d: lax.betainc(abs(s.y) + 0.1, jnp.float32(0.5) + 0 * s.y, lax.logistic(s.y)),
    "complex": lambda s, d: lax.complex(s.y, s.y * 2) * lax.complex(s.y, s.y),
    "conj": lambda s, d: lax.conj(lax.complex(s.y, s.y)),
    "imag": lambda s, d: lax.imag(lax.complex(s.y, s.y)),
    "real": lambda s, d: lax.real(lax.complex(s.y, s.y)),
    "conv": lambda s, d: lax.conv(jnp.moveaxis(s.y, d, 1)[None], jnp.resize(s.w, (2, s.y.shape[1 - d], 3)), (2,), "SAME"),
    "conv_transpose": lambda s, d: [
        lax.conv_transpose(jnp.moveaxis(s.y, d, 0)[None], jnp.resize(s.w, (3, s.y.shape[1 - d], 2)), (k,), p)
        for k in (1, 2, 3)
        for p in ("SAME", "VALID")
    ],
    "conv_with_general_padding": lambda s, d: lax.conv_with_general_padding(
        jnp.moveaxis(s.y, d, 1)[None], jnp.resize(s.w, (2, s.y.shape[1 - d], 2)), (1,), ((1, 0),), (2,), (1,)
    ),
    "conv_general_dilated_patches": lambda s, d: lax.conv_general_dilated_patches(
        jnp.moveaxis(s.y, d, 1)[None], (3,), (2,), "SAME"
    ),
    "conv_general_dilated_local": lambda s, d: lax.conv_general_dilated_local(
        jnp.moveaxis(s.y, d, 1)[None], jnp.resize(s.w, (2, s.y.shape[1 - d] * 3, -(-s.y.shape[d] // 2))), (2,), "SAME", (3,)
    ),
    **{
        f"conv_general_dilated {w} {stride} {p} {g}": _conv(w, stride, p, g)
        for w, stride, p, g in (
            *((w, st, p, 1) for w in (1, 2, 3, 4) for st in (1, 2, 3) for p in ("SAME", "VALID") if w <= 3 or st < 3),
            (3, 2, ((2, 0),), 1),
            (3, 2, ((0, 2),), 1),
            (3, 2, ((-1, 2),), 1),
            (3, 4, "SAME", 1),
            (3, 1, "SAME", 4),
            (3, 2, "SAME", 4),
            (3, 2, "SAME", 2),
            (2, 1, "VALID", 2),
        )
    },
    **{
        f"conv_general_dilated {o}": _conv(**o)
        for o in (
            {"rhs": 2},
            {"rhs": 2, "stride": 2},
            {"rhs": 3, "stride": 2},
            {"lhs": 2, "padding": ((1, 1),)},
            {"lhs": 2, "padding": ((2, 1),), "stride": 2},
            {"lhs": 3, "padding": ((2, 2),), "stride": 2},
            {"lhs": 2, "rhs": 2, "padding": ((2, 2),)},
            {"batch_groups": 2},
            {"batch_groups": 2, "stride": 2},
        )
    },
    **{
        f"conv_general_dilated image {st} {p}": _image(st, p)
        for st, p in (
            ((1, 1), "SAME"),
            ((2, 2), "SAME"),
            ((2, 1), "SAME"),
            ((1, 2), "SAME"),
            ((2, 2), "VALID"),
            ((3, 2), "SAME"),
        )
    },
    "cumsum": lambda s, d: (lax.cumsum(s.y, d), lax.cumsum(s.y, d, reverse=True)),
    "cumsum x": lambda s, d: (lax.cumsum(_moderate(s.x), d), lax.cumsum(_moderate(s.x), d, reverse=True)),
    "cumprod": lambda s, d: (lax.cumprod(s.y, d), lax.cumprod(s.y, d, reverse=True)),
    "cummax y": lambda s, d: (lax.cummax(s.y, d), lax.cummin(s.y, d, reverse=True)),
    "cumlogsumexp": lambda s, d: (lax.cumlogsumexp(s.y, d), lax.cumlogsumexp(s.y, d, reverse=True)),
    "custom_linear_solve": lambda s, d: lax.custom_linear_solve(lambda v: 2 * v, s.y, lambda _, b: b / 2, symmetric=True),
    "custom_root": lambda s, d: lax.custom_root(
        lambda v: v - s.y, s.y, lambda f, v: v - f(v), lambda g, v: v / g(jnp.ones_like(v))
    ),
    "dot": lambda s, d: lax.dot(jnp.moveaxis(s.y, d, 1), jnp.moveaxis(s.y, d, 0)),
    "dot_general": lambda s, d: (
        lax.dot_general(s.y, s.y, (((d,), (d,)), ((), ()))),
        lax.dot_general(s.y, s.y, (((d,), (d,)), ((1 - d,), (1 - d,)))),
    ),
    "fft": lambda s, d: (
        [lax.fft(jnp.moveaxis(s.y, d, 1).astype(jnp.complex64), kind, (s.y.shape[d],)) for kind in ("FFT", "IFFT")]
        + [lax.fft(jnp.moveaxis(s.y, d, 1), "RFFT", (s.y.shape[d],))]
    ),
    "igamma": lambda s, d: lax.igamma(abs(s.y) + 0.5, abs(s.y) + 0.2),
    "igammac": lambda s, d: lax.igammac(abs(s.y) + 0.5, abs(s.y) + 0.2),
    "igamma_grad_a": lambda s, d: lax.igamma_grad_a(lax.stop_gradient(abs(s.y) + 0.5), lax.stop_gradient(abs(s.y) + 0.2)),
    "random_gamma_grad": lambda s, d: lax.random_gamma_grad(
        lax.stop_gradient(abs(s.y) + 0.5), lax.stop_gradient(abs(s.y) + 0.2)
    ),
    "integer_pow": lambda s, d: lax.integer_pow(s.y, 3),
    "polygamma": lambda s, d: lax.polygamma(jnp.float32(1), abs(s.y) + 0.5),
    "zeta": lambda s, d: lax.zeta(abs(s.y) + 1.5, abs(s.y) + 1),
    "pad y": lambda s, d: lax.pad(s.y, s.y[0, 0], [(1, -1, 0), (0, 2, 1)]),
    "ragged_dot": lambda s, d: lax.ragged_dot(
        jnp.moveaxis(s.y, d, 0),
        jnp.resize(s.w, (2, s.y.shape[1 - d], 3)),
        jnp.array([s.y.shape[d] // 2, s.y.shape[d] - s.y.shape[d] // 2], jnp.int32),
    ),
    "reduce_max y": lambda s, d: (
        lax.reduce_max(s.y, (d,)),
        lax.reduce_min(s.y, (d,)),
        lax.reduce_max(s.y, (0, 1)),
        lax.reduce_max(lax.round(s.y), (d,)),
    ),
    "reduce_prod": lambda s, d: [lax.reduce_prod(s.y, a) for a in ((d,), (0, 1))],
    "reduce_sum": lambda s, d: [lax.reduce_sum(s.y, a) for a in ((d,), (0, 1))],
    "reduce_sum x": lambda s, d: [f(_moderate(s.x), a) for a in ((d,), (0, 1)) for f in (lax.reduce_sum, lax.reduce_prod)],
    "reduce_sum logs": lambda s, d: (
        jax.nn.logsumexp(s.y, d),
        jax.nn.softmax(s.y, d),
        jax.nn.logsumexp(s.x, d),
        s.y.std(d),
        jnp.median(s.y, d),
    ),
    **{
        f"reduce_window sum {v}": window(lax.add, 0.0, *v, of="y")
        for v in ((2,), (3,), (3, 2), (3, 3), (2, 2, "VALID"), (3, 1, "VALID"), (3, 1, "SAME", 2), (2, 1, "SAME", 1, 2), (2, 4))
    },
    **{
        f"reduce_window pool {v}": window(lax.max, -np.inf, *v, of="y")
        for v in ((2,), (3,), (3, 2), (3, 3), (2, 2, "VALID"), (3, 1, "VALID"), (3, 2, "VALID"), (2, 4), (1, 2))
    },
    **{f"reduce_window mul {v}": window(lax.mul, 1.0, *v, of="y") for v in ((3,), (3, 2))},
    **{f"scatter_{n} {m}": scatter_rows(f"scatter_{n}", mode=m) for n in ("add", "mul", "sub") for m in ("clip", "drop")},
    "scatter_add along": lambda s, d: jnp.zeros_like(s.y).at[(s.k, slice(None)) if d == 0 else (slice(None), s.k)].add(1.0),
    "scan": _loop,
    "top_k grad": moved(lambda x: lax.top_k(x, min(3, x.shape[-1]))[0], "y"),
    "sort grad": lambda s, d: lax.sort(s.y, dimension=d),
    "while_loop sums": lambda s, d: lax.fori_loop(0, 3, lambda i, c: c + lax.cummax(c, d), s.y),
    "cholesky": _both(lax.linalg.cholesky),
    "eigh": _both(lambda a: lax.linalg.eigh(a)[1]),
    "qr": _both(lambda a: jnp.abs(lax.linalg.qr(a, full_matrices=False)[1])),
    "svd": _both(lambda a: lax.linalg.svd(a, compute_uv=False)),
    "lu": _both(lambda a: lax.linalg.lu(a)[0]),
    "triangular_solve": _both(lambda a: lax.linalg.triangular_solve(a, a, left_side=True, lower=True)),
    "tridiagonal_solve": lambda s, d: lax.linalg.tridiagonal_solve(
        *(jnp.moveaxis(v, d, 0)[:, 0] for v in (0 * s.y, s.y * 0 + 2, 0 * s.y)), jnp.moveaxis(s.y, d, 0)
    ),
    "symmetric_product": lambda s, d: lax.linalg.symmetric_product(jnp.moveaxis(s.y, d, 0), _square(s, d)[0]),
    "composite": lambda s, d: lax.composite(lambda v: lax.cumsum(v, d), name="own.sums")(s.y),
    "householder_product": lambda s, d: lax.linalg.householder_product(s.w, s.w[0])[0, 0] * s.y,
    "broadcast_like": lambda s, d: lax.broadcast_like(s.w[0, 0], s.y) * s.y,
    "full": lambda s, d: lax.full(s.y.shape, 2.5) * s.y,
    **{
        f"reduce_window negative {v}": window(lax.add, 0.0, *v, of="y")
        for v in ((2, 1, (-1, 1), 2), (3, 2, (-1, 2), 3), (2, 1, (-1, 2)))
    },
    "reduce_window tangent": _tangent,
}
if hasattr(lax, "polynomial"):  # from JAX 0.12 on
    CLOSE["polynomial"] = lambda s, d: lax.polynomial(s.y, [1.0, -0.5, s.y, *[0.25] * 9])
