"""Experiments: what a run computes, its loop and hooks, its folder, and its result.

Names are imported lazily, on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
