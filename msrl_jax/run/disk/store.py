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
from msrl_jax.data.experience import attached, detached, without_experience
from msrl_jax.envs import Environment
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
from msrl_jax.run.experiment.plain_data import RunFolderError, fingerprint
from msrl_jax.run.experiment.spec import Experiment

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


def _note(text: str) -> None:
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
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT and isinstance(content, dict) and "versions" in content:
        by = "version 0.1" if found is None else "a newer version"
        raise RunFolderError(
            f"the run in {path} was saved by {by} of msrl_jax, which this version cannot read; start a new run"
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


def choose_checkpoint(path: Path, which: Any) -> Checkpoint:
    """Finds an intact checkpoint of a run: "newest", "best", or the one after a number of iterations."""
    found = [c for c in checkpoint.complete_checkpoints(path) if c.is_readable]
    chosen = checkpoint.best(found) if which == "best" else next((c for c in found if c.iteration == which), None)
    if which == "newest":
        chosen = checkpoint.newest(path, _note)
    elif chosen is not None:
        checkpoint.verify(chosen)
    if chosen is None:
        has = ", ".join(str(c.iteration) for c in reversed(found))
        why = "none is complete. A run writes its first checkpoint after a minute (checkpoint_every)"
        if found and which == "best":
            why = (
                f"none of those after iterations {has} has a score: none was evaluated (eval_every), no training episode had "
                "ended, or returns do not rank agents (teams that oppose each other); use 'newest'"
            )
        elif found:
            why = f"those after iterations {has} are complete"
        raise CheckpointError(f"{path} has no checkpoint {which!r}: {why}")
    return chosen


def open_run(path: Path) -> Saved:
    """Reads the settings of a run, and finds its newest intact checkpoint; raises RunFolderError if the run does not exist."""
    description, found = read_description(path), checkpoint.newest(path, _note)
    if found is None and (path / folder.SUMMARY).exists():
        raise CheckpointError(
            f"the run in {path} has ended, but its checkpoints are gone; restore {folder.CHECKPOINTS}, or start a new run in "
            "another folder"
        )
    if found is None and (path / folder.ROWS).exists():
        _note(f"the run in {path} has no checkpoint yet, and starts again from its seed")
    if found is not None:
        _check_settings(path, description, found)
    return Saved(path, description, found)


def _check_settings(path: Path, description: Mapping[str, Any], saved: Checkpoint) -> None:
    """Raises RunFolderError if `config.json` differs from the settings with which the run was saved."""
    same = saved.progress.get("settings") == fingerprint(description)
    if not same and saved.progress.get("rollbacks") == len(description["rollbacks"]):
        raise RunFolderError(f"{path / folder.CONFIG} is not what the run was saved with; restore the file, or start a new run")


def _registers(saved: Checkpoint, state: Any) -> list[int]:
    """Returns the positions of the state's leaves that the registers of a checkpoint hold, in the order of the registers."""
    names, depths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)], saved.progress["registers"]
    if unknown := [name for name in depths if name not in names]:
        raise CheckpointError(
            f"the checkpoint {saved.path} holds registers of state{unknown[0]}, which this version does not have"
        )
    return [names.index(name) for name, depth in depths.items() for _ in range(depth)]


def restore_state(saved: Checkpoint, experiment: Experiment, program: Program) -> Any:
    """Loads the state of a run onto the devices of a program, under any policy, in the form that `Program.run` takes."""
    agent = experiment.agent
    full = jax.eval_shape(experiment.initial_state)
    places, register_places = program.shardings
    like = agent.without_data(detached(full))
    to = jax.tree.leaves(agent.without_data(detached(places)))
    held, depths, leaves = _registers(saved, like), saved.progress["registers"], jax.tree.leaves(like)
    same = depths == program.registers
    if not same:
        old, new = (max(each.values(), default=0) for each in (depths, program.registers))
        now = f"and are now {new}: the run resumes from its newest parameters"
        _note(f"the parameters of the actors were {old} iterations old, {now}")
    to = [*to, *(register_places if same else [to[i] for i in held])]
    if jax.process_count() > 1:  # each process reads the checkpoint, and the program takes the parts for its devices
        to = None
    state, registers = checkpoint.load_checkpoint(saved, like, [leaves[i] for i in held], to)
    state = agent.with_data(attached(state, agent.without_data(full)))
    return Delayed(state, registers) if same and registers else state


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
    run.iteration = run.resumed_from = saved.checkpoint.iteration
    run.evaluation = read_evaluation(progress["evaluation"])
    run.last_episodes = LastEpisodes(**{name: np.array(x, np.float64) for name, x in progress["last_episodes"].items()})
    run.started -= progress["wall_seconds"]
    run.compiled_before = progress["compile_seconds"]
    for name in run.seconds:
        run.seconds[name] += progress[name]


