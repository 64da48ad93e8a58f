"""The names of the room, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.elastic.actor import act as act
from msrl_jax.elastic.replay_run import replay_arrivals as replay_arrivals
