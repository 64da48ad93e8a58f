"""The search for non-finite values, an optional room: finds the origin of the first one in a run, and repeats that step.

Each name is imported on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
