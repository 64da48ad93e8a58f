"""Determines which values in a run must be finite, and checks them.

The watch checks the parameters, the observations, and every other part of the state that the algorithm or a wrapper of the
environment computes and that is finite at the start. So it does not report intended non-finite values, such as the nan of an
open TD error. It ignores data sets, replay buffers and the environment's own state: a relevant error there shows up in an
observation, a reward, a loss or a parameter.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax.agents.agent import Agent, innermost, with_innermost
from msrl_jax.data.experience import RecordedState
from msrl_jax.envs.base import PyTree
from msrl_jax.envs.vector_wrappers import EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState
from msrl_jax.fragments.runtime.transfer import read
from msrl_jax.replay import FifoState, ReplayState

_ALWAYS = (".params", ".obs")  # parts of a state that are watched even if they are non-finite at the start
_WRAPPERS = EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState


def _mark_all(tree: PyTree, mark: int) -> PyTree:
    return jax.tree.map(lambda _: mark, tree)


def _mark_env(env_state: PyTree) -> Any:
    wrapped = isinstance(env_state, _WRAPPERS)
    marks = _mark_all(env_state, wrapped)
    goes_in = wrapped or isinstance(env_state, RecordedState)
    return marks._replace(env_state=_mark_env(env_state.env_state)) if goes_in else marks


def _watched_leaves(agent: Agent, state: PyTree) -> dict[int, bool]:
    """Returns the positions of the watched leaves of a run's state (all floats), and whether they are in a replay buffer."""
    is_buffer = lambda x: isinstance(x, ReplayState | FifoState)
    marks = jax.tree.map(lambda x: _mark_all(x, 2 if is_buffer(x) else 1), state, is_leaf=is_buffer)
    inner = innermost(state)
    inner_marks = {name: _mark_all(getattr(inner, name), 0) for name in agent.data}
    if hasattr(inner, "env_state"):
        inner_marks["env_state"] = _mark_env(inner.env_state)
    marks = with_innermost(marks, innermost(marks)._replace(**inner_marks))
    pairs = zip(jax.tree.leaves(marks), jax.tree.leaves(state), strict=True)
    return {i: mark == 2 for i, (mark, x) in enumerate(pairs) if mark and jnp.issubdtype(x.dtype, jnp.inexact)}


@functools.lru_cache(maxsize=16)
def _flags(sharding: NamedSharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """Makes a program that tells which arrays of a mesh are non-finite; with several processes, all can read its output."""
    return jax.jit(lambda leaves: jnp.stack([~jnp.isfinite(x).all() for x in leaves]), out_shardings=sharding)


def non_finite(leaves: Sequence[jax.Array], positions: Sequence[int]) -> list[int]:
    """Returns the positions, among `positions`, of the non-finite leaves, on any meshes; moves nothing to the host."""
    bad_positions: list[int] = []
    meshes: dict[frozenset[object], list[int]] = {}
    for i in positions:
        devices = list(leaves[i].sharding.device_set)
        # NumPy reads it without a copy. All processes must check in the same way, because they read the results together.
        at_hand = jax.process_count() == 1 and len(devices) == 1 and devices[0].platform == "cpu"
        if not at_hand or leaves[i].dtype not in (np.float32, np.float64):
            meshes.setdefault(frozenset(devices), []).append(i)
        elif (x := np.asarray(leaves[i])).size:
            with np.errstate(invalid="ignore"):  # min and max need no array of bools of the same size
                bad_positions += [] if np.isfinite(x.min()) and np.isfinite(x.max()) else [i]

    def check(group: list[int]) -> jax.Array:
        sharding = leaves[group[0]].sharding
        several = jax.process_count() > 1 and isinstance(sharding, NamedSharding)
        return _flags(NamedSharding(sharding.mesh, PartitionSpec()) if several else None)([leaves[i] for i in group])  # type: ignore

    flags = read([check(group) for group in meshes.values()])
    pairs = zip(meshes.values(), flags, strict=True)
    return sorted([*bad_positions, *(i for group, bad in pairs for i, is_bad in zip(group, bad, strict=True) if is_bad)])


class Watch:
    """The watched leaves of a run's states, chosen from its first state, which counts as good."""

    def __init__(self, agent: Agent, state: PyTree):
        leaves = jax.tree.leaves_with_path(state)
        # Pytree paths of all leaves, relative to the algorithm's own state, such as `.obs`.
        self.paths = [re.sub(r"^(\.inner\b)+", "", jax.tree_util.keystr(path)) for path, _ in leaves]
        watched = _watched_leaves(agent, state)
        odd = {i for i in non_finite([x for _, x in leaves], [*watched]) if not self.paths[i].startswith(_ALWAYS)}
        self.everything = [i for i in watched if i not in odd]  # including the floats in replay buffers
        self._chosen = [i for i in self.everything if not watched[i]]

    def bad(self, state: PyTree) -> list[str]:
        """Returns the pytree paths of the watched leaves of a state that are non-finite."""
        return [self.paths[i] for i in non_finite(jax.tree.leaves(state), self._chosen)]

    def is_whole(self, state: PyTree) -> bool:
        """Returns whether the watched leaves and replay buffers are finite."""
        return not non_finite(jax.tree.leaves(state), self.everything)