def warn_of_schedules(saved: Saved, experiment: Experiment, done: int) -> None:
    """Warns about what happens to schedules over `total_steps` when `total_steps` changes."""
    config, was, now = experiment.algorithm, saved.description["total_steps"], experiment.total_steps
    rate, text, own = getattr(config, "learning_rate", None), "", schedules.given(config)
    falls = getattr(config, "anneal_learning_rate", False)  # a field of the config, or of one of several teams
    fixed = is_deferred(rate) or resolve.is_custom_optimizer(getattr(config, "optimizer", "adam"))
    falls = falls and not fixed
    beta = "replay.priorities.beta"
    rises = beta in tunable_fields(config) and value_of(config, beta) is not None and beta not in own
    if was == now or not (falls or rises or own):
        return
    what = " and ".join(["the learning rate"] * bool(falls) + [beta] * bool(rises) + list(own))
    if falls and rate is not None:
        text = f": it continues from {rate * (1 - done / now):.3g}, after {max(0.0, rate * (1 - done / was)):.3g}"
    _note(
        f"total_steps changes from {was:,} to {now:,}, which rescales the schedule of {what}{text}. "
        f"A new run of {now:,} steps would give another result"
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
def _not_needed(what: str) -> Iterator[None]:
    """Warns about a damaged file that an agent does not need to act."""
    try:
        yield
    except RunFolderError as error:
        warnings.warn(f"{str(error).partition(';')[0]}; {what} is left out", ResumeWarning, stacklevel=3)


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

    def read() -> tuple[Checkpoint, Any, tuple[jax.Array, ...]]:
        saved = choose_checkpoint(path, which)
        is_recorded = saved.progress["recorded"] is not None and experiment.recorded_steps is None
        whole = experiment.record(1) if is_recorded else experiment
        like = whole.agent.without_data(detached(jax.eval_shape(whole.initial_state)))
        leaves = jax.tree.leaves(like)
        state, registers = checkpoint.load_checkpoint(saved, like, [leaves[i] for i in _registers(saved, like)])
        return saved, without_experience(state), registers

    saved, state, registers = _while_replaced(path, read)
    is_newest = which == "newest" or saved.iteration == max(c.iteration for c in checkpoint.complete_checkpoints(path))
    told = _told(path, description, saved, is_newest=is_newest)
    return told | {"experiment": experiment, "run_state": state, "registers": registers}


def told(path: Path) -> dict[str, Any]:
    """Reads the fields of an `Outcome` from the folder of a run, to which another process may be writing."""
    description = read_description(path)
    return _told(path, description, _while_replaced(path, lambda: choose_checkpoint(path, "newest")), is_newest=True)


def _told(path: Path, description: Mapping[str, Any], saved: Checkpoint, *, is_newest: bool) -> dict[str, Any]:
    """Reads the fields of an `Outcome` up to a checkpoint."""
    _check_settings(path, description, saved)
    progress = saved.progress
    summary: dict[str, Any] = {}
    if (path / folder.SUMMARY).exists() and is_newest:
        with _not_needed("the outcome of the run"):
            summary = folder.read_json(path / folder.SUMMARY, "status", "compile_seconds", "wall_seconds", "total_steps")
    rows: list[Row] | None = None
    with _not_needed("the history of the run"):
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


def _while_replaced(path: Path, read: Callable[[], T]) -> T:
    """Reads a checkpoint; retries if the process that writes checkpoints has just deleted it."""
    for _ in range(_TRIES):
        before = checkpoint.complete_checkpoints(path)
        try:
            return read()
        except CheckpointError:
            if checkpoint.complete_checkpoints(path) == before:
                raise
    raise CheckpointError(f"the checkpoints of the run in {path} are replaced faster than they can be read; try again later")


def read_evaluation(episodes: Mapping[str, Any] | None) -> Evaluation | None:
    """Rebuilds an evaluation from plain data."""
    if episodes is None:
        return None
    dtypes = {"returns": np.float32, "lengths": np.int32, "finished": np.bool_, "agent_returns": np.float32}
    fields: Any = {name: np.asarray(x, dtypes[name]) for name, x in episodes.items() if name in dtypes and x is not None}
    named: Any = {
        field: {name: np.asarray(x, np.float32) for name, x in episodes.get(field, {}).items()}
        for field in ("team_returns", "metrics")
    }
    return Evaluation(**fields, **named)
