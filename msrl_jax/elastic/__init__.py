"""Elastic actors, an optional room: one process learns, and others act for it, which join and leave while it goes on.

Each name is imported at its first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
