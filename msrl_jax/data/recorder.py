"""Recording a run: what its environments do is kept in their state, and goes to disk after every chunk of iterations.

The recorder sits around the innermost vector environment, so that it sees raw observations and rewards, whatever the
algorithm. It is a part of the training program: nothing is called back, and every distribution policy does with it what it
does with environments. In the shape descriptions, `S` is the number of steps of a chunk and `E` that of the environments.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from msrl_jax.data.dataset import Dataset
from msrl_jax.data.files import PARTS, check_new, read_parts, save, write_part
from msrl_jax.envs import Box, Discrete, Environment, Space, TimeStep, VectorEnvironment, vectorize
from msrl_jax.envs.base import ENV_AXIS, PyTree, env_name
from msrl_jax.envs.spaces import struct
from msrl_jax.metrics import Mean
from msrl_jax.replay import Transition


class RecorderState(NamedTuple):
    """State of `Recorder`.

    Attributes:
      env_state: of the environments.
      obs: the raw observations that are acted on next. `[E, ...]`
      rows: the last `S` steps, a ring. `[S, E, ...]`
      taken: steps so far. int32
    """

    env_state: PyTree
    obs: jax.Array
    rows: Transition
    taken: jax.Array


@dataclasses.dataclass(frozen=True)
class Recorded:
    """An environment whose vectorized form keeps its last steps.

    Attributes:
      env: the environment; its observations and actions are arrays.
      steps: how many steps of each copy are kept, `S`.
    """

    env: Environment
    steps: int

    def __post_init__(self):
        for kind in ("observation_space", "action_space"):
            space = getattr(self.env, kind)
            if not isinstance(space, Box | Discrete):
                raise TypeError(
                    f"data sets hold arrays, but the {kind} of {env_name(self.env)} is {space}; wrap it in "
                    "envs.FlattenObservation to record it"
                )

    @property
    def name(self) -> str:
        """The name of the environment."""
        return env_name(self.env)

    @property
    def observation_space(self) -> Space:
        """That of the environment."""
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        """That of the environment."""
        return self.env.action_space

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        return self.env.reset(key)

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> tuple[PyTree, PyTree, jax.Array, jax.Array, jax.Array]:
        """Advances the episode."""
        return self.env.step(key, state, action)

    def vectorize(self, num_envs: int) -> "Recorder":
        """Makes `E` copies and the recorder of their steps."""
        return Recorder(vectorize(self.env, num_envs), self.steps)


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A vector environment that keeps its last steps in its state.

    Attributes:
      env: the vector environment.
      steps: how many, `S`.
    """

    env: VectorEnvironment
    steps: int

    @property
    def name(self) -> str:
        """The name of the environment."""
        return env_name(self.env)

    @property
    def num_envs(self) -> int:
        """`E`."""
        return self.env.num_envs

    @property
    def observation_space(self) -> Space:
        """That of the environment."""
        return self.env.observation_space

    @property
    def action_space(self) -> Space:
        """That of the environment."""
        return self.env.action_space

    @property
    def axes(self) -> Any:
        """Logical axes of the state."""
        return RecorderState(self.env.axes, ENV_AXIS, P(None, "env"), P())  # type: ignore[arg-type]

    def reset(self, key: jax.Array) -> tuple[RecorderState, PyTree]:
        """Starts all environments, with nothing recorded."""
        env_state, obs = self.env.reset(key)
        item, action = struct(self.observation_space), struct(self.action_space)
        number, flag = (jax.ShapeDtypeStruct((), dtype) for dtype in (jnp.float32, jnp.bool_))
        lead = (self.steps, self.num_envs)
        rows = Transition(item, action, number, flag, flag, item)
        rows = jax.tree.map(lambda x: jnp.zeros(lead + x.shape, x.dtype), rows)
        # A copy: a state in which two leaves are one array cannot be donated.
        return RecorderState(env_state, jnp.copy(obs), rows, jnp.int32(0)), obs

    def step(self, state: RecorderState, action: PyTree) -> tuple[RecorderState, TimeStep]:
        """Advances all environments, and writes down what they did."""
        env_state, t = self.env.step(state.env_state, action)
        action = jnp.asarray(action, struct(self.action_space).dtype)
        row = Transition(state.obs, action, t.reward, t.terminated, t.truncated, t.final_obs)
        where = state.taken % self.steps
        rows = jax.tree.map(lambda held, x: jax.lax.dynamic_update_index_in_dim(held, x, where, 0), state.rows, row)
        return RecorderState(env_state, t.obs, rows, state.taken + 1), t

    def drain(self, state: RecorderState) -> tuple[RecorderState, dict[str, Mean]]:
        """Passes on."""
        env_state, metrics = self.env.drain(state.env_state)
        return state._replace(env_state=env_state), metrics

    def observe(self, state: RecorderState, obs: PyTree) -> PyTree:
        """Passes on."""
        return self.env.observe(state.env_state, obs)

    def statistics(self, state: RecorderState) -> PyTree:
        """Those of the environment."""
        return self.env.statistics(state.env_state)

    def with_statistics(self, state: RecorderState, statistics: PyTree) -> RecorderState:
        """Passes on."""
        return state._replace(env_state=self.env.with_statistics(state.env_state, statistics))


