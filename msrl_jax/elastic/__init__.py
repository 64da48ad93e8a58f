"""Elastic actors, an optional room: one process learns, and others act for it, which join and leave while it goes on."""

from msrl_jax.elastic.actor import act as act
from msrl_jax.elastic.learner import RemoteActors as RemoteActors
from msrl_jax.elastic.replay import replay_arrivals as replay_arrivals
