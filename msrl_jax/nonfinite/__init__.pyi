"""The names of the room, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.nonfinite.failure import Failure as Failure
from msrl_jax.nonfinite.failure import replay_step as replay_step
from msrl_jax.nonfinite.origin import Origin as Origin
