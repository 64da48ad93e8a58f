"""The two halves of an iteration, those of actors and learner, as functions of arrays for separate processes.

A schedule can be split if actors read what learners made, act, and send data, from which learners then learn: once each way.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from msrl_jax._compat import ShapedArray, equations_in, jaxpr_as_fun
from msrl_jax.fragments.passes.instructions import Free, Instruction, Move, RunProgram, Schedule, Value
from msrl_jax.fragments.passes.prepare import prepare_for_placement
from msrl_jax.fragments.placement import Device, Layout, Placement
from msrl_jax.fragments.support.random_keys import is_key


@dataclass(frozen=True)
class Apart:
    """A policy that separates actors and learners on one device, so that transfers do not depend on the available devices."""

    device: Device

    def layout(self, devices: Sequence[Device], sizes: Mapping[str, int]) -> Layout:
        """Places actors and learners on two meshes of the same device."""
        actors, learners = (
            Placement(name, Mesh(np.array([self.device], object), (name,)), rules=()) for name in ("actors", "learners")
        )
        return Layout({"env": actors, "actor": actors, "learner": learners, "server": learners}, policy="SingleLearnerCoarse")


@dataclass(frozen=True, eq=False)
class Halves:
    """The halves of an iteration. Leaves are those of the state, by position.

    Attributes:
      private: the leaves that only actors read and change, such as their environments.
      published: the leaves of the learner that actors read, such as the parameters.
      sent: what actors send to the learner in an iteration: training data and metrics.
    """

    schedule: Schedule
    acting: tuple[Instruction, ...]
    learning: tuple[Instruction, ...]
    private: tuple[int, ...]
    published: tuple[int, ...]
    sent: tuple[Value, ...]

    @cached_property
    def sent_kinds(self) -> tuple[ShapedArray, ...]:
        """Shapes and dtypes of the sent arrays."""
        return tuple(v.aval for v in self.sent)

    @cached_property
    def published_kinds(self) -> tuple[ShapedArray, ...]:
        """Shapes and dtypes of the published arrays."""
        return tuple(self.schedule.inputs[i][0].aval for i in self.published)

    def act(self, private: Sequence[jax.Array], published: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the actors' half; returns their next leaves and the arrays to send."""
        values = self._constants()
        for position, x in zip((*self.private, *self.published), (*private, *published), strict=True):
            values.update(dict.fromkeys(self.schedule.inputs[position], x))
        _run_instructions(self.acting, values)
        return [values[self.schedule.outputs[i][0]] for i in self.private], [values[v] for v in self.sent]

    def learn(self, leaves: Sequence[jax.Array], sent_arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Runs the learner's half; returns all leaves of the next state, with those of actors unchanged, and the metrics."""
        values = self._constants() | dict(zip(self.sent, sent_arrays, strict=True))
        for copies, x in zip(self.schedule.inputs, leaves, strict=True):
            values.update(dict.fromkeys(copies, x))
        for i in self.acting:  # bind received values to their destinations
            if isinstance(i, Move):
                values.update((r, values[s]) for s, r in zip(i.sources, i.results, strict=True) if s in values)
        _run_instructions(self.learning, values)
        next_leaves = [
            x if i in self.private else values[_learner_copy(self.schedule.outputs[i])] for i, x in enumerate(leaves)
        ]
        return next_leaves, [values[v] for v in self.schedule.metrics]

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 hash of the operations of both halves with their shapes: equal for equal programs, in any process."""
        digest = hashlib.sha256()
        for program in (i for i in (*self.acting, *self.learning) if isinstance(i, RunProgram)):
            for e in equations_in(program.jaxpr.jaxpr):
                digest.update(f"{e.primitive} {[str(a.aval) for a in (*e.invars, *e.outvars)]}".encode())
        for value in (*self.sent_kinds, *self.published_kinds):
            digest.update(str(value).encode())
        return digest.hexdigest()

    def _constants(self) -> dict[Value, Any]:
        return dict(self.schedule.constants)


def split(schedule: Schedule, make_error: Callable[[str], Exception]) -> Halves:
    """Splits a schedule of `Apart` into halves; if that is impossible, raises the error that `make_error(reason)` returns."""
    body = [i for i in schedule.body if not isinstance(i, Free)]
    if not all(isinstance(i, RunProgram | Move) for i in body):
        raise make_error("its actors and its learner exchange data at every step")
    first_learning = next(
        (k for k, i in enumerate(body) if isinstance(i, RunProgram) and not _is_of_actors(i.placement)), len(body)
    )
    acting, learning = tuple(body[:first_learning]), tuple(body[first_learning:])
    if buffers := [name for i in body if isinstance(i, RunProgram) and "buffer" in i.roles for name in i.fragments]:
        raise make_error(f"its replay buffer ({buffers[0]}) keeps the steps of every environment in order")
    up = [i for i in acting if isinstance(i, Move) and _is_of_actors(i.sources[0].placement)]
    if not learning or not up or any(_is_of_actors(i.placement) if isinstance(i, RunProgram) else True for i in learning):
        raise make_error("its actors wait for results of the learner from their data in the same iteration")
    actor_values = {v for i in acting if isinstance(i, RunProgram) for v in i.makes()}
    crossing = dict.fromkeys(s for i in up for s in i.sources)
    crossing |= dict.fromkeys(v for v in schedule.metrics if v in actor_values)
    actor_reads = {v for i in acting for v in i.reads()}
    pairs = list(enumerate(schedule.inputs))
    private = tuple(k for k, copies in pairs if all(_is_of_actors(v.placement) for v in copies))
    published = tuple(k for k, copies in pairs if k not in private and not actor_reads.isdisjoint(copies))
    kinds = [(schedule.inputs[k][0].label, schedule.inputs[k][0].aval) for k in published]
    for label, aval in [*kinds, *((v.label, v.aval) for v in crossing)]:
        if is_key(aval):
            raise make_error(f"random keys ({label}) cross between its actors and its learner")
    return Halves(schedule, acting, learning, private, published, tuple(crossing))


def _is_of_actors(placement: Placement) -> bool:
    return placement.name == "actors"


def _learner_copy(copies: Sequence[Value]) -> Value:
    """Returns the learner's copy."""
    return next(v for v in copies if not _is_of_actors(v.placement))


def _run_instructions(instructions: Sequence[Instruction], values: dict[Value, jax.Array]) -> None:
    """Evaluates programs and moves in order."""
    for i in instructions:
        if isinstance(i, RunProgram):
            results = jaxpr_as_fun(prepare_for_placement(i.jaxpr, i.placement))(*[values[v] for v in i.inputs])
            values.update(zip(i.outputs, results, strict=True))
        elif isinstance(i, Move):
            values.update((r, values[s]) for s, r in zip(i.sources, i.results, strict=True))
