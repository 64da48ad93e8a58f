"""Prepares a program for a placement: correct if split, and with fewer kernels where their number matters."""

from msrl_jax._compat import ClosedJaxpr
from msrl_jax.fragments.passes.compact import combine_small_arrays, is_single_accelerator
from msrl_jax.fragments.passes.known_faults import warn_of_known_faults
from msrl_jax.fragments.passes.repairs import apply_xla_workarounds
from msrl_jax.fragments.placement import Placement


def prepare_for_placement(program: ClosedJaxpr, placement: Placement) -> ClosedJaxpr:
    """Returns a program that computes the same, in the form for a placement; warns where a version of XLA computes it
    wrongly.
    """
    warn_of_known_faults(program, placement.mesh)
    program = apply_xla_workarounds(program, placement.mesh)
    return combine_small_arrays(program) if is_single_accelerator(placement) else program
