"""The guard of a run: detects non-finite values within one chunk, and can roll back. Rooms may find their origin."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._rooms import Registry
from msrl_jax.envs.base import PyTree, close_simulators
from msrl_jax.fragments.runtime.memory import array_bytes
from msrl_jax.fragments.support.random_keys import fold_keys
from msrl_jax.run.disk import checkpoint, folder, store
from msrl_jax.run.evaluation.history import SKIPPED, first_non_finite, in_words
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.members import Member
from msrl_jax.run.loop.hooks import Checkpoints
from msrl_jax.run.loop.loop import Run, StopReason
from msrl_jax.run.loop.watch import Watch

KEEP_SECONDS, KEEP_BYTES = 10.0, 2**27  # the guard copies the state at most this often, and only if it is not larger than this
MOST_SKIPPED = 100  # with `guard="skip"`, a run ends after this many consecutive iterations whose updates were all dropped
MOST_ROLLBACKS = 5  # the maximum number of rollbacks; after that, the run diverges

CAUSES = (
    "Usual causes: the learning rate is too high, rewards need normalize_rewards=True, or the environment returns nan "
    "or an observation without a legal action"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """A non-finite value in a run."""

    metric: str | None  # the metric that is non-finite
    leaf: str | None  # pytree path of the non-finite part of the state
    iteration: int  # the first such iteration as far as known, counted from 1
    member: int | None  # None for a run of one seed, or if it is not known
    failure: Any = None  # the computation that caused it, a `Failure` of the room that searched for it
    note: str = ""  # why there is no `failure`
    replay: Path | None = None  # the file with which `msrl-jax replay` repeats that step

    def describe(self, settings: Sequence[Mapping[str, Any]]) -> str:
        """Describes the finding for an error message; `settings` are those of the members of the run."""
        value_name = repr(self.metric) if self.metric else f"state{self.leaf}"
        of_member = "" if self.member is None else f" of member {self.member} ({in_words(settings[self.member])})"
        if self.failure is None:
            return f"{value_name}{of_member} is not finite in iteration {self.iteration}. {self.note}"
        replay = f". To reproduce this step: msrl-jax replay {self.replay}" if self.replay else ""
        return f"{self.failure}. So {value_name}{of_member} is not finite{replay}"


class DivergedError(FloatingPointError):
    """A value in a run was nan or infinite.

    Attributes:
      metric: name of the metric that was non-finite; None if only a part of the state was.
      iteration: the first such iteration, counted from 1.
      member: index of the member; None for a run of one seed, or if it is not known.
      fragment: name of the fragment that produced the first nan or infinity; None if it is not known.
      path: pytree path of that fragment's result, or of the part of the state.
      replay: the file with which `msrl-jax replay` repeats that step; None if there is none.
      finding: all that is known.
      result: the run up to the end of that chunk.
    """

    def __init__(self, finding: Finding, result: Any):
        super().__init__(f"{finding.describe(result.settings)}. The history so far is in the error's `result`")
        self.finding, self.result = finding, result
        self.metric, self.iteration, self.member = finding.metric, finding.iteration, finding.member
        origin = finding.failure.origin if finding.failure else None
        self.fragment, self.path = (origin.fragment, origin.path) if origin else (None, finding.leaf)
        self.replay = finding.replay


class Guard:
    """A hook that detects non-finite values at the end of a chunk, by the metrics and one bool per leaf of the state.

    The programs of the run are the same as without a guard. From time to time, the guard copies the state if it is small. If it
    finds a non-finite value, it can repeat the run from this copy, because a run is deterministic.
    """

    def begin(self, run: Run) -> None:
        """Checks the initial state."""
        state = run.program.unwrap(run.run_state)
        self.watch = Watch(run.experiment.agent, state)
        self.can_read = jax.process_count() == 1
        self._small = self.can_read and sum(array_bytes(x) for x in jax.tree.leaves(run.run_state)) <= KEEP_BYTES
        self._first_bad = self.watch.bad(state)
        self._kept: tuple[PyTree, int] | None = None
        self._kept_at, self._begin = time.monotonic(), run.iteration
        self._streak: np.ndarray = np.zeros(run.experiment.members, np.int64)

    def after(self, run: Run) -> None:
        """Checks the metrics of the chunk and the state."""
        if run.experiment.guard == "skip":
            run.finding = self._check_skipped(run, np.asarray(run.metrics[SKIPPED]))
            return
        run.finding = self._check(run)
        if run.finding is None:
            self._keep(run)

    def _check(self, run: Run) -> Finding | None:
        if self._first_bad:
            return Finding(None, self._first_bad[0], self._begin + 1, None)
        if non_finite := first_non_finite(run.metrics):
            metric, offset, member = non_finite
            return Finding(metric, None, run.iteration - len(jax.tree.leaves(run.metrics)[0]) + offset + 1, member)
        bad = self.watch.bad(run.program.unwrap(run.run_state))
        return Finding(None, bad[0], run.iteration, None) if bad else None

    def _check_skipped(self, run: Run, skipped: np.ndarray) -> Finding | None:
        """Returns a finding if too many consecutive updates were dropped."""
        rows = skipped.reshape(len(skipped), -1) > 0
        self._streak = np.where(rows.all(axis=0), self._streak + len(rows), np.argmax(~rows[::-1], axis=0))
        worst = int(self._streak.argmax())
        if self._streak[worst] < MOST_SKIPPED:
            if not rows.any():
                self._keep(run)
            return None
        first_iteration = run.iteration - int(self._streak[worst]) + 1
        return Finding(SKIPPED, None, first_iteration, worst if run.experiment.has_members else None)

    def _keep(self, run: Run) -> None:
        """Copies the state if the last copy is old."""
        if not self._small or time.monotonic() - self._kept_at < KEEP_SECONDS:
            return
        self._kept_at = time.monotonic()
        if self.watch.is_whole(run.program.unwrap(run.run_state)):
            self._kept = run.program.place(run.run_state), run.iteration

    def changed(self, run: Run) -> None:
        """Notes that the host has changed the state, so that the run cannot be repeated from an earlier one."""
        self._kept, self._kept_at = None, -math.inf
        self._keep(run)

    def earlier(self, run: Run) -> tuple[PyTree, int, int]:
        """Returns the last good state, its iteration, and the number of rollbacks before it: the copy, a newer finite
        checkpoint, or the initial state."""
        for saved_checkpoint in [] if run.path is None else checkpoint.complete_checkpoints(run.path):
            if self._kept is not None and saved_checkpoint.iteration <= self._kept[1]:
                break
            with contextlib.suppress(checkpoint.CheckpointError):
                checkpoint.verify(saved_checkpoint)
                state = store.restore_state(saved_checkpoint, run.experiment, run.program)
                if self.watch.is_whole(run.program.unwrap(state)):  # a replay buffer may hold a nan that no update has used
                    return state, saved_checkpoint.iteration, saved_checkpoint.progress["rollbacks"]
        if self._kept is not None:  # a copy since the last rollback
            return *self._kept, len(run.deployment["rollbacks"])
        return run.experiment.start(run.program), 0, 0

    def locate(self, run: Run) -> Finding:
        """Lets rooms find where the first nan or infinity came from."""
        finding: Finding = run.finding
        if self._kept is None and self._begin == 0 and self._first_bad:
            leaf = self._first_bad[0]
            origin = "The environment's `reset` returned" if leaf.startswith(".obs") else "The run started with"
            note = f"{origin} non-finite values: state{leaf} of the initial state"
            return dataclasses.replace(finding, leaf=leaf, note=note)
        for explain in EXPLANATIONS.values():
            finding = explain(run, finding, self)
        return finding if finding.failure is not None else dataclasses.replace(finding, note=f"{finding.note} {CAUSES}".strip())


EXPLANATIONS: Registry[Callable[[Run, Finding, Guard], Finding]] = Registry("explanations")
"""The explanations of rooms: functions that add `failure` and `replay` to a finding, or a `note` on why they are unknown."""


class StopOrRollBack:
    """A hook that ends a run with a non-finite value, or rolls it back to its last good state."""

    def __init__(self, guard: Guard, saver: Checkpoints | None):
        self._guard, self._saver = guard, saver

    def after(self, run: Run) -> StopReason | None:
        """Ends the run if it has diverged and is not rolled back."""
        if run.finding is None:
            if run.changed_at == run.iteration:
                self._guard.changed(run)
            return None
        if run.experiment.guard != "rollback" or len(run.deployment["rollbacks"]) >= MOST_ROLLBACKS:
            return StopReason("diverged")
        self._roll_back(run)
        return None

    def _roll_back(self, run: Run) -> None:
        """Rolls a run back in place: drops the rows after the earlier state, and recompiles the program."""
        rollbacks = run.deployment["rollbacks"]
        if self._saver is not None:
            self._saver.wait()
        state, iteration, rollbacks_before = self._guard.earlier(run)
        state = jax.tree.map(jnp.copy, again(state, len(rollbacks) + 1, rollbacks_before, run.experiment))
        close_simulators(run.experiment.agent.env)
        config = run.experiment.algorithm
        names = [f.name for f in dataclasses.fields(config) if f.name.endswith("learning_rate")]
        rates = {name: rate / 2 for name in names if isinstance(rate := getattr(config, name), float)}
        run.experiment = run.experiment.replaced(algorithm=dataclasses.replace(config, **rates))
        run.compiled_before += run.program.compile_seconds
        run.program = run.experiment.compile(run.policy, run.devices)
        run.run_state = run.program.place(state)
        rollback = {
            "from": run.finding.iteration,
            "to": iteration,
            "because": run.finding.metric or f"state{run.finding.leaf}",
            "learning_rate": getattr(run.experiment.algorithm, "learning_rate", None),
        }
        run.deployment["rollbacks"] = [*rollbacks, rollback]
        run.iteration, run.finding = iteration, None
        run.last_episodes = run.last_episodes.until(iteration)
        run.rows = [row for row in run.rows if row["iteration"] <= iteration]
        self._guard.begin(run)
        if run.path is not None:
            folder.rewind_rows(run.path, len(run.rows))
            folder.write_json(run.path / folder.CONFIG, run.description)
        run.compile()
        if self._saver is not None:
            self._saver.begin(run)


def again(state: PyTree, number: int, rollbacks_before: int, experiment: Experiment) -> PyTree:
    """Returns the state with which a run restarts after its `number`-th rollback: with other keys and lower rates of members.

    The given state is from a time when the run had done `rollbacks_before` rollbacks.
    """

    def slower(part: Any) -> Any:
        if not isinstance(part, Member):
            return part
        # Rates that evolve are halved once per rollback since that state, other rates once per rollback of the run.
        rates_now, divisor = (
            (experiment.numbers, 2**number) if experiment.pbt is None else (part.numbers, 2 ** (number - rollbacks_before))
        )
        rates = {name: jnp.asarray(rate / divisor) for name, rate in rates_now.items() if name.endswith("learning_rate")}
        return part._replace(numbers=part.numbers | rates)

    return jax.tree.map(slower, fold_keys(state, number), is_leaf=lambda x: isinstance(x, Member))
