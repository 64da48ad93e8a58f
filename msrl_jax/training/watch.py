"""Which parts of a state must be finite, and one small program per mesh that checks them.

Watched are the parameters, the observations, and every other part of the state that the algorithm or a wrapper of the
environment computes and that is finite at the start. So an infinity that means something, such as the nan of an open TD error,
is not reported. Left out are data sets, replay buffers and the environment's own state: what is wrong there and matters comes
out as an observation, a reward, a loss or a parameter.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.algorithms import Agent
from msrl_jax.data.experience import RecordedState
from msrl_jax.envs.vector_wrappers import EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState
from msrl_jax.replay import FifoState, ReplayState

ALWAYS = ("params", "obs")
"""Fields of a state that are watched even if they are not finite at the start."""

_WRAPPERS = EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState


def _is_buffer(x: Any) -> bool:
    return isinstance(x, ReplayState | FifoState)


def _whole(x: Any, on: bool) -> Any:
    return jax.tree.map(lambda _: on, x)


def _of_env(env_state: Any, everything: bool) -> Any:
    if isinstance(env_state, _WRAPPERS):
        return _whole(env_state, True)._replace(env_state=_of_env(env_state.env_state, everything))
    if isinstance(env_state, RecordedState):
        return _whole(env_state, everything)._replace(env_state=_of_env(env_state.env_state, everything))
    return _whole(env_state, everything)


def selected(agent: Agent, state: Any, *, everything: bool = False) -> list[bool]:
    """Whether each leaf of a state is watched.

    Args:
      agent: the agent.
      state: its state, or the shapes of one.
      everything: whether to include replay buffers and the environment's own state.

    Returns:
      One bool for each leaf. Only floats are watched.
    """
    chosen = jax.tree.map(lambda x: _whole(x, everything or not _is_buffer(x)), state, is_leaf=_is_buffer)
    if hasattr(state, "env_state"):
        chosen = chosen._replace(env_state=_of_env(state.env_state, everything))
    if agent.data:
        chosen = chosen._replace(**{name: _whole(getattr(state, name), False) for name in agent.data})
    pairs = zip(jax.tree.leaves(chosen), jax.tree.leaves(state), strict=True)
    return [on and jnp.issubdtype(x.dtype, jnp.inexact) for on, x in pairs]


@jax.jit
def _non_finite(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([~jnp.isfinite(x).all() for x in leaves])


class Check:
    """Tells which of the chosen leaves of a state are not finite, without moving them to the host."""

    def __init__(self, chosen: list[bool]):
        self._chosen = [i for i, on in enumerate(chosen) if on]

    def __call__(self, leaves: list[jax.Array]) -> list[int]:
        """The positions of the leaves that are not finite."""
        meshes: dict[Any, list[int]] = {}
        for i in self._chosen:
            meshes.setdefault(frozenset(leaves[i].sharding.device_set), []).append(i)
        flags = [(numbers, _non_finite([leaves[i] for i in numbers])) for numbers in meshes.values()]
        return sorted(i for numbers, found in flags for i, bad in zip(numbers, np.asarray(found), strict=True) if bad)


class Watch:
    """The watched leaves of the states of a run."""

    def __init__(self, agent: Agent, state: Any):
        """Looks at the state at the start.

        Args:
          agent: the agent of the run.
          state: a state of the run that counts as good.
        """
        leaves = jax.tree.leaves_with_path(state)
        self.paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        chosen, everything = selected(agent, state), selected(agent, state, everything=True)
        odd = set(Check(everything)([x for _, x in leaves]))
        always = [str(getattr(path[0], "name", "")) in ALWAYS for path, _ in leaves]
        self.chosen = [on and (i not in odd or always[i]) for i, on in enumerate(chosen)]
        self.check = Check(self.chosen)
        self.everything = [on and (i not in odd or always[i]) for i, on in enumerate(everything)]
        self.check_everything = Check(self.everything)

    def bad(self, state: Any) -> list[str]:
        """The pytree paths of the watched leaves of a state that are not finite."""
        return [self.paths[i] for i in self.check(jax.tree.leaves(state))]

    def is_whole(self, state: Any) -> bool:
        """Whether everything in a state is finite, replay buffers and the environment's own state included."""
        return not self.check_everything(jax.tree.leaves(state))


