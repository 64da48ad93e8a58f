"""Faults of some versions of jaxlib that a program can meet and that `repairs` cannot mend: one warning per process.

docs/determinism.md has the table of all known faults, with what was checked.
"""

import functools
import os
import warnings
from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from msrl_jax._compat import JAXLIB, ClosedJaxpr, aval, jaxprs_in


class Fault(NamedTuple):
    """A fault of the versions from `first` on and before `mended`."""

    first: tuple[int, int, int]
    mended: tuple[int, int, int]
    meets: Callable[[ClosedJaxpr, Mesh], bool]
    text: str


def _reduces_seven_dimensions(closed: ClosedJaxpr, mesh: Mesh) -> bool:
    """Whether a program on CPUs reduces arrays of seven or more dimensions, with the fusions of YNNPACK on."""
    if _platform(mesh) != "cpu" or "--xla_cpu_experimental_ynn_fusion_type=" in os.environ.get("XLA_FLAGS", "").split():
        return False
    eqns = (eqn for jaxpr in jaxprs_in(closed.jaxpr) for eqn in jaxpr.eqns)
    reductions = (eqn for eqn in eqns if eqn.primitive.name.startswith("reduce_") and "axes" in eqn.params)
    return any(len(aval(eqn.invars[0]).shape) >= 7 for eqn in reductions)


def _crops_and_pads_a_convolution(closed: ClosedJaxpr, mesh: Mesh) -> bool:
    """Whether a program on CPUs has a convolution with negative padding before the first element, and positive behind."""
    eqns = (eqn for jaxpr in jaxprs_in(closed.jaxpr) for eqn in jaxpr.eqns if eqn.primitive.name == "conv_general_dilated")
    return _platform(mesh) == "cpu" and any(low < 0 < high for eqn in eqns for low, high in eqn.params["padding"])


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


FAULTS = (
    Fault(
        (0, 10, 2), (0, 11, 1), _reduces_seven_dimensions,
        "on some processors, programs that reduce arrays of seven or more dimensions end the process or never return "
        "(https://github.com/jax-ml/jax/issues/39257), and this program has such a reduction: set "
        "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= (nothing after the =), or install another version",
    ),
    Fault(
        (0, 11, 1), (0, 11, 2), lambda closed, mesh: _platform(mesh) == "cpu",
        "loops on a CPU that write a few bytes of a large array copy all of it in each step "
        "(https://github.com/jax-ml/jax/issues/40101): install another version",
    ),
    Fault(
        (0, 10, 0), (0, 12, 0), _crops_and_pads_a_convolution,
        "on CPUs, convolutions whose padding is negative before the first element and positive after the last one compute "
        "wrong values, and this program has one: slice the array, and pad by 0 there",
    ),
    Fault(
        (0, 11, 0), (0, 12, 0), lambda closed, mesh: "RTX A6000" in mesh.devices.flat[0].device_kind,
        "programs on an NVIDIA RTX A6000 were reported to compute wrong values and nan "
        "(https://github.com/jax-ml/jax/issues/40633): install another version",
    ),
)  # fmt: skip


def warn_of_known_faults(closed: ClosedJaxpr, mesh: Mesh, jaxlib: tuple[int, ...] = JAXLIB) -> None:
    """Warns, once per process and fault, if a program on a mesh may meet a fault of the version of jaxlib."""
    for fault in FAULTS:
        if fault.first <= jaxlib < fault.mended and fault.meets(closed, mesh):
            _warn(fault.text, jaxlib)


@functools.cache
def _warn(text: str, jaxlib: tuple[int, ...]) -> None:
    warnings.warn(f"jaxlib {'.'.join(map(str, jaxlib))}: {text}", RuntimeWarning, stacklevel=2)
