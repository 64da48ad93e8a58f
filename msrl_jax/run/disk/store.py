"""Run folders: their content, how a run resumes from one, and what `Result.save` writes and `Result.load` reads."""

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import numpy as np

from msrl_jax.agents import schedules
from msrl_jax.configs.deferred import is_deferred
from msrl_jax.configs.names import tunable_fields, value_of
from msrl_jax.data.experience import with_empty_rows, without_experience, without_rows
from msrl_jax.envs import Environment
from msrl_jax.envs.base import PyTree
from msrl_jax.envs.params import GivenParams
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.runtime.state_layout import Delayed
from msrl_jax.registry import resolve
from msrl_jax.run import processes
from msrl_jax.run.disk import checkpoint, folder
from msrl_jax.run.disk.checkpoint import Checkpoint, CheckpointError
from msrl_jax.run.disk.folder import TIMINGS, NotSavedError, SaveWarning
from msrl_jax.run.disk.run_toml import repeating
from msrl_jax.run.evaluation.evaluate import Evaluation
from msrl_jax.run.evaluation.history import NO_EPISODES, LastEpisodes, Row, stack_rows
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.plain_data import RunFolderError, fingerprint

T = TypeVar("T")
Result: TypeAlias = Any  # a `msrl_jax.Result`, whose methods call this module

FORMAT = 2  # the version of the format of run folders, stored in `config.json`
_TRIES = 10  # how often to try to read a checkpoint that a running process deletes at the same time

_KINDS = {"text": str, "an integer": int, "an object": dict, "a list": list, "null": type(None)}
_FIELDS = {  # the content of every `config.json`, by names of types
    "text": ("algorithm", "env", "class", "policy", "rank_by", "guard"),
    "text or null": ("env_spec", "env_object", "record"),
    "an object, text or null": ("env_params",),
    "an integer": ("seed", "seeds", "total_steps", "eval_episodes"),
    "an integer or null": ("eval_every", "chunk"),
    "an object": ("config",),
    "an object or null": ("settings", "pbt"),
    "a list": ("rollbacks", "resumed"),
}


class ResumeWarning(UserWarning):
    """A run resumes, but not from its newest checkpoint, or not exactly as before."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A run in a folder."""

    path: Path
    description: dict[str, Any]  # the content of `config.json`
    checkpoint: Checkpoint | None  # the newest intact one; None if the run was killed before its first one

    @property
    def iteration(self) -> int:
        """The number of iterations at the checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.iteration


def _warn_of_resume(text: str) -> None:
    warnings.warn(text, ResumeWarning, stacklevel=3)


def holds_run(path: Path) -> bool:
    """Returns whether a folder holds a run that was started."""
    return (path / folder.CONFIG).exists() or bool(checkpoint.complete_checkpoints(path))


def read_description(path: Path) -> dict[str, Any]:
    """Reads `config.json`; raises RunFolderError if the folder holds no run, a damaged one, or one of another version."""
    if not path.is_dir():
        raise RunFolderError(f"the folder {path} does not exist; give the folder of a run")
    file = path / folder.CONFIG
    content = folder.read_json(file)
    version = content.get("format") if isinstance(content, dict) else None
    if version != FORMAT and isinstance(content, dict) and "versions" in content:
        writer = "version 0.1" if version is None else "a newer version"
        raise RunFolderError(
            f"the run in {path} was saved by {writer} of msrl_jax, which this version cannot read; start a new run"
        )
    content = folder.read_json(file, *itertools.chain(*_FIELDS.values()))
    for kind, names in _FIELDS.items():
        kinds = tuple(_KINDS[word] for word in re.split(", | or ", kind))
        for name in names:
            if isinstance(value := content[name], bool) or not isinstance(value, kinds):
                raise RunFolderError(
                    f"{file}: {name!r} is {value!r}, and should be {kind}; restore the file, or start a new run"
                )
    return content


def choose_checkpoint(path: Path, which: Literal["newest", "best"] | int) -> Checkpoint:
    """Finds an intact checkpoint of a run: "newest", "best", or the one after a number of iterations."""
    checkpoints = [c for c in checkpoint.complete_checkpoints(path) if c.is_readable]
    chosen_checkpoint = (
        checkpoint.best(checkpoints) if which == "best" else next((c for c in checkpoints if c.iteration == which), None)
    )
    if which == "newest":
        chosen_checkpoint = checkpoint.newest(path, _warn_of_resume)
    elif chosen_checkpoint is not None:
        checkpoint.verify(chosen_checkpoint)
    if chosen_checkpoint is None:
        iterations = ", ".join(str(c.iteration) for c in reversed(checkpoints))
        reason = "none is complete. A run writes its first checkpoint after a minute (checkpoint_every)"
        if checkpoints and which == "best":
            reason = (
                f"none of those after iterations {iterations} has a score: none was evaluated (eval_every), no training "
                "episode had ended, or returns do not rank agents (teams that oppose each other); use 'newest'"
            )
        elif checkpoints:
            reason = f"those after iterations {iterations} are complete"
        raise CheckpointError(f"{path} has no checkpoint {which!r}: {reason}")
    return chosen_checkpoint


def open_run(path: Path) -> Saved:
    """Reads the settings of a run, and finds its newest intact checkpoint; raises RunFolderError if the run does not exist."""
    description, newest = read_description(path), checkpoint.newest(path, _warn_of_resume)
    if newest is None and (path / folder.SUMMARY).exists():
        raise CheckpointError(
            f"the run in {path} has ended, but its checkpoints are gone; restore {folder.CHECKPOINTS}, or start a new run in "
            "another folder"
        )
    if newest is None and (path / folder.ROWS).exists():
        _warn_of_resume(f"the run in {path} has no checkpoint yet, and starts again from its seed")
    if newest is not None:
        _check_settings(path, description, newest)
    return Saved(path, description, newest)


def _check_settings(path: Path, description: Mapping[str, Any], saved_checkpoint: Checkpoint) -> None:
    """Raises RunFolderError if `config.json` differs from the settings with which the run was saved."""
    is_same = saved_checkpoint.progress.get("settings") == fingerprint(description)
    if not is_same and saved_checkpoint.progress.get("rollbacks") == len(description["rollbacks"]):
        raise RunFolderError(f"{path / folder.CONFIG} is not what the run was saved with; restore the file, or start a new run")


def _register_positions(saved_checkpoint: Checkpoint, state: PyTree) -> list[int]:
    """Returns the positions of the state's leaves that the registers of a checkpoint hold, in the order of the registers."""
    names, depths = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)],
        saved_checkpoint.progress["registers"],
    )
    if unknown_names := [name for name in depths if name not in names]:
        raise CheckpointError(
            f"the checkpoint {saved_checkpoint.path} holds registers of state{unknown_names[0]}, which this version does not "
            "have"
        )
    return [names.index(name) for name, depth in depths.items() for _ in range(depth)]


