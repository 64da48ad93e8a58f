"""Searches over runs: sweeps, population based training, tournaments. The file `__init__.pyi` lists its names."""

from msrl_jax._lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
