"""Recording a run: environments keep their last steps in their state, and a writer saves these steps after every chunk.

Recording wraps the innermost vector environment, so it stores raw observations and rewards for any algorithm. In the shape
descriptions, `S` is the number of steps per chunk.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.data.check_spaces import check_recordable
from msrl_jax.data.dataset import Dataset
from msrl_jax.data.formats import PARTS, check_new, check_suffix, keep_parts, read_parts, save, write_part
from msrl_jax.envs import Environment, MultiAgentTimeStep, TimeStep, VectorEnvironment, has_agents
from msrl_jax.envs.base import ENV_AXIS, PyTree, delegate, is_on_host
from msrl_jax.envs.multi_agent import vectorize_agents
from msrl_jax.envs.spaces import struct
from msrl_jax.envs.vector import vectorize
from msrl_jax.envs.vector_wrappers import VectorWrapper
from msrl_jax.envs.wrappers import EnvironmentWrapper
from msrl_jax.fragments.counters import Counter, advance, counter, remainder
from msrl_jax.fragments.runtime.transfer import read
from msrl_jax.replay import Transition


def to_row(obs: PyTree, action: jax.Array, t: TimeStep | MultiAgentTimeStep) -> Transition:
    """Returns the data set row `[E, ...]` of a step: the observations before it, and actions in the dtype of their space."""
    return Transition(obs, action, t.reward, t.terminated, t.truncated, t.final_obs, valid=t.valid)


class RecordedState(NamedTuple):
    """State of `RecordedVectorEnvironment`."""

    env_state: PyTree
    obs: jax.Array  # raw, for the next actions. `[E, ...]`
    rows: Transition  # a ring of the last steps. `[S, E, ...]`
    position: jax.Array  # int32: where the next step goes in the ring
    taken: Counter  # number of steps of every environment so far


@dataclasses.dataclass(frozen=True)
class RecordedEnvironment(EnvironmentWrapper):
    """An environment, with one agent or several, whose vectorized form keeps the last `S` steps of each copy."""

    env: Environment
    steps: int

    def __post_init__(self):
        check_recordable(self.env)

    def vectorize(self, num_envs: int, teams: Mapping[str, tuple[int, ...]] | None = None) -> "RecordedVectorEnvironment":
        """Makes `E` copies that keep their steps; `teams` is as in `vectorize_agents`."""
        several = has_agents(self.env)
        env = vectorize_agents(self.env, num_envs, teams) if several else vectorize(self.env, num_envs)  # type: ignore[arg-type]
        return RecordedVectorEnvironment(env, self.steps)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class RecordedVectorEnvironment(VectorWrapper):
    """A vector environment that keeps its last steps in its state; if it has several agents, like `VectorizedAgents`."""

    env: VectorEnvironment
    steps: int

    @property
    def axes(self) -> RecordedState:
        """Logical axes of the state."""
        return RecordedState(self.env.axes, ENV_AXIS, P(None, "env"), P(), P())  # type: ignore[arg-type]

    def reset(self, key: jax.Array) -> tuple[RecordedState, PyTree]:
        """Starts all environments, with no recorded steps."""
        env_state, obs = self.env.reset(key)
        item = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), obs)
        agents = (self.num_agents,) if has_agents(self.env) else ()
        action = jax.ShapeDtypeStruct(agents + struct(self.action_space).shape, struct(self.action_space).dtype)
        number, flag = (jax.ShapeDtypeStruct(agents, dtype) for dtype in (jnp.float32, jnp.bool_))
        lead, valid = (self.steps, self.num_envs), flag if agents or is_on_host(self.env) else None
        rows = Transition(item, action, number, flag, jax.ShapeDtypeStruct((), jnp.bool_), item, valid=valid)
        rows = jax.tree.map(lambda x: jnp.zeros(lead + x.shape, x.dtype), rows)
        # Copy: a state in which two leaves are the same array cannot be donated.
        return RecordedState(env_state, jax.tree.map(jnp.copy, obs), rows, jnp.int32(0), counter()), obs

    def step(self, state: RecordedState, action: PyTree) -> tuple[RecordedState, TimeStep]:
        """Advances all environments, and records the step."""
        env_state, t = self.env.step(state.env_state, action)
        action = jnp.asarray(action, struct(self.action_space).dtype)
        row = to_row(state.obs, action, t)
        position = state.position
        rows = jax.tree.map(lambda ring, x: jax.lax.dynamic_update_index_in_dim(ring, x, position, 0), state.rows, row)
        return RecordedState(env_state, t.obs, rows, (position + 1) % self.steps, advance(state.taken)), t

    agents, num_agents, teams, state_size = map(delegate, ("agents", "num_agents", "teams", "state_size"))

    def states(self, state: RecordedState) -> PyTree:
        """See `VectorizedAgents`."""
        return self.env.states(state.env_state)  # type: ignore[attr-defined]

    def global_state(self, state: RecordedState, obs: PyTree) -> jax.Array:
        """See `VectorizedAgents`."""
        return self.env.global_state(state.env_state, obs)  # type: ignore[attr-defined]


def _is_recorded(x: object) -> bool:
    return isinstance(x, RecordedState)


def _map_recorded(fn: Callable[..., Any], state: PyTree, *other_states: PyTree) -> PyTree:
    return jax.tree.map(lambda x, *y: fn(x, *y) if _is_recorded(x) else x, state, *other_states, is_leaf=_is_recorded)


def without_experience(state: PyTree) -> PyTree:
    """Removes recorded steps from the state of a run."""
    return _map_recorded(lambda x: x.env_state, state)


def without_rows(state: PyTree) -> PyTree:
    """Removes recorded steps that are on disk from the state of a run, for a checkpoint."""
    return _map_recorded(lambda x: x._replace(rows=(), position=()), state)


def with_empty_rows(state: PyTree, types: PyTree) -> PyTree:
    """Adds an empty ring, possibly of another size, to a result of `without_rows`; `types` has the types of the new state."""

    def with_rows(recorded: RecordedState, kind: RecordedState) -> RecordedState:
        rows = jax.tree.map(lambda t: jnp.zeros(t.shape, t.dtype), kind.rows)
        return recorded._replace(rows=rows, position=remainder(recorded.taken, kind.rows.truncated.shape[-2]))

    return _map_recorded(with_rows, state, types)


class ExperienceWriter:
    """Writes the steps of a run to a folder of parts next to the file, which `load` also reads, and joins them at the end."""

    def __init__(self, path: str | os.PathLike, about: Mapping[str, Any], progress: Mapping[str, int] | None = None):
        """Checks the path; raises ValueError if it or its parts exist, or if its suffix is unknown.

        In a resumed run, `progress` is the saved `progress`: those parts must exist, and later ones are removed.
        """
        self.path, self._about, self._taken, self._count = Path(path), dict(about), 0, 0
        self._parts = self.path.with_name(self.path.name + PARTS)
        if progress is not None:
            check_suffix(self.path)
            self._taken, self._count = progress["steps"], progress["parts"]
            if not jax.process_index():
                keep_parts(self._parts, self._count)
            return
        check_new(self.path)
        if self._parts.exists():
            raise ValueError(
                f"{self._parts} holds the recording of a killed run; save it with msrl_jax.data.save(msrl_jax.data.load("
                f"{str(self._parts)!r}), ...), then delete the folder"
            )

    @property
    def progress(self) -> dict[str, int]:
        """The progress of the recording, for resuming: steps of every environment, and parts."""
        return {"steps": self._taken, "parts": self._count}

    def add(self, state: PyTree, steps: int) -> None:
        """Writes the steps that every environment took in a chunk; RuntimeError if their number differs from `steps`."""
        (recorded,) = (x for x in jax.tree.leaves(state, is_leaf=_is_recorded) if _is_recorded(x))
        leaves, tree = jax.tree.flatten((recorded.rows, recorded.taken))
        rows, taken = jax.tree.unflatten(tree, read(leaves))
        taken = taken.high.astype(np.uint64) * 2**32 + taken.low
        steps_before, capacity = self._taken, rows.truncated.shape[-2]
        self._taken += steps
        if (taken != self._taken).any():
            raise RuntimeError(f"the environments took {taken - steps_before} steps, but the algorithm reports {steps}")
        if jax.process_index():  # only the first process writes
            return
        if np.ndim(taken):  # treat population members as more environments
            rows = jax.tree.map(lambda x: np.moveaxis(x, 0, 1).reshape(capacity, -1, *x.shape[3:]), rows)
        ring_rows = np.arange(steps_before, steps_before + steps) % capacity
        if not self._parts.exists():
            self._parts.mkdir(parents=True)
            (self._parts / "about.json").write_text(json.dumps(self._about))
        write_part(self._parts, self._count, jax.tree.map(lambda x: x[ring_rows], rows))
        self._count += 1

    def finish(self, *, goes_on: bool = False) -> Dataset | None:
        """Joins the parts into the file, and keeps them if the run may be resumed; None without steps."""
        if jax.process_index() or not self._parts.exists():
            return None
        dataset = read_parts(self._parts)
        save(dataset, self.path)
        if not goes_on:
            shutil.rmtree(self._parts)
        return dataset
