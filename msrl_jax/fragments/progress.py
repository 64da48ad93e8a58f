"""What the engine passes to an iteration: the progress of the run, and the version of the acting parameters."""

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
    """The progress of a run. The counts of the engine are exact and do not wrap.

    Attributes:
      iteration: number of iterations completed before this one. shape=()
      total: number of iterations of the whole run; None if unknown.
      version: the version of the parameters, for `parameter_version`: iterations completed by learners, modulo 2**32. uint32
    """

    iteration: Counter
    total: int | None = dataclasses.field(default=None, metadata={"static": True})
    version: Any = ()

    @property
    def fraction(self) -> jax.Array:
        """The completed fraction of the run, from 0 to 1; 0 if the length of the run is unknown. `[]` float32."""
        return counters.fraction(self.iteration, self.total) if self.total else jnp.float32(0.0)

    def times(self, number: int) -> Counter:
        """Returns the number of completed iterations times a number below 2**32, exactly: completed steps or updates.
        shape=().
        """
        return counters.times(self.iteration, number)

    def remainder(self, period: int) -> jax.Array:
        """Returns the number of completed iterations modulo a period of at most 2**24. `[]` int32."""
        return counters.remainder(self.iteration, period)


parameter_version = fragment(role="actor", name="parameter_version")(lambda version: version)
"""Reads the version of parameters where actors are, so that staleness delays it like the parameters. `[]` uint32."""


def parameter_age(iteration: Counter, version: jax.Array) -> jax.Array:
    """Returns the age of parameters in iterations, given their `parameter_version`. `[]` float32."""
    return (iteration.low - version).astype(jnp.int32).astype(jnp.float32)
