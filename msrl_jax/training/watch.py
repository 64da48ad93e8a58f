"""Which parts of a state must be finite, and how that is checked: with NumPy where NumPy can read the memory of the state, and
else with one small program per mesh.

Watched are the parameters, the observations, and every other part of the state that the algorithm or a wrapper of the
environment computes and that is finite at the start. So an infinity that means something, such as the nan of an open TD error,
is not reported. Left out are data sets, replay buffers and the environment's own state: what is wrong there and matters comes
out as an observation, a reward, a loss or a parameter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from msrl_jax.algorithms import Agent
from msrl_jax.data.experience import RecordedState
from msrl_jax.envs.vector_wrappers import EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState
from msrl_jax.fragments.runtime.processes import read
from msrl_jax.replay import FifoState, ReplayState

ALWAYS = ("params", "obs")
"""Fields of a state that are watched even if they are not finite at the start."""

_WRAPPERS = EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState


def _is_recorded(x: Any) -> bool:
    return isinstance(x, RecordedState)


def _is_buffer(x: Any) -> bool:
    return isinstance(x, ReplayState | FifoState)


def _whole(x: Any, on: bool) -> Any:
    return jax.tree.map(lambda _: on, x)


def _of_env(env_state: Any) -> Any:
    wrapped = isinstance(env_state, _WRAPPERS)
    chosen = _whole(env_state, wrapped)
    return chosen._replace(env_state=_of_env(env_state.env_state)) if wrapped or _is_recorded(env_state) else chosen


def selected(agent: Agent, state: Any, *, buffers: bool = False) -> list[bool]:
    """Whether each leaf of a state is watched.

    Args:
      agent: the agent.
      state: its state, or the shapes of one.
      buffers: whether to include replay buffers.

    Returns:
      One bool for each leaf. Only floats are watched.
    """
    chosen = jax.tree.map(lambda x: _whole(x, buffers or not _is_buffer(x)), state, is_leaf=_is_buffer)
    if hasattr(state, "env_state"):
        chosen = chosen._replace(env_state=_of_env(state.env_state))
    if agent.data:
        chosen = chosen._replace(**{name: _whole(getattr(state, name), False) for name in agent.data})
    pairs = zip(jax.tree.leaves(chosen), jax.tree.leaves(state), strict=True)
    return [on and jnp.issubdtype(x.dtype, jnp.inexact) for on, x in pairs]


def _flags(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([~jnp.isfinite(x).all() for x in leaves])


_non_finite = jax.jit(_flags)


@functools.lru_cache(maxsize=16)
def _non_finite_on(mesh: Mesh) -> Callable[[list[jax.Array]], jax.Array]:
    """The same for devices of several processes, which then know how to read the result."""
    return jax.jit(_flags, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _is_at_hand(x: jax.Array) -> bool:
    """Whether NumPy can read an array without a copy, and knows its dtype."""
    # Several processes must look in the same way, because they read the results together.
    on_one = jax.process_count() == 1 and len(x.sharding.device_set) == 1
    return on_one and x.dtype in (np.float32, np.float64) and next(iter(x.sharding.device_set)).platform == "cpu"


def _is_finite(x: np.ndarray) -> bool:
    """Whether all numbers are finite, without an array of as many bools."""
    with np.errstate(invalid="ignore"):
        return x.size == 0 or bool(np.isfinite(x.min()) and np.isfinite(x.max()))


def non_finite(leaves: Sequence[jax.Array], numbers: Sequence[int]) -> list[int]:
    """Finds leaves that are not finite, without moving them to the host.

    Args:
      leaves: leaves of a state, on any meshes.
      numbers: the positions of the leaves to check.

    Returns:
      The positions of those that are not finite.
    """
    found = [i for i in numbers if _is_at_hand(leaves[i]) and not _is_finite(np.asarray(leaves[i]))]
    meshes: dict[Any, list[int]] = {}
    for i in numbers:
        if _is_at_hand(leaves[i]):
            continue
        meshes.setdefault(frozenset(leaves[i].sharding.device_set), []).append(i)

    def check(group: list[int]) -> jax.Array:
        at = leaves[group[0]].sharding
        if jax.process_count() > 1 and isinstance(at, NamedSharding):
            return _non_finite_on(cast(Mesh, at.mesh))([leaves[i] for i in group])
        return _non_finite([leaves[i] for i in group])

    flags = read([check(group) for group in meshes.values()])
    pairs = zip(meshes.values(), flags, strict=True)
    return sorted([*found, *(i for group, bad in pairs for i, is_bad in zip(group, bad, strict=True) if is_bad)])


class Watch:
    """The watched leaves of the states of a run.

    Attributes:
      paths: pytree paths of all leaves.
      chosen: positions of the watched leaves.
      everything: positions of the watched leaves and of the floats in replay buffers.
    """

    def __init__(self, agent: Agent, state: Any):
        """Looks at a state that counts as good.

        Args:
          agent: the agent of the run.
          state: the state at the start.
        """
        leaves = jax.tree.leaves_with_path(state)
        self.paths = [jax.tree_util.keystr(path) for path, _ in leaves]
        always = {i for i, (path, _) in enumerate(leaves) if getattr(path[0], "name", None) in ALWAYS}
        chosen, everything = selected(agent, state), selected(agent, state, buffers=True)
        odd = {*non_finite([x for _, x in leaves], [i for i, on in enumerate(everything) if on])} - always
        self.chosen = [i for i, on in enumerate(chosen) if on and i not in odd]
        self.everything = [i for i, on in enumerate(everything) if on and i not in odd]

    def bad(self, state: Any) -> list[str]:
        """The pytree paths of the watched leaves of a state that are not finite."""
        return [self.paths[i] for i in non_finite(jax.tree.leaves(state), self.chosen)]

    def is_whole(self, state: Any, also: Sequence[int] = ()) -> bool:
        """Whether the watched leaves, replay buffers and the leaves at further positions are finite."""
        return not non_finite(jax.tree.leaves(state), [*self.everything, *also])
