"""Offline policy evaluation, an optional room: the return of a trained agent, estimated from data alone.

Each name is imported on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