def restore_state(saved_checkpoint: Checkpoint, experiment: Experiment, program: Program) -> PyTree:
    """Loads the state of a run onto the devices of a program, under any policy, in the form that `Program.run` takes."""
    agent = experiment.agent
    full_types = jax.eval_shape(experiment.initial_state)
    state_shardings, register_shardings = program.shardings
    types = agent.without_data(without_rows(full_types))
    shardings = jax.tree.leaves(agent.without_data(without_rows(state_shardings)))
    register_leaves, depths, leaves = (
        _register_positions(saved_checkpoint, types),
        saved_checkpoint.progress["registers"],
        jax.tree.leaves(types),
    )
    has_same_registers = depths == program.registers
    if not has_same_registers:
        old_depth, new_depth = (max(depth_by_name.values(), default=0) for depth_by_name in (depths, program.registers))
        consequence = f"and are now {new_depth}: the run resumes from its newest parameters"
        _warn_of_resume(f"the parameters of the actors were {old_depth} iterations old, {consequence}")
    shardings = [*shardings, *(register_shardings if has_same_registers else [shardings[i] for i in register_leaves])]
    if jax.process_count() > 1:  # each process reads the checkpoint, and the program takes the parts for its devices
        shardings = None
    state, registers = checkpoint.load_checkpoint(saved_checkpoint, types, [leaves[i] for i in register_leaves], shardings)
    state = agent.with_data(with_empty_rows(state, agent.without_data(full_types)))
    return Delayed(state, registers) if has_same_registers and registers else state


def take_over(saved: Saved, run: Any) -> None:
    """Restores the host's part of a run's state, and removes everything that is newer than its checkpoint."""
    progress = {} if saved.checkpoint is None else saved.checkpoint.progress
    count = progress.get("rows", 0)
    with processes.together("reading the history"):
        run.rows = folder.read_rows(saved.path, count)
    with processes.together("removing what is newer than the checkpoint"):
        if processes.is_first():
            for name in (folder.SUMMARY, folder.EVALUATION, folder.TABLE):
                (saved.path / name).unlink(missing_ok=True)
            folder.rewind_rows(saved.path, count)
    if saved.checkpoint is None:
        return
    run.iteration = run.resumed_iteration = saved.checkpoint.iteration
    run.evaluation = read_evaluation(progress["evaluation"])
    run.last_episodes = LastEpisodes(
        **{name: np.array(values, np.float64) for name, values in progress["last_episodes"].items()}
    )
    run.started -= progress["wall_seconds"]
    run.compiled_before = progress["compile_seconds"]
    for name in run.seconds:
        run.seconds[name] += progress[name]


