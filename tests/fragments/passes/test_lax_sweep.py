"""Operations of `jax.lax` on an array that is split over devices compute what they compute on one device.

Every public function of `jax.lax` and `jax.lax.linalg` has a case (`lax_exact.py`, `lax_close.py`) or a reason not to have one.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msrl_jax._compat import jaxpr_as_fun
from msrl_jax.fragments.passes.repairs import apply_xla_workarounds
from tests.fragments.passes.lax_close import CLOSE
from tests.fragments.passes.lax_exact import EXACT
from tests.fragments.passes.lax_inputs import Inputs

LEFT_OUT = {
    "communicate between the devices of a `shard_map`, which nothing partitions": (
        *("all_gather", "all_to_all", "axis_index", "axis_size", "pbroadcast", "pcast", "pmax", "pmean", "pmin", "ppermute"),
        *("precv", "psend", "pshuffle", "psum", "psum_scatter", "psum_scatter_start", "pswapaxes", "ragged_all_to_all"),
    ),
    "compute with shapes, not with arrays": (
        *("ConvGeneralDilatedDimensionNumbers", "DotDimensionNumbers", "PrecisionLike", "broadcast_shapes", "dtype"),
        *("conv_dimension_numbers", "conv_general_permutations", "conv_general_shape_tuple", "conv_shape_tuple"),
        *("conv_transpose_shape_tuple", "padtype_to_pads", "reduce_window_shape_tuple", "shape_as_value"),
    ),
    "order effects, or choose code": ("after_all", "create_token", "dce_sink", "platform_dependent", "stage"),
    "have no defined value": ("empty", "rng_uniform"),
    "have factors that are not unique": ("cholesky_update", "eig", "hessenberg", "ormqr", "qdwh", "schur", "tridiagonal"),
    "are another function with more arguments": ("lu_pivots_to_permutation", "ragged_dot_general", "scaled_dot"),
}
CASES = {**{("exact", name): case for name, case in EXACT.items()}, **{("close", name): case for name, case in CLOSE.items()}}
# Gradients of the exact cases that are of floats and have one of their own.
_WITH_GRADIENT = ("pad", "dynamic", "concatenate", "gather", "rev", "slice", "stack", "tile")
_WITHOUT_GRADIENT = (
    *(
        "betainc",
        "composite",
        "householder_product",
        "nextafter",
        "reduce_window mul",
        "scatter_mul",
        "symmetric_product",
        "zeta",
    ),
)
_WITHOUT_BATCH = ("ragged_dot", "composite")
_TINY = np.finfo(np.float32).tiny


def test_every_operation_has_a_case_or_a_reason_not_to():
    def operations(module):
        named = {n: getattr(module, n) for n in dir(module) if not n.startswith("_") and not n.endswith("_p")}
        return {n for n, f in named.items() if callable(f) and not isinstance(f, type)}

    covered = {name.split()[0] for _, name in CASES}
    left_out = {name for names in LEFT_OUT.values() for name in names}
    assert not covered & left_out
    existing = operations(lax) | operations(lax.linalg)
    assert not existing - covered - left_out
    assert not covered - existing


class Split(NamedTuple):
    """How arrays `[.., A, B]` are split: a dimension over devices, with so many elements on each; cases work along another."""

    devices: int
    each: int
    split: int
    along: int
    kind: str = "plain"

    @property
    def length(self):
        return self.devices * self.each

    @property
    def lead(self):
        """Dimensions over which `vmap` maps."""
        return {"vmap": (2,), "vmap_split": (self.length,)}.get(self.kind.removesuffix("_grad"), ())

    @property
    def spec(self):
        if self.kind == "vmap_split":
            return P("devices")
        return P(*[None] * len(self.lead), *("devices" if a == self.split else None for a in range(2)))

    def inputs(self) -> Inputs:
        shape = (4, 5) if self.kind == "vmap_split" else tuple(self.length if a == self.split else 4 for a in range(2))
        size, full = shape[self.along], (*self.lead, *shape)
        rng = np.random.default_rng(0)
        y = rng.normal(size=full).astype(np.float32) * np.float32(0.7)
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 3e38, -3e38], np.float32)
        x = y.flatten()
        places = rng.permutation(x.size)[: max(len(odd), x.size // 6)]
        x[places] = np.resize(odd, len(places))
        i = rng.integers(-99, 99, full).astype(np.int32)
        k = rng.integers(-size - 2, size + 3, full).astype(np.int32)
        n = np.array([-3 * size, -1, 0, size - 1, size, 3 * size], np.int32)
        return Inputs(x.reshape(full), y, i, k, n, rng.normal(size=(4, 4)).astype(np.float32))

    def function(self, case: Callable) -> Callable:
        """The case, its gradient, or either under `vmap`, as a function of inputs."""
        along = gradient(partial(case, d=self.along)) if self.kind.endswith("grad") else partial(case, d=self.along)
        if not self.lead:
            return along

        def mapped(s):
            own = s.k[:, 0, 0] * (self.kind == "vmap_split")  # an index for each
            one = lambda own, x, y, i, k: along(Inputs(x, y, i, k, s.n + own, s.w))
            return jax.vmap(one)(own, s.x, s.y, s.i, s.k)

        return mapped

    def cases(self) -> dict[tuple[str, str], Callable]:
        chosen = {k: case for k, case in CASES.items() if not (self.lead and k[1].startswith(_WITHOUT_BATCH))}
        if self.kind.endswith("grad"):
            exact = {k: f for k, f in chosen.items() if k[0] == "exact" and k[1].startswith(_WITH_GRADIENT)}
            close = {k: f for k, f in chosen.items() if k[0] == "close" and not k[1].startswith(_WITHOUT_GRADIENT)}
            chosen = exact | close
        return {k: self.function(case) for k, case in chosen.items()}


def gradient(case):
    """The gradients by `y` and by `w` of a case's floats, each with a weight of its own."""

    def weight(leaf):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return np.zeros(leaf.shape, jax.dtypes.float0)
        return jnp.sin(jnp.arange(leaf.size, dtype=jnp.float32) * 1.7 + 1).reshape(leaf.shape).astype(leaf.dtype)

    def both(s):
        results, back = jax.vjp(lambda y, w: case(s._replace(y=y, w=w)), s.y, s.w)
        return back(jax.tree.map(weight, results))

    return both