def _is_recorder(x: Any) -> bool:
    return isinstance(x, RecorderState)


def without_recorder(state: Any) -> Any:
    """The state of a run as it would be without its recorder."""
    return jax.tree.map(lambda x: x.env_state if _is_recorder(x) else x, state, is_leaf=_is_recorder)


class Recording:
    """The steps of a run on their way to a file: written part by part, and joined at the end.

    Until then they are in a folder beside the file, from which `load` reads as well: a run that is killed loses no more than
    the chunk that it was in.
    """

    def __init__(self, path: str | os.PathLike, about: Mapping[str, Any]):
        """Checks that the file can be written; nothing is until there is something to write.

        Args:
          path: of the data set, with a suffix that `save` knows.
          about: of the data set.

        Raises:
          ValueError: if there is something already, or the suffix is unknown.
        """
        self._path, self._about, self._taken = Path(path), dict(about), 0
        check_new(self._path)
        self._parts = self._path.with_name(self._path.name + PARTS)
        if self._parts.exists():
            raise ValueError(
                f"{self._parts} holds what a run recorded that was killed; keep it with msrl_jax.data.save(msrl_jax.data.load("
                f"{str(self._parts)!r}), ...), and delete it"
            )

    def add(self, state: Any, steps: int) -> None:
        """Writes what a chunk of iterations did.

        Args:
          state: that of the run, or of its members.
          steps: how many steps the chunk had of every environment.

        Raises:
          RuntimeError: if the environments took another number of steps.
        """
        (recorder,) = (x for x in jax.tree.leaves(state, is_leaf=_is_recorder) if _is_recorder(x))
        rows, taken = jax.device_get((recorder.rows, recorder.taken))
        first, held = self._taken, rows.reward.shape[-2]
        self._taken += steps
        if (taken != self._taken).any():
            raise RuntimeError(f"the environments took {taken - first} steps, where the algorithm says that it takes {steps}")
        if np.ndim(taken):  # members are further environments
            rows = jax.tree.map(lambda x: np.moveaxis(x, 0, 1).reshape(held, -1, *x.shape[3:]), rows)
        which = np.arange(first, first + steps) % held
        if not self._parts.exists():
            self._parts.mkdir(parents=True)
            (self._parts / "about.json").write_text(json.dumps(self._about))
        write_part(self._parts, jax.tree.map(lambda x: x[which], rows))

    def finish(self) -> Dataset | None:
        """Joins the parts to the file; returns the data set, or None if no step was taken."""
        if not self._parts.exists():
            return None
        dataset = read_parts(self._parts)
        save(dataset, self._path)
        shutil.rmtree(self._parts)
        return dataset
