"""Intrinsic rewards for what is new, an optional room: actor-critics with random network distillation.

Each name is imported at its first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