def difference(got, want, exact) -> str:
    """What is wrong, or nothing. Zeros have no sign, and subnormal numbers may be zero: devices add zeros to join parts."""
    got, want = (np.asarray(v, np.float32 if v.dtype == jnp.bfloat16 else v.dtype) for v in (got, want))
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{got.shape} for {want.dtype}{want.shape}"
    if got.dtype.kind not in "fc":
        wrong = got != want
    elif exact:
        got, want = (np.where(np.abs(v) < _TINY, 0, v) for v in (got, want))
        wrong = ~((got == want) | (np.isnan(got) & np.isnan(want)))
    else:
        size = np.abs(np.where(np.isfinite(want), want, 0)).max(initial=0)
        with np.errstate(invalid="ignore", over="ignore"):
            near = np.isclose(got, want, rtol=2e-5, atol=2e-5 * min(max(size, 1e-6), 1e3), equal_nan=True)
        wrong = ~near
    return f"{wrong.sum()} of {wrong.size}: {got[wrong][:3]} for {want[wrong][:3]}" if wrong.any() else ""


def differences(split: Split, fns: dict[tuple[str, str], Callable]) -> list[str]:
    """What the cases compute otherwise on several devices than on one, in one program."""
    inputs = split.inputs()
    mesh = Mesh(np.array(jax.devices()[: split.devices]), ("devices",))

    def every(*arrays):
        return [fn(Inputs(*arrays)) for fn in fns.values()]

    closed, shapes = jax.make_jaxpr(every, return_shape=True)(*inputs)
    specs = [*[split.spec] * 4, P(), P()]
    placed = [jax.device_put(v, NamedSharding(mesh, spec)) for v, spec in zip(inputs, specs, strict=True)]
    found = jax.tree.unflatten(jax.tree.structure(shapes), jax.jit(jaxpr_as_fun(apply_xla_workarounds(closed, mesh)))(*placed))
    wrong = []
    for (kind, name), *results in zip(fns, found, jax.jit(every)(*inputs), strict=True):
        exact = kind == "exact" and not split.kind.endswith("grad")
        for got, want in zip(*map(jax.tree.leaves, results), strict=True):
            if got.dtype != jax.dtypes.float0 and (what := difference(got, want, exact)):
                wrong.append(f"{name}: {what}")
    return wrong


SPLITS = [
    *(Split(n, each, split, d) for n in (2, 3, 8) for each in (1, 2, 3) if n * each > 2 for split in (0, 1) for d in (0, 1)),
    *(Split(n, each, split, d, "grad") for n in (3, 8) for each in (1, 2) for split in (0, 1) for d in (0, 1)),
    *(Split(3, each, split, d, kind) for kind in ("vmap", "vmap_grad") for each in (1, 2) for split in (0, 1) for d in (0, 1)),
    *(Split(3, 1, 0, d, "vmap_split") for d in (0, 1)),
]


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS, ids=lambda s: "-".join(map(str, s)))
def test_operations_on_a_split_array_compute_what_they_do_on_a_whole_one(split):
    assert differences(split, split.cases()) == []
