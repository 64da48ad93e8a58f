"""The guard of a run: notices nan and infinities within one chunk, and tells where the first one came from."""

import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import jax
import numpy as np

from msrl_jax._device_memory import array_bytes
from msrl_jax._spelling import suggestion
from msrl_jax.fragments.program import Program
from msrl_jax.training import failure, processes
from msrl_jax.training.failure import Failure
from msrl_jax.training.history import HostMetrics, first_non_finite
from msrl_jax.training.hyperparameters import in_words
from msrl_jax.training.locate import locate
from msrl_jax.training.setup import Setup
from msrl_jax.training.skipping import SKIPPED
from msrl_jax.training.watch import Watch

GuardPolicy: TypeAlias = Literal["halt", "skip", "rollback", "ignore"]
"""What a run does about numbers that are not finite."""

KEEP_SECONDS, KEEP_BYTES = 10.0, 2**27
"""The guard copies the state at most this often, and only if it is not larger."""

LOCATE_SECONDS = 300.0
"""A run goes again for at most about this long to find its first nan."""

MOST_SKIPPED = 100
"""With `guard="skip"`, a run ends after this many iterations in a row whose updates were all dropped."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something in a run that is not finite.

    Attributes:
      metric: the metric that is not finite, or None.
      leaf: pytree path of the part of the state that is not finite, or None.
      iteration: the first such iteration as far as known, counted from 1.
      member: number of the member; None for a run of one seed, or if it is not known.
      failure: the computation that is to blame, or None.
      note: why there is no `failure`.
      replay: the file for `replay_step`, or None.
    """

    metric: str | None
    leaf: str | None
    iteration: int
    member: int | None
    failure: Failure | None = None
    note: str = ""
    replay: Path | None = None

    @property
    def path(self) -> str | None:
        """Pytree path of the result of the fragment, or else of the part of the state."""
        return self.failure.origin.path if self.failure else self.leaf

    def describe(self, settings: Sequence[Mapping[str, Any]]) -> str:
        """The finding in words; `settings` are those of the members of the run."""
        what = repr(self.metric) if self.metric else f"state{self.leaf}"
        who = "" if self.member is None else f" of member {self.member} ({in_words(settings[self.member])})"
        if self.failure is None:
            return f"{what}{who} is not finite in iteration {self.iteration}. {self.note}"
        replay = f". To reproduce this step: msrl-jax replay {self.replay}" if self.replay else ""
        return f"{self.failure}. So {what}{who} is not finite{replay}"


def check_guard(guard: str, record: object) -> GuardPolicy:
    """Checks what a run does about numbers that are not finite; raises ValueError on another word, or with `record`."""
    words = get_args(GuardPolicy)
    if guard not in words:
        raise ValueError(f"guard={guard!r}{suggestion(guard, words)}; use one of {', '.join(words)}")
    if guard == "rollback" and record is not None:
        raise ValueError('guard="rollback" would take recorded steps back; leave record out, or use guard="halt"')
    if guard == "rollback" and processes.count() > 1:
        raise ValueError('guard="rollback" works in one process only; use guard="halt" or "skip"')
    return cast(GuardPolicy, guard)


class DivergedError(FloatingPointError):
    """A number of a run was nan or infinite.

    Attributes:
      metric: name of the metric that was not finite; None if only a part of the state was.
      iteration: the first such iteration, counted from 1.
      member: number of the member; None for a run of one seed, or if it is not known.
      fragment: name of the fragment that made the first nan or infinity; None if it is not known.
      path: pytree path of that fragment's result, or of the part of the state.
      replay: the file for `msrl_jax.replay_step`; None if there is none.
      finding: all that is known.
      result: the run up to the end of that chunk.
    """

    def __init__(self, finding: Finding, result: Any):
        super().__init__(
            f"{finding.describe(result.settings)}. The history so far is in the error's `result`"
        )
        self.finding, self.result = finding, result
        self.metric, self.iteration, self.member = finding.metric, finding.iteration, finding.member
        self.fragment = finding.failure.origin.fragment if finding.failure else None
        self.path, self.replay = finding.path, finding.replay


