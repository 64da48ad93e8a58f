"""Tournaments, an optional room: workers draw an agent from a leaderboard, train it further, and put back what is better.

Each name is imported at its first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
