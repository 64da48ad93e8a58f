"""A user's own environment with three agents: a plain class, nothing inherited."""

import jax.numpy as jnp
import numpy as np

from msrl_jax import envs


class Leaving:
    """Agent `i` leaves after `leave[i]` steps. Every agent is paid its action plus 1, by mistake even after it has left.

    The time is the state and the first number of an observation, the agent's number the second. Action 3 is illegal at odd
    times.
    """

    agents = ("one", "two", "three")
    observation_space = envs.Box(0, np.inf, (2,))
    action_space = envs.Discrete(4)

    def __init__(self, leave: tuple[int, int, int] = (1, 3, 2), limit: int = 1000):
        self.leave, self.limit = leave, limit

    def reset(self, key):
        return jnp.int32(0), self._observe(jnp.int32(0))

    def step(self, key, state, action):
        time = state + 1
        return time, self._observe(time), action + 1, time == jnp.array(self.leave), time == self.limit

    def action_mask(self, state):
        return jnp.broadcast_to((jnp.arange(4) < 3) | (state % 2 == 0), (3, 4))

    def _observe(self, time):
        return jnp.stack([jnp.full(3, time), jnp.arange(3)], axis=1).astype(jnp.float32)
