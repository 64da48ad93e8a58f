"""Offline evaluation, an optional room: what a trained agent would earn, from data alone.

Each name is imported at its first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
