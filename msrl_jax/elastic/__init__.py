"""Elastic actors, an optional room: one process learns, and actors in other processes join and leave during the run.

Each name is imported on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
