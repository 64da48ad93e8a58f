"""Schedules the trials of a sweep: stage by stage, and in each stage batch by batch, with one program per batch."""

import contextlib
import dataclasses
import functools
import math
import numbers
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic as now
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax import algorithms
from msrl_jax.configs.names import tunable_fields
from msrl_jax.envs.base import close_simulators
from msrl_jax.envs.episode_metrics import metrics_of
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.plan.text import size
from msrl_jax.run import processes
from msrl_jax.run.capacity import memory_of
from msrl_jax.run.disk import checkpoint, folder, store
from msrl_jax.run.evaluation.history import final, in_words
from msrl_jax.run.experiment.members import UNRANKED
from msrl_jax.run.experiment.plain_data import RunFolderError
from msrl_jax.run.experiment.spec import Experiment
from msrl_jax.run.loop.hooks import StopRequests
from msrl_jax.run.result import Result, join_members
from msrl_jax.run.streams import progress_stream
from msrl_jax.run.training import train
from msrl_jax.search.space import Stage, Trial

SWEEP = "sweep.json"


class Shape(NamedTuple):
    """The properties that the trials of one program share."""

    fields: Mapping[str, Any]  # the swept fields that determine the program, and their values
    data: tuple[str, ...]  # the swept fields that are numbers in its state


