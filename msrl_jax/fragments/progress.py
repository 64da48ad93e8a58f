"""What the engine tells an iteration: how far the run is, and which version of the parameters acts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.fragments import counters
from msrl_jax.fragments.counters import Counter
from msrl_jax.fragments.graph.marker import fragment


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a run is. The engine counts; it counts exactly, and no count wraps.

    Attributes:
      iteration: iterations done before this one. shape=()
      total: iterations of the whole run; None if that is not known.
      version: the version of the parameters, for `parameter_version`: iterations done by learners, modulo 2**32. uint32
    """

    iteration: Counter
    total: int | None = dataclasses.field(default=None, metadata={"static": True})
    version: Any = ()

    @property
    def fraction(self) -> jax.Array:
        """The fraction of the run that is done, from 0 to 1; 0 if the length of the run is not known. `[]` float32."""
        return counters.fraction(self.iteration, 1, self.total) if self.total else jnp.float32(0.0)

    def times(self, number: int) -> Counter:
        """The iterations done, times a number below 2**32, exactly: steps or updates done. shape=()."""
        return counters.times(self.iteration, number)

    def remainder(self, period: int) -> jax.Array:
        """The remainder of the iterations done after division by a period of at most 2**24. `[]` int32."""
        return counters.remainder(self.iteration, period)


parameter_version = fragment(role="actor", name="parameter_version")(lambda version: version)
"""Reads a version of parameters where actors are, so that a policy with staleness delays it like them. `[]` uint32."""


def parameter_age(iteration: Counter, version: jax.Array) -> jax.Array:
    """The age in iterations of parameters whose `parameter_version` is known. `[]` float32."""
    return (iteration.low - version).astype(jnp.int32).astype(jnp.float32)
