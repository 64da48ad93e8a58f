"""The search for nan and infinities, an optional room: where the first one of a run came from, and that step once more.

Each name is imported at its first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