@dataclasses.dataclass
class Course:
    """A sweep in progress; see `sweep` for the arguments."""

    base: Experiment  # every trial replaces fields of its config
    constants: Mapping[str, Any]  # fields of the config that all trials replace
    policy: DistributionPolicy
    devices: Sequence[Device] | None
    watch: Mapping[str, Any]  # arguments of `train` for evaluation, checkpoints and progress
    shared: bool  # whether trials may share a program
    wanted: int | None  # number of trials to train together, set by the user; None for the number that fits in memory
    path: Path | None
    description: Mapping[str, Any]  # a description of the sweep as plain data
    before: Mapping[str, Any]  # the content of `sweep.json` when resuming
    shapes: list[Shape] = dataclasses.field(default_factory=list[Shape])  # shapes of its programs; Optuna adds more
    trials: dict[int, Trial] = dataclasses.field(default_factory=dict[int, Trial])
    runs: list[Path | Result] = dataclasses.field(default_factory=list[Path | Result])
    programs: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])  # as in `sweep.json`
    least: int = 1  # steps of one iteration, or until the first update; the maximum over programs

    def say(self, text: str) -> None:
        """Shows a line of progress."""
        if self.watch["progress"] and processes.is_first():
            print(text, file=progress_stream(), flush=True)

    def make(self, chosen: Sequence[Mapping[str, Any]], first: int = 0) -> list[Trial]:
        """Makes trials from their values, and checks the config of each; raises ValueError that names the trial."""
        made, tunable = [], tunable_fields(type(self.base.algorithm)) if self.shared else ()
        for number, values in enumerate(chosen, first):
            # A tunable field that is None changes a branch of the program, and a schedule is part of the program.
            data = tuple(name for name, value in values.items() if name in tunable and isinstance(value, numbers.Real))
            shape = Shape({name: value for name, value in values.items() if name not in data}, data)
            if shape not in self.shapes:
                self.shapes.append(shape)
            trial = Trial(number, dict(values), self.shapes.index(shape), rank_by=self.description["rank_by"])
            try:
                algorithms.make(self.base.algorithm, {**self.constants, **values})
            except ValueError as error:
                raise ValueError(f"{trial}: {error}") from None
            made.append(trial)
        return made

    def experiment(self, batch: Sequence[Trial]) -> Experiment:
        """Makes one run from trials of one program; data fields have a value for each trial."""
        config = algorithms.make(self.base.algorithm, {**self.constants, **batch[0].values})
        settings = {name: tuple(float(t.values[name]) for t in batch) for name in self.shapes[batch[0].program].data}
        return dataclasses.replace(self.base, algorithm=config, settings=settings)

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Checks and plans new programs; raises ValueError if a trial is invalid or does not fit in memory."""
        self.trials |= {trial.number: trial for trial in trials}
        kept = self.before.get("programs", [])
        for number, shape in list(enumerate(self.shapes))[len(self.programs) :]:
            own = [trial for trial in trials if trial.program == number]
            try:
                experiment = self.experiment(own[:1])
                self._check(experiment)
                try:
                    fits, nbytes, limit = memory_of(experiment, self.policy, self.devices)
                finally:
                    close_simulators(experiment.behavior.agent.env)
            except ValueError as error:
                raise ValueError(f"{own[0]}: {error}") from None
            agent = experiment.behavior.agent
            self.least = max(self.least, agent.steps_per_iteration, agent.learning_starts)
            # A resumed run keeps its original members.
            at_once = kept[number]["at_once"] if number < len(kept) else self.wanted or fits
            self.programs.append({**shape._asdict(), "at_once": at_once, "bytes_of_a_trial": nbytes})
            which = f" ({in_words(shape.fields)})" if shape.fields else ""
            room = f"about {size(nbytes)}{'' if limit is None else f' of {size(limit)}'} for each trial"
            members = min(at_once, len(own)) * self.base.seeds
            self.say(f"program {number}{which}: {len(own)} trials, {members} members at once, {room}")

    def _check(self, experiment: Experiment) -> None:
        agent = experiment.behavior.agent
        experiment.check_length()
        if not experiment.is_ranked:
            raise ValueError(f"{experiment.name}: {UNRANKED}; give rank_by= a metric of the environment")
        if agent.unit == "updates" and self.watch["eval_episodes"] == 0:
            raise ValueError(f"{experiment.name} trains offline, so only evaluations have returns; use eval_episodes above 0")

    def conduct(self, stages: Iterable[Stage], requests: StopRequests) -> str:
        """Trains all stages; returns the reason if a stop request interrupted the sweep, else an empty string."""
        for number, stage in enumerate(stages):
            self.prepare(stage.trials)
            if self.path is not None:
                self._write(self.path / SWEEP)
            if reason := self._train(number, stage, requests):
                return reason
        return ""

    def _write(self, file: Path) -> None:
        """Writes `sweep.json` if there are new trials; raises RunFolderError if the file has different trials."""
        was = self.before.get("trials", [])
        trials = folder.to_json([{"trial": t.number, "program": t.program, "values": t.values} for t in self.trials.values()])
        if differing := [new for new, old in zip(trials, was, strict=False) if new != old]:
            raise RunFolderError(
                f"{file} has other values for trial {differing[0]['trial']}, so other versions of packages chose them; resume "
                "with those versions, or start a new sweep in another folder"
            )
        if len(trials) > len(was) and processes.is_first():
            about = {"sweep": self.description, "versions": folder.versions(), "programs": self.programs, "trials": trials}
            folder.write_json(file, about)

    def _train(self, number: int, stage: Stage, requests: StopRequests) -> str:
        """Trains a stage; returns the reason if it was interrupted."""
        todo = [
            (which, i, batch)
            for which, program in enumerate(self.programs)
            for i, batch in enumerate(batches([t for t in stage.trials if t.program == which], program["at_once"]))
        ]
        for count, (program, i, batch) in enumerate(todo, 1):
            left = None if requests.deadline is None else requests.deadline - now()
            if reason := requests.reason(0.0):
                return reason
            where = None if self.path is None else self.path / f"stage-{number}" / f"program-{program}" / f"batch-{i}"
            names = f"trial {batch[0].number}" if len(batch) == 1 else f"{len(batch)} trials from {batch[0].number} on"
            self.say(f"stage {number}, run {count} of {len(todo)}: {names}, program {program}, to {stage.until:,} steps")
            result = store.check_saved(self._run(batch, stage.until, where, left))
            if result.interrupted:
                return result.stop_reason
            self.trials |= {t.number: t for t in outcome(batch, self.base.seeds, result, stage.rung, len(self.runs))}
            self.runs.append(_on_host(result) if where is None else where)
        return ""

    def _run(self, batch: Sequence[Trial], until: int, path: Path | None, time_limit: float | None) -> Result:
        """Trains trials until `until` steps: from the start, from the runs that trained them before, or from their folder."""
        experiment = self.experiment(batch)
        if path is not None and (done := self._done(path, until)) is not None:
            return done
        partly, before = until < self.base.total_steps, [(self.runs[t.run], t.member) for t in batch if t.run is not None]
        with contextlib.ExitStack() as stack:
            where = path
            if path is None and before:
                where = Path(stack.enter_context(tempfile.TemporaryDirectory()), "run")
            if before and where is not None and not store.holds_run(where):
                read = functools.cache(self._load)
                parts = [(run if isinstance(run, Result) else read(run), member) for run, member in before]
                joined(experiment, parts).save(where)
            result = train(
                experiment,
                policy=self.policy,
                devices=self.devices,
                out=where,
                resume=where is not None,
                **self.watch,
                eval_every=until if partly else None,
                callbacks=[lambda tick: tick.step >= until] if partly else [],
                time_limit=time_limit,
            )
        return result if path is not None else dataclasses.replace(result, folder=None)

    def _load(self, path: Path) -> Result:
        return Result.load(path, **self.base.objects)

    def _done(self, path: Path, until: int) -> Result | None:
        """Returns the result of a run that has already done all `until` steps."""
        if not store.holds_run(path) or not checkpoint.complete_checkpoints(path):
            return None
        result = self._load(path)
        each = result.experiment.steps_per_iteration
        iterations = min(math.ceil(until / each), self.base.total_steps // each)
        done = int(result.history["iteration"][-1]) if len(result.history["iteration"]) else 0
        if done > iterations:
            raise RunFolderError(
                f"the run in {path} has done {done * each} steps, and this sweep compares it after {iterations * each}; "
                "restore its folder, or use another folder for the sweep"
            )
        return result if done == iterations else None


def batches(trials: Sequence[Trial], at_once: int) -> list[list[Trial]]:
    """Splits trials into batches of about equal size, at most `at_once` each."""
    count = max(1, -(-len(trials) // at_once))
    length = max(1, -(-len(trials) // count))
    return [list(trials[i : i + length]) for i in range(0, len(trials), length)]


def outcome(batch: Sequence[Trial], seeds: int, result: Result, rung: int, run: int) -> list[Trial]:
    """Returns the trials of a run with steps, returns and metrics, which are nan for members with non-finite parameters."""
    start = "episode" if result.evaluation is None else "eval"
    columns = {name: f"{start}_{name}" for name in ("return", *metrics_of(result.behavior.env))}
    of_episodes = {name: final(result.history, name) for name in columns.values()}
    of_run = of_episodes if result.evaluation is None else result.evaluation.means
    finite = np.ones(result.members, bool)
    for leaf in jax.tree.leaves(result.state.params):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite &= np.isfinite(np.asarray(leaf, np.float32)).reshape(result.members, -1).all(axis=1)
    scores: dict[str, list[list[float]]] = {}
    for name, column in columns.items():
        of_members = np.atleast_1d(np.asarray(of_run[column], np.float64))
        scores[name] = np.where(finite, of_members, np.nan).reshape(len(batch), seeds).tolist()
    about = {"steps": int(result.history["step"][-1]), "rung": rung, "run": run}
    found = []
    for i, trial in enumerate(batch):
        own = {name: tuple(score[i]) for name, score in scores.items()}
        found.append(dataclasses.replace(trial, returns=own.pop("return"), metrics=own, member=i * seeds, **about))
    return found


def joined(experiment: Experiment, parts: Sequence[tuple[Result, int]]) -> Result:
    """Combines members of `parts`, runs with the index of a trial's first member, into one run with one row of history."""
    first = parts[0][0]
    if not first.has_members:
        return first

    def cut(run: Result) -> Result:
        return dataclasses.replace(run, history={name: x[-1:] for name, x in run.history.items()})

    return join_members([(cut(run), slice(member, member + first.seeds)) for run, member in parts], experiment)


def _on_host(result: Result) -> Result:
    """Moves the state of a result to the host, which frees the devices for the next run."""
    if all(device.platform == "cpu" for leaf in jax.tree.leaves(result.run_state) for device in leaf.devices()):
        return result
    return dataclasses.replace(result, run_state=jax.device_put(result.run_state, jax.local_devices(backend="cpu")[0]))
