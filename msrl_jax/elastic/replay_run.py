"""Replays a run with actors from its log of unrolls, in one process."""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.agents.agent import innermost
from msrl_jax.elastic.parameter_messages import Packing
from msrl_jax.elastic.split_program import SplitProgram, split_program
from msrl_jax.elastic.unroll_log import FILE, read_log
from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk.folder import read_rows
from msrl_jax.run.disk.store import read_description
from msrl_jax.run.experiment.experiment import Experiment, difference
from msrl_jax.run.experiment.plain_data import RunFolderError


@entry
def replay_arrivals(folder: str | Path, experiment: Experiment | None = None, *, trust: bool = False) -> PyTree:
    """Recomputes a run with actors in this process alone, from the log of the unrolls in their order of arrival.

    Args:
      folder: the folder of the run.
      experiment: the experiment; needed if the folder cannot describe it, because something was passed as an object.
      trust: whether to run code that the folder names, as in `Result.load`.

    Returns:
      The state of the algorithm after the last unroll, bit-identical to the live run on the same kinds of devices.

    Raises:
      RunFolderError: a ValueError, if the run has no complete log.
    """
    folder = Path(folder)
    description, lines = read_description(folder), read_log(folder / FILE)
    begins = [0, *(resumed["iteration"] for resumed in description["resumed"])]
    # A learner that was killed as it started may be recorded in only one of the two.
    if not lines or _without_repeats(line["begins"] for line in lines if "begins" in line) != _without_repeats(begins):
        raise RunFolderError(f"the run in {folder} did not learn from actors all the time ({FILE}), so it cannot be replayed")
    if any("gap" in line for line in lines):
        raise RunFolderError(f"{folder / FILE} has a gap where lines could not be written, so the run cannot be replayed")
    if experiment is None:
        experiment = Experiment.from_json(description, where=f"the run in {folder}", trust=trust)
    if differs := difference(description, experiment.to_json()):
        name, saved_value, experiment_value = differs
        raise RunFolderError(
            f"the run in {folder} has {name}={saved_value!r}, but the experiment {experiment_value!r}; pass the run's own"
        )
    replay = _Replay(experiment, lines)
    try:
        for line in lines:
            if "begins" in line:
                replay.begin(line)
            elif "ticket" in line:
                replay.arrive(line)
        if any(row["iteration"] > replay.iteration for row in read_rows(folder)[-1:]):
            raise KeyError("its last lines")
    except KeyError as error:
        text = f"{folder / FILE} is incomplete ({error} is missing); restore the file"
        raise RunFolderError(text) from error
    return innermost(jax.tree.unflatten(jax.tree.structure(replay.programs[-1].state), replay.leaves))


def _without_repeats(numbers: Iterable[int]) -> list[int]:
    return [number for number, _ in itertools.groupby(numbers)]


class _Replay:
    """The replay of a run."""

    def __init__(self, experiment: Experiment, lines: list[dict[str, Any]]):
        self._split = functools.cache(lambda **computes: split_program(dataclasses.replace(experiment, **computes)))
        self.programs: list[SplitProgram] = []  # one per learner
        self.leaves: list[jax.Array] = []
        self.iteration = 0
        self._begins = {line["begins"] for line in lines if "begins" in line}
        self._resume_states: dict[int, list[jax.Array]] = {}  # the states from which learners resume
        self._reads = Counter(_parameters_id(line) for line in lines if "ticket" in line)
        self._published: dict[tuple[int, int], list[np.ndarray]] = {}
        self._actors: dict[int, tuple[int, Any, Any]] = {}  # unrolls made, the actor's leaves, what it sent last

    def begin(self, line: dict[str, Any]) -> None:
        program, self.iteration = self._split(total_steps=line["total_steps"], guard=line["guard"]), line["begins"]
        self.packing = Packing.from_codec(line["codec"], program.halves.published_kinds)
        if self.programs:
            self.leaves = jax.tree.map(jnp.copy, self._resume_states[self.iteration])
        else:
            self.leaves = jax.device_put(jax.tree.leaves(program.experiment.initial_state()), program.sharding)
        self.programs.append(program)
        self._publish()

    def arrive(self, line: dict[str, Any]) -> None:
        ticket, parameters_id = line["ticket"], _parameters_id(line)
        program = self.programs[line["life"]]  # an actor may have acted before the program changed
        num_unrolls, actor_leaves, sent_arrays = self._actors.get(ticket) or (0, program.initial_leaves(ticket), None)
        if line["unroll"] == num_unrolls:  # otherwise it arrived before
            actor_leaves, sent_arrays = program.act(
                actor_leaves, jax.device_put(self._published[parameters_id], program.sharding)
            )
            self._actors[ticket] = num_unrolls + 1, actor_leaves, sent_arrays
        elif line["unroll"] not in (num_unrolls - 1, *([] if "used" in line else range(num_unrolls))):
            raise KeyError(f"unroll {num_unrolls} of ticket {ticket}")
        self._reads[parameters_id] -= 1
        if not self._reads[parameters_id]:
            del self._published[parameters_id]
        if "used" in line:
            self.leaves, _ = self.programs[-1].learn(self.leaves, sent_arrays)
            self.iteration += 1
            self._publish()

    def _publish(self) -> None:
        parameters_id = len(self.programs) - 1, self.iteration
        if self._reads[parameters_id]:
            parameters = jax.device_get([self.leaves[i] for i in self.programs[-1].halves.published])
            self._published[parameters_id] = self.packing.unpack(self.packing.pack(parameters))
        if self.iteration in self._begins:
            self._resume_states[self.iteration] = jax.tree.map(jnp.copy, self.leaves)


def _parameters_id(line: dict[str, Any]) -> tuple[int, int]:
    """Returns the learner and the version of the parameters that were used for acting."""
    return line["life"], line["version"]
