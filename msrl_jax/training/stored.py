"""Results as folders: what `Result.save` writes and `Result.load` reads."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from msrl_jax.envs import Environment
from msrl_jax.envs.params import GivenParams
from msrl_jax.training import checkpoint, folder, resume
from msrl_jax.training.history import Row, stack_rows
from msrl_jax.training.run import TIMINGS
from msrl_jax.training.setup import resolve

Result: TypeAlias = Any
"""A `msrl_jax.Result`, whose methods call this module."""


def save(result: Result, path: Path) -> Path:
    """Writes a result to a new folder, at once as a whole.

    Args:
      result: the result of a run.
      path: a folder that does not exist or is empty.

    Returns:
      The folder.

    Raises:
      ValueError: if `path` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; name another one, or delete it first")
    beside = path.with_name(f".{path.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    folder.write_json(beside / folder.CONFIG, result.description)
    count = len(result.history.get("step", ()))
    folder.append_rows(beside, [{name: column[i] for name, column in result.history.items()} for i in range(count)])
    iteration = int(result.history["iteration"][-1]) if count else 0
    progress = {
        "rows": count, "evaluation": result.evaluation, "registers": result.description.get("registers", {}),
        "recorded": None, "wall_seconds": result.wall_seconds, "compile_seconds": result.compile_seconds,
        **{name: result.timings.get(name, 0.0) for name in TIMINGS},
    }  # fmt: skip
    writer = checkpoint.CheckpointWriter(beside, keep=1)
    try:
        writer.save(iteration, result.behavior.agent.without_data(result.state), result.registers, progress, None)
        writer.wait()
    finally:
        writer.close()
    finish(result, beside)
    os.replace(beside, path)
    return path


def finish(result: Result, path: Path) -> None:
    """Adds the evaluation and the summary to the folder of a run."""
    if result.evaluation is not None:
        folder.write_json(path / folder.EVALUATION, result.evaluation, indent=None)
    folder.write_json(path / folder.SUMMARY, result.summary())


@contextlib.contextmanager
def _not_needed(what: str) -> Iterator[None]:
    """Warns of a damaged file without which an agent can act."""
    try:
        yield
    except folder.RunFolderError as error:
        reason = str(error).partition(";")[0]
        warnings.warn(f"{reason}; {what} is left out", resume.ResumeWarning, stacklevel=3)


def load(
    path: Path, env: Environment | None, env_params: GivenParams | None, which: Literal["newest", "best"] | int
) -> dict[str, Any]:
    """Reads a run from its folder.

    Args:
      path: the folder.
      env: the environment, if the run got an environment object.
      env_params: what its parameters are drawn from, if the run got a function or a `Curriculum`.
      which: the checkpoint.

    Returns:
      The fields of the result.

    Raises:
      RunFolderError: a ValueError, if the folder holds no run, a damaged one, or one that this version cannot read.
    """
    description = resume.read_description(path)
    if env is None and description["env_spec"] is None:
        raise folder.RunFolderError(
            f"the run in {path} was trained on an environment object ({description['env']}); give it again: "
            "Result.load(path, env=...)"
        )
    setup = resolve(
        description["algorithm"], env or description["env_spec"], seed=description["seed"], seeds=description["seeds"],
        config=resume.config_of(description), settings=description.get("settings"), pbt=description.get("pbt"),
        env_params=resume.env_params_of(description, env_params, f"the run in {path}"),
    )  # fmt: skip
    saved, state, registers = resume.load_agent(path, which, setup)
    resume.check_settings(path, description, saved)
    progress = saved.progress
    summary: dict[str, Any] = {}
    if (path / folder.SUMMARY).exists() and which == "newest":
        with _not_needed("the outcome of the run"):
            summary = folder.read_json(path / folder.SUMMARY, "status", "compile_seconds", "wall_seconds", "total_steps")
    steps = saved.iteration * setup.behavior.agent.steps_per_iteration
    if summary and summary["status"] != "diverged" and summary["total_steps"] != steps:
        summary = {}  # of a later checkpoint, which is damaged
    rows: list[Row] = []
    with _not_needed("the history of the run"):
        rows = folder.read_rows(path, progress["rows"])
    return {
        "history": stack_rows(rows),
        "config": setup.config,
        "state": state,
        "status": summary.get("status", "unfinished"),
        "stop_reason": summary.get("stop_reason", ""),
        "compile_seconds": summary.get("compile_seconds", progress["compile_seconds"]),
        "wall_seconds": summary.get("wall_seconds", progress["wall_seconds"]),
        "timings": {name: value for name in TIMINGS if (value := summary.get(name, progress.get(name))) is not None},
        "evaluation": resume.read_evaluation(progress["evaluation"]),
        "description": description,
        "behavior": setup.behavior,
        "registers": registers,
        "folder": path,
    }
