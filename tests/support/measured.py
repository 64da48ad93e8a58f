"""An environment that reports a metric of each kind."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax import envs


class Walked(NamedTuple):
    place: jax.Array
    steps: jax.Array
    length: jax.Array
    crossed: jax.Array  # whether the last step crossed 0


class Measured:
    """A walk on a line by steps of 1 from a place that the key chooses, for as many steps as the key says."""

    observation_space = envs.Box(-100, 100, (2,))
    action_space = envs.Discrete(2)
    metrics = types.MappingProxyType({"place": "last", "crossings": "sum", "offset": "mean", "highest": "max"})

    def reset(self, key):
        place, length = jax.random.randint(key, (2,), jnp.array([-3, 1]), jnp.array([3, 7]))
        state = Walked(place, jnp.int32(0), length, jnp.bool_(False))
        return state, self.observe(state)

    def step(self, key, state, action):
        place = state.place + 2 * action - 1
        state = Walked(place, state.steps + 1, state.length, (place >= 0) != (state.place >= 0))
        return state, self.observe(state), jnp.float32(1), state.steps == state.length, jnp.asarray(False)

    def report(self, state):
        place = state.place
        return {"highest": place, "offset": 0.5 * place, "crossings": state.crossed, "place": place}

    def observe(self, state):
        return jnp.stack([state.place, state.length]).astype(jnp.float32)


class Unmeasured(Measured):
    """The same without metrics."""

    metrics = None


class MeasuredTeam(Measured):
    """Two walkers, of whom the first one is measured."""

    agents = ("ann", "bob")

    def step(self, key, state, action):
        state, obs, reward, terminated, truncated = super().step(key, state, action[0])
        return state, obs, jnp.stack([reward] * 2), jnp.stack([terminated] * 2), truncated

    def observe(self, state):
        return jnp.stack([super().observe(state)] * 2)