def warn_of_schedules(saved: Saved, experiment: Experiment, step: int) -> None:
    """Warns about what happens to schedules over `total_steps` when `total_steps` changes."""
    config, old_total, new_total = experiment.algorithm, saved.description["total_steps"], experiment.total_steps
    learning_rate, text, scheduled = getattr(config, "learning_rate", None), "", schedules.given(config)
    falls = getattr(config, "anneal_learning_rate", False)  # a field of the config, or of one of several teams
    fixed = is_deferred(learning_rate) or resolve.is_custom_optimizer(getattr(config, "optimizer", "adam"))
    falls = falls and not fixed
    beta = "replay.priorities.beta"
    rises = beta in tunable_fields(config) and value_of(config, beta) is not None and beta not in scheduled
    if old_total == new_total or not (falls or rises or scheduled):
        return
    names = " and ".join(["the learning rate"] * bool(falls) + [beta] * bool(rises) + list(scheduled))
    if falls and learning_rate is not None:
        text = (
            f": it continues from {learning_rate * (1 - step / new_total):.3g}, "
            f"after {max(0.0, learning_rate * (1 - step / old_total)):.3g}"
        )
    _warn_of_resume(
        f"total_steps changes from {old_total:,} to {new_total:,}, which rescales the schedule of {names}{text}. "
        f"A new run of {new_total:,} steps would give another result"
    )


def progress_of(
    description: Mapping[str, Any],
    rows: int,
    evaluation: Evaluation | None,
    times: Mapping[str, float],
    last_episodes: LastEpisodes = NO_EPISODES,
    recorded: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns the host's part of a run's state, as stored in a checkpoint."""
    return {
        "settings": fingerprint(description),
        "rollbacks": len(description["rollbacks"]),
        "rows": rows,
        "registers": description["registers"],
        "last_episodes": dataclasses.asdict(last_episodes),
        "recorded": recorded,
        "evaluation": evaluation,
        **times,
    }


def save(result: Result, path: Path) -> Path:
    """Writes a result to a new folder, atomically; raises ValueError if the folder exists and is not empty."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; name another one, or delete it first")
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    folder.write_json(partial / folder.CONFIG, result.description)
    folder.write_text(partial / folder.REPEAT, repeating(result.experiment, result.description))
    count = len(result.history["step"])
    folder.append_rows(partial, ({name: column[i] for name, column in result.history.items()} for i in range(count)))
    timings = {name: result.timings.get(name, 0.0) for name in TIMINGS}
    times = {"wall_seconds": result.wall_seconds, "compile_seconds": result.compile_seconds, **timings}
    progress = progress_of(result.description, count, result.evaluation, times)
    writer = checkpoint.CheckpointWriter(partial, keep=1)
    try:
        iteration = int(result.history["iteration"][-1]) if count else 0
        writer.save(iteration, result.behavior.agent.without_data(result.run_state), result.registers, progress, None)
        writer.wait()
    finally:
        writer.close()
    finish(result, partial)
    os.replace(partial, path)
    return path


def finish(result: Result, path: Path) -> None:
    """Adds the table, the evaluation and the summary to the folder of a run."""
    folder.write_table(path)
    if result.evaluation is not None:
        folder.write_json(path / folder.EVALUATION, result.evaluation, indent=None)
    folder.write_json(path / folder.SUMMARY, result.summary())


def complete_folder(result: Result, path: Path, error: OSError | None) -> Result:
    """Completes the folder of a run; if that fails, saves the run to another folder, warns, and notes it in the result."""
    try:
        if error is not None:
            raise error
        if not (path / folder.CONFIG).exists():
            raise FileNotFoundError(f"its {folder.CONFIG} was deleted")
        finish(result, path)
        return result
    except OSError as problem:
        error = problem
    other: Path | None = None
    try:
        other = Path(tempfile.mkdtemp(prefix=f"msrl-jax-{path.name}-")) / path.name
        result.save(other)
        text = f"the run could not be saved in {path} ({error}); it is saved in {other}"
    except OSError as problem:
        where = "a folder for temporary files" if other is None else other
        places = f"neither in {path} ({error}) nor in {where} ({problem})"
        text = f"the run could be saved {places}; only the result in memory has it"
        if other is not None:
            shutil.rmtree(other.parent, ignore_errors=True)
        other = None
    warnings.warn(text, SaveWarning, stacklevel=3)
    return dataclasses.replace(result, folder=other, save_error=str(error))


def check_saved(result: Result) -> Result:
    """Returns the result; raises NotSavedError if its run is not in its own folder, from which others read it."""
    if result.save_error:
        raise NotSavedError(f"a run could not be saved: {result.save_error}; free disk space, then resume the saved part")
    return result


@contextlib.contextmanager
def _warn_if_damaged(file_content: str) -> Iterator[None]:
    """Warns about a damaged file that an agent does not need to act."""
    try:
        yield
    except RunFolderError as error:
        warnings.warn(f"{str(error).partition(';')[0]}; {file_content} is left out", ResumeWarning, stacklevel=3)


