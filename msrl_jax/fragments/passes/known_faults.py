"""Bugs of some jaxlib versions that `repairs` cannot work around: compiler options that avoid them, or a warning per process.

docs/determinism.md has the table of all known bugs, with the checks.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

from jax.sharding import Mesh

from msrl_jax._compat import JAXLIB, ClosedJaxpr, equations_in

# Disable YNNPACK fusions: a product of many rows that is reduced may be wrong (https://github.com/jax-ml/jax/issues/39103), and
# reductions of seven or more dimensions crash or hang the process (https://github.com/jax-ml/jax/issues/39257).
CPU_OPTIONS: dict[str, str | bool] = {"xla_cpu_experimental_ynn_fusion_type": ""} if JAXLIB < (0, 11, 1) else {}
"""Compiler options for programs on CPUs that disable broken features of this jaxlib version."""


class Fault(NamedTuple):
    """A bug of the versions from `first` on and before `mended`."""

    first: tuple[int, int, int]
    mended: tuple[int, int, int]
    meets: Callable[[ClosedJaxpr, Mesh], bool]
    text: str


def _crops_and_pads_a_convolution(closed: ClosedJaxpr, mesh: Mesh) -> bool:
    """Whether a program on CPUs has a convolution with negative padding before the first element and positive padding after."""
    eqns = (eqn for eqn in equations_in(closed.jaxpr) if eqn.primitive.name == "conv_general_dilated")
    return _platform(mesh) == "cpu" and any(low < 0 < high for eqn in eqns for low, high in eqn.params["padding"])


def _platform(mesh: Mesh) -> str:
    return mesh.devices.flat[0].platform


FAULTS = (
    Fault(
        (0, 11, 1),
        (0, 11, 2),
        lambda closed, mesh: _platform(mesh) == "cpu",
        "loops on a CPU that write a few bytes of a large array copy all of it in each step "
        "(https://github.com/jax-ml/jax/issues/40101): install another version",
    ),
    Fault(
        (0, 10, 2),
        (0, 12, 0),
        _crops_and_pads_a_convolution,
        "on CPUs, convolutions whose padding is negative before the first element and positive after the last one compute "
        "wrong values, and this program has one: slice the array, and pad by 0 there",
    ),
    Fault(
        (0, 11, 0),
        (0, 12, 0),
        lambda closed, mesh: "RTX A6000" in mesh.devices.flat[0].device_kind,
        "programs on an NVIDIA RTX A6000 were reported to compute wrong values and nan "
        "(https://github.com/jax-ml/jax/issues/40633): install another version",
    ),
)


def warn_of_known_faults(closed: ClosedJaxpr, mesh: Mesh, jaxlib: tuple[int, ...] = JAXLIB) -> None:
    """Warns, once per process and bug, if a program on a mesh may be affected by a bug of the jaxlib version."""
    for fault in FAULTS:
        if fault.first <= jaxlib < fault.mended and fault.meets(closed, mesh):
            _warn(fault.text, jaxlib)


@functools.cache
def _warn(text: str, jaxlib: tuple[int, ...]) -> None:
    warnings.warn(f"jaxlib {'.'.join(map(str, jaxlib))}: {text}", RuntimeWarning, stacklevel=2)
