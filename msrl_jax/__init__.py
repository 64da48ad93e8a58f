"""msrl_jax: reinforcement learning as fragmented dataflow graphs, native to JAX.

The file `__init__.pyi` lists its names. Each is imported at its first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
