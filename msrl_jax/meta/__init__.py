"""Meta-RL, an optional room: environments whose episodes consist of several episodes of one task, and small tasks.

Each name is imported on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