CAUSES = (
    "Usual causes: a learning rate that is too high, rewards that need normalize_rewards=True, an environment that returns nan "
    "or an observation without a legal action"
)


class Guard:
    """Watches a run.

    The programs of the run are those of an unwatched run. At the end of a chunk, the guard looks at the metrics and asks the
    devices for one bool per leaf of the state. Now and then it keeps a copy of a small state. If something is not finite, the
    run goes again from the last copy, because a run is deterministic.
    """

    def __init__(self, setup: Setup, program: Program, run_state: Any, *, policy: GuardPolicy = "halt", iteration: int = 0):
        """Looks at the first state.

        Args:
          setup: the run.
          program: its program.
          run_state: the state at the start.
          policy: what the run does about numbers that are not finite.
          iteration: iterations done so far.
        """
        self._setup, self._program, self._policy = setup, program, policy
        state = program.unwrap(run_state)
        self._watch = Watch(setup.agent, state)
        self._can_read = processes.count() == 1
        self._small = self._can_read and sum(array_bytes(x) for x in jax.tree.leaves(run_state)) <= KEEP_BYTES
        self._first_bad = self._watch.bad(state)
        self._kept: tuple[Any, int] | None = None
        self._kept_at = time.monotonic()
        self._begin = iteration
        self._changed_at = 0
        self._streak: np.ndarray = np.zeros(setup.members, np.int64)

    def check(self, run_state: Any, metrics: HostMetrics, iteration: int) -> Finding | None:
        """Looks at the end of a chunk.

        Args:
          run_state: the state after the chunk.
          metrics: the metrics of the chunk, `[N]` or `[N, M]`.
          iteration: iterations done, those of the chunk included.

        Returns:
          What is not finite, or None. With `guard="skip"`, only what dropped updates cannot repair; nothing with "ignore".
        """
        if self._policy == "ignore":
            return None
        length = len(jax.tree.leaves(metrics)[0]) if jax.tree.leaves(metrics) else 1
        if self._policy == "skip":
            return self._check_skipped(run_state, np.asarray(metrics[SKIPPED]), iteration)
        if self._first_bad:
            return Finding(None, self._first_bad[0], self._begin + 1, None)
        if found := first_non_finite(metrics):
            metric, within, member = found
            return Finding(metric, None, iteration - length + within + 1, member)
        if bad := self._watch.bad(self._program.unwrap(run_state)):
            return Finding(None, bad[0], iteration, None)
        self._keep(run_state, iteration)
        return None

    def _check_skipped(self, run_state: Any, skipped: np.ndarray, iteration: int) -> Finding | None:
        rows = skipped.reshape(len(skipped), -1) > 0
        for member in range(rows.shape[1]):
            fine = np.flatnonzero(~rows[:, member])
            self._streak[member] = len(rows) - 1 - fine[-1] if len(fine) else self._streak[member] + len(rows)
        worst = int(self._streak.argmax())
        if self._streak[worst] < MOST_SKIPPED:
            if not rows.any():
                self._keep(run_state, iteration)
            return None
        first = iteration - int(self._streak[worst]) + 1
        return Finding(SKIPPED, None, first, worst if self._setup.has_members else None)

    def _keep(self, run_state: Any, iteration: int) -> None:
        """Copies the state if the last copy is old."""
        if not self._small or time.monotonic() - self._kept_at < KEEP_SECONDS:
            return
        self._kept_at = time.monotonic()
        if self._watch.is_whole(self._program.unwrap(run_state)):
            self._kept = self._program.place(run_state), iteration

    def changed(self, run_state: Any, iteration: int) -> None:
        """Notes that the host has changed the state, so that the run cannot go again from an earlier one.

        Args:
          run_state: the state from now on.
          iteration: iterations done so far.
        """
        self._changed_at, self._kept, self._kept_at = iteration, None, -math.inf
        self._keep(run_state, iteration)

    def locate(
        self,
        finding: Finding,
        run: Callable[[Any, int], tuple[Any, Any]],
        description: Mapping[str, Any],
        out: Path | None,
        *,
        checkpoints: Callable[[], Iterator[tuple[Any, int]]] = lambda: iter(()),
        seconds_per_iteration: float = 0.0,
    ) -> Finding:
        """Finds where the first nan or infinity came from, and writes the file for `replay_step`.

        Args:
          finding: what `check` returned.
          run: `(state, iterations) -> (state, metrics)`; the given state stays valid.
          description: the content of the run's `config.json`.
          out: the folder of the run; a new temporary folder if None.
          checkpoints: reads the states and iterations of the checkpoints, the newest first.
          seconds_per_iteration: time of an iteration.

        Returns:
          The finding with its cause, or with the reason why it has none.
        """
        if self._kept is None and self._begin == 0 and self._first_bad:
            return self._at_start(finding)
        if not self._can_read:
            return self._unknown(finding, "The state is on several processes, so the cause was not looked for.")
        state, begin = self.earlier(checkpoints)
        iterations = finding.iteration - begin
        if begin < self._changed_at:
            when = f"after iteration {self._changed_at}, which is later than the last kept state"
            return self._unknown(finding, f"A callback changed parameters of the environments {when}.")
        if iterations < 1:
            return self._unknown(finding, "There is no finite state from before that iteration.")
        if self._program.traced.jaxpr.effects:
            return self._unknown(finding, "The loop calls the host, so it was not run again to find the cause.")
        if (seconds := iterations * seconds_per_iteration) > LOCATE_SECONDS:
            return self._unknown(
                finding,
                f"The last kept state is {iterations} iterations earlier, which take about {seconds:.0f} s to run again, so "
                "the cause was not looked for.",
            )
        try:
            found = locate(self._program, run, state, iterations, self._watch)
        except (RuntimeError, MemoryError) as error:  # of the devices, such as a lack of memory
            return self._unknown(finding, f"The search for the cause failed: {' '.join(str(error).split())[:300]}.")
        if found is None:
            return self._unknown(finding, "The iterations were finite when they ran again.")
        before, origin = found
        finding = dataclasses.replace(finding, iteration=begin + before + 1)
        if origin is None:
            return self._unknown(finding, "Outside of the compiled programs, that iteration is finite.")
        if isinstance(origin, int):
            where = f"state{self._watch.paths[origin]}" if origin < len(self._watch.paths) else "a delayed parameter"
            return self._unknown(finding, f"Before that iteration, {where} was not finite.")
        blamed = Failure.of(origin, finding.iteration, self._setup.has_members, self._setup.behavior.agent.env)
        finding = dataclasses.replace(finding, failure=blamed, member=blamed.member)
        if origin.fragment is None:
            return finding
        path = (Path(tempfile.mkdtemp(prefix="msrl-jax-")) if out is None else out) / failure.FILE
        try:
            saved = failure.save(path, blamed, description, self._setup.recorded_steps)
        except OSError as error:
            return dataclasses.replace(finding, note=f"The step could not be written: {error}")
        return dataclasses.replace(finding, replay=saved)

    def earlier(self, checkpoints: Callable[[], Iterator[tuple[Any, int]]]) -> tuple[Any, int]:
        """The last good state, and its iteration: the copy, a newer checkpoint that is finite, or the initial state.

        A checkpoint may hold a nan in its replay buffer that no update has used yet.
        """
        for state, iteration in checkpoints():
            if self._kept is not None and iteration <= self._kept[1]:
                break
            if self._watch.is_whole(self._program.unwrap(state)):
                return state, iteration
        return self._kept or (self._setup.start(self._program), 0)

    def _at_start(self, finding: Finding) -> Finding:
        leaf = self._first_bad[0]
        who = "The environment's `reset` returned" if leaf.startswith(".obs") else "The run started with"
        return dataclasses.replace(
            finding, leaf=leaf, note=f"{who} numbers that are not finite: state{leaf} of the initial state"
        )

    def _unknown(self, finding: Finding, why: str) -> Finding:
        return dataclasses.replace(finding, note=f"{why} {CAUSES}")