def load(
    path: Path,
    env: Environment | str | None,
    env_params: GivenParams | None,
    which: Literal["newest", "best"] | int,
    objects: Mapping[str, Any],
    trust: bool,
) -> dict[str, Any]:
    """Reads the fields of a result from its folder, to which another process may be writing, with the state on one device;
    see `Result.load`."""
    description = read_description(path)
    where = f"the run in {path}"
    experiment = Experiment.from_json(description, env=env, env_params=env_params, where=where, trust=trust, **objects)

    def read_checkpoint() -> tuple[Checkpoint, PyTree, tuple[jax.Array, ...]]:
        saved_checkpoint = choose_checkpoint(path, which)
        is_recorded = saved_checkpoint.progress["recorded"] is not None and experiment.recorded_steps is None
        recorded_experiment = experiment.record(1) if is_recorded else experiment
        types = recorded_experiment.agent.without_data(without_rows(jax.eval_shape(recorded_experiment.initial_state)))
        leaves = jax.tree.leaves(types)
        state, registers = checkpoint.load_checkpoint(
            saved_checkpoint, types, [leaves[i] for i in _register_positions(saved_checkpoint, types)]
        )
        return saved_checkpoint, without_experience(state), registers

    saved_checkpoint, state, registers = _retry_while_replaced(path, read_checkpoint)
    is_newest = which == "newest" or saved_checkpoint.iteration == max(
        c.iteration for c in checkpoint.complete_checkpoints(path)
    )
    outcome = _read_outcome(path, description, saved_checkpoint, is_newest=is_newest)
    return outcome | {"experiment": experiment, "run_state": state, "registers": registers}


def read_outcome(path: Path) -> dict[str, Any]:
    """Reads the fields of an `Outcome` from the folder of a run, to which another process may be writing."""
    description = read_description(path)
    return _read_outcome(
        path, description, _retry_while_replaced(path, lambda: choose_checkpoint(path, "newest")), is_newest=True
    )


def _read_outcome(
    path: Path, description: Mapping[str, Any], saved_checkpoint: Checkpoint, *, is_newest: bool
) -> dict[str, Any]:
    """Reads the fields of an `Outcome` up to a checkpoint."""
    _check_settings(path, description, saved_checkpoint)
    progress = saved_checkpoint.progress
    summary: dict[str, Any] = {}
    if (path / folder.SUMMARY).exists() and is_newest:
        with _warn_if_damaged("the outcome of the run"):
            summary = folder.read_json(path / folder.SUMMARY, "status", "compile_seconds", "wall_seconds", "total_steps")
    rows: list[Row] | None = None
    with _warn_if_damaged("the history of the run"):
        rows = folder.read_rows(path, progress["rows"])
    steps = None if rows is None else rows[-1]["step"] if rows else 0
    if summary and summary["status"] != "diverged" and steps not in (None, summary["total_steps"]):
        summary = {}  # it belongs to a later checkpoint, which is damaged
    status = summary.get("status", "unfinished" if is_newest else "earlier checkpoint")
    times = {name: summary.get(name, progress[name]) for name in ("compile_seconds", "wall_seconds")}
    return times | {
        "description": description,
        "history": stack_rows(rows or [], description),
        "status": status,
        "stop_reason": summary.get("stop_reason", ""),
        "timings": {name: value for name in TIMINGS if (value := summary.get(name, progress.get(name))) is not None},
        "evaluation": read_evaluation(progress["evaluation"]),
        "folder": path,
    }


def _retry_while_replaced(path: Path, read_checkpoint: Callable[[], T]) -> T:
    """Reads a checkpoint; retries if the process that writes checkpoints has just deleted it."""
    for _ in range(_TRIES):
        checkpoints = checkpoint.complete_checkpoints(path)
        try:
            return read_checkpoint()
        except CheckpointError:
            if checkpoint.complete_checkpoints(path) == checkpoints:
                raise
    raise CheckpointError(f"the checkpoints of the run in {path} are replaced faster than they can be read; try again later")


def read_evaluation(episodes: Mapping[str, Any] | None) -> Evaluation | None:
    """Rebuilds an evaluation from plain data."""
    if episodes is None:
        return None
    dtypes = {"returns": np.float32, "lengths": np.int32, "finished": np.bool_, "agent_returns": np.float32}
    fields: Any = {
        name: np.asarray(values, dtypes[name]) for name, values in episodes.items() if name in dtypes and values is not None
    }
    metrics_by_name: Any = {
        field: {name: np.asarray(values, np.float32) for name, values in episodes.get(field, {}).items()}
        for field in ("team_returns", "metrics")
    }
    return Evaluation(**fields, **metrics_by_name)
