"""Tournaments, an optional room: workers draw an agent from a leaderboard, train it further, and return it if it improved.

Each name is imported on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
