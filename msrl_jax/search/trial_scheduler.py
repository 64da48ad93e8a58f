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
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.members import UNRANKED
from msrl_jax.run.experiment.plain_data import RunFolderError
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
class TrialScheduler:
    """A sweep in progress; see `sweep` for the arguments."""

    base: Experiment  # every trial replaces fields of its config
    constants: Mapping[str, Any]  # fields of the config that all trials replace
    policy: DistributionPolicy
    devices: Sequence[Device] | None
    watch: Mapping[str, Any]  # arguments of `train` for evaluation, checkpoints and progress
    shares_programs: bool  # whether trials may share a program
    trials_at_once: int | None  # number of trials to train together, set by the user; None for the number that fits in memory
    path: Path | None
    description: Mapping[str, Any]  # a description of the sweep as plain data
    saved_sweep: Mapping[str, Any]  # the content of `sweep.json` when resuming
    shapes: list[Shape] = dataclasses.field(default_factory=list[Shape])  # shapes of its programs; Optuna adds more
    trials: dict[int, Trial] = dataclasses.field(default_factory=dict[int, Trial])
    runs: list[Path | Result] = dataclasses.field(default_factory=list[Path | Result])
    programs: list[dict[str, Any]] = dataclasses.field(default_factory=list[dict[str, Any]])  # as in `sweep.json`
    least_steps: int = 1  # steps of one iteration, or until the first update; the maximum over programs

    def say(self, text: str) -> None:
        """Shows a line of progress."""
        if self.watch["progress"] and processes.is_first():
            print(text, file=progress_stream(), flush=True)

    def make(self, value_sets: Sequence[Mapping[str, Any]], first_number: int = 0) -> list[Trial]:
        """Makes trials from their values, and checks the config of each; raises ValueError that names the trial."""
        trials, tunable = [], tunable_fields(type(self.base.algorithm)) if self.shares_programs else ()
        for number, values in enumerate(value_sets, first_number):
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
            trials.append(trial)
        return trials

    def experiment(self, batch: Sequence[Trial]) -> Experiment:
        """Makes one run from trials of one program; data fields have a value for each trial."""
        config = algorithms.make(self.base.algorithm, {**self.constants, **batch[0].values})
        settings = {name: tuple(float(t.values[name]) for t in batch) for name in self.shapes[batch[0].program].data}
        return dataclasses.replace(self.base, algorithm=config, settings=settings)

    def prepare(self, trials: Sequence[Trial]) -> None:
        """Checks and plans new programs; raises ValueError if a trial is invalid or does not fit in memory."""
        self.trials |= {trial.number: trial for trial in trials}
        saved_programs = self.saved_sweep.get("programs", [])
        for number, shape in list(enumerate(self.shapes))[len(self.programs) :]:
            program_trials = [trial for trial in trials if trial.program == number]
            try:
                experiment = self.experiment(program_trials[:1])
                self._check_experiment(experiment)
                try:
                    fits, nbytes, limit = memory_of(experiment, self.policy, self.devices)
                finally:
                    close_simulators(experiment.behavior.agent.env)
            except ValueError as error:
                raise ValueError(f"{program_trials[0]}: {error}") from None
            agent = experiment.behavior.agent
            self.least_steps = max(self.least_steps, agent.steps_per_iteration, agent.learning_starts)
            # A resumed run keeps its original members.
            at_once = saved_programs[number]["at_once"] if number < len(saved_programs) else self.trials_at_once or fits
            self.programs.append({**shape._asdict(), "at_once": at_once, "bytes_of_a_trial": nbytes})
            fields_text = f" ({in_words(shape.fields)})" if shape.fields else ""
            room = f"about {size(nbytes)}{'' if limit is None else f' of {size(limit)}'} for each trial"
            members = min(at_once, len(program_trials)) * self.base.seeds
            self.say(f"program {number}{fields_text}: {len(program_trials)} trials, {members} members at once, {room}")

    def _check_experiment(self, experiment: Experiment) -> None:
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
                self._write_sweep(self.path / SWEEP)
            if reason := self._train_stage(number, stage, requests):
                return reason
        return ""

    def _write_sweep(self, file: Path) -> None:
        """Writes `sweep.json` if there are new trials; raises RunFolderError if the file has different trials."""
        saved_trials = self.saved_sweep.get("trials", [])
        trials = folder.to_json([{"trial": t.number, "program": t.program, "values": t.values} for t in self.trials.values()])
        if differing := [trial for trial, saved_trial in zip(trials, saved_trials, strict=False) if trial != saved_trial]:
            raise RunFolderError(
                f"{file} has other values for trial {differing[0]['trial']}, so other versions of packages chose them; resume "
                "with those versions, or start a new sweep in another folder"
            )
        if len(trials) > len(saved_trials) and processes.is_first():
            about = {"sweep": self.description, "versions": folder.versions(), "programs": self.programs, "trials": trials}
            folder.write_json(file, about)

    def _train_stage(self, number: int, stage: Stage, requests: StopRequests) -> str:
        """Trains a stage; returns the reason if it was interrupted."""
        todo = [
            (program_number, i, batch)
            for program_number, program in enumerate(self.programs)
            for i, batch in enumerate(batches([t for t in stage.trials if t.program == program_number], program["at_once"]))
        ]
        for count, (program, i, batch) in enumerate(todo, 1):
            time_left = None if requests.deadline is None else requests.deadline - now()
            if reason := requests.reason(0.0):
                return reason
            run_path = None if self.path is None else self.path / f"stage-{number}" / f"program-{program}" / f"batch-{i}"
            names = f"trial {batch[0].number}" if len(batch) == 1 else f"{len(batch)} trials from {batch[0].number} on"
            self.say(f"stage {number}, run {count} of {len(todo)}: {names}, program {program}, to {stage.until:,} steps")
            result = store.check_saved(self._train_batch(batch, stage.until, run_path, time_left))
            if result.interrupted:
                return result.stop_reason
            self.trials |= {t.number: t for t in outcome(batch, self.base.seeds, result, stage.rung, len(self.runs))}
            self.runs.append(_move_to_host(result) if run_path is None else run_path)
        return ""

    def _train_batch(self, batch: Sequence[Trial], end_step: int, path: Path | None, time_limit: float | None) -> Result:
        """Trains trials until `end_step`: from the start, from the runs that trained them before, or from their folder."""
        experiment = self.experiment(batch)
        if path is not None and (finished_run := self._finished_run(path, end_step)) is not None:
            return finished_run
        partly, earlier_runs = (
            end_step < self.base.total_steps,
            [(self.runs[t.run], t.member) for t in batch if t.run is not None],
        )
        with contextlib.ExitStack() as stack:
            run_path = path
            if path is None and earlier_runs:
                run_path = Path(stack.enter_context(tempfile.TemporaryDirectory()), "run")
            if earlier_runs and run_path is not None and not store.holds_run(run_path):
                load_cached = functools.cache(self._load_run)
                parts = [(run if isinstance(run, Result) else load_cached(run), member) for run, member in earlier_runs]
                joined(experiment, parts).save(run_path)
            result = train(
                experiment,
                policy=self.policy,
                devices=self.devices,
                out=run_path,
                resume=run_path is not None,
                **self.watch,
                eval_every=end_step if partly else None,
                callbacks=[lambda tick: tick.step >= end_step] if partly else [],
                time_limit=time_limit,
            )
        return result if path is not None else dataclasses.replace(result, folder=None)

    def _load_run(self, path: Path) -> Result:
        return Result.load(path, **self.base.objects)

    def _finished_run(self, path: Path, end_step: int) -> Result | None:
        """Returns the result of a run that has already done all steps until `end_step`."""
        if not store.holds_run(path) or not checkpoint.complete_checkpoints(path):
            return None
        result = self._load_run(path)
        steps_per_iteration = result.experiment.steps_per_iteration
        iterations = min(math.ceil(end_step / steps_per_iteration), self.base.total_steps // steps_per_iteration)
        iterations_done = int(result.history["iteration"][-1]) if len(result.history["iteration"]) else 0
        if iterations_done > iterations:
            raise RunFolderError(
                f"the run in {path} has done {iterations_done * steps_per_iteration} steps, and this sweep compares it "
                f"after {iterations * steps_per_iteration}; restore its folder, or use another folder for the sweep"
            )
        return result if iterations_done == iterations else None


def batches(trials: Sequence[Trial], at_once: int) -> list[list[Trial]]:
    """Splits trials into batches of about equal size, at most `at_once` each."""
    count = max(1, -(-len(trials) // at_once))
    length = max(1, -(-len(trials) // count))
    return [list(trials[i : i + length]) for i in range(0, len(trials), length)]


def outcome(batch: Sequence[Trial], seeds: int, result: Result, rung: int, run_number: int) -> list[Trial]:
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
    about = {"steps": int(result.history["step"][-1]), "rung": rung, "run": run_number}
    outcomes = []
    for i, trial in enumerate(batch):
        metrics = {name: tuple(score[i]) for name, score in scores.items()}
        outcomes.append(dataclasses.replace(trial, returns=metrics.pop("return"), metrics=metrics, member=i * seeds, **about))
    return outcomes


def joined(experiment: Experiment, parts: Sequence[tuple[Result, int]]) -> Result:
    """Combines members of `parts`, runs with the index of a trial's first member, into one run with one row of history."""
    first_run = parts[0][0]
    if not first_run.has_members:
        return first_run

    def cut(run: Result) -> Result:
        return dataclasses.replace(run, history={name: column[-1:] for name, column in run.history.items()})

    return join_members([(cut(run), slice(member, member + first_run.seeds)) for run, member in parts], experiment)


def _move_to_host(result: Result) -> Result:
    """Moves the state of a result to the host, which frees the devices for the next run."""
    if all(device.platform == "cpu" for leaf in jax.tree.leaves(result.run_state) for device in leaf.devices()):
        return result
    return dataclasses.replace(result, run_state=jax.device_put(result.run_state, jax.local_devices(backend="cpu")[0]))
