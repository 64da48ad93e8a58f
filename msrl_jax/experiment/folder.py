"""A run on disk: a folder of plain files beside checkpoints.

    config.json      the settings: algorithm, environment, policy, seed, every config field, versions, devices
    run.toml         the file with which the command line repeats the run, see `repeating`
    metrics.jsonl    one row per chunk; metrics.csv holds the same
    checkpoints/     the whole state of the run at several times, see `checkpoint`
    summary.json     the outcome of the run
    evaluation.json  every episode of the last evaluation, if there was one
    lock             held by the process that writes to the folder

Rows and checkpoints are written during the run, and the config with the first of them, so that a run that fails to compile
leaves the folder free for the next run. The rest is written at the end.
"""

import contextlib
import csv
import dataclasses
import fcntl
import importlib.metadata
import io
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax._checks import parse_json, replacing, writing
from msrl_jax.algorithms.fields import is_option, text
from msrl_jax.data import Dataset
from msrl_jax.experiment.history import Row, scalars

CONFIG, REPEAT, ROWS, TABLE = "config.json", "run.toml", "metrics.jsonl", "metrics.csv"
SUMMARY, EVALUATION, LOCK = "summary.json", "evaluation.json", "lock"
CHECKPOINTS = "checkpoints"
_WRITTEN = (REPEAT, TABLE, SUMMARY, EVALUATION, LOCK)
_COUNTS = ("step", "iteration")  # what every row has
_PACKAGES = ("msrl-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "orbax-checkpoint", "numpy")


class RunFolderError(ValueError):
    """A folder holds no run, a damaged one, another one than expected, or one that another process writes to."""


class NotSavedError(OSError):
    """A run could not be saved in its folder, where something else would read it."""


class SaveWarning(UserWarning):
    """Something could not be saved; the run goes on."""


def versions(*more: str) -> dict[str, str]:
    """The versions of Python and of every package that affects a run's numbers; of those `more` that are installed, too."""
    found = {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in _PACKAGES}
    for package in more:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def describe_devices(devices: Sequence[Any]) -> dict[str, Any]:
    """Platform, kind and number of the devices in use, and the settings of JAX and XLA that change the last bits of numbers."""
    config: Any = jax.config
    return {
        "platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices),
        "processes": len({d.process_index for d in devices}),
        "matmul_precision": config.jax_default_matmul_precision or "default", "x64": config.jax_enable_x64,
        "threefry_partitionable": config.jax_threefry_partitionable, "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }  # fmt: skip


def to_json(value: Any) -> Any:
    """Converts a value to plain JSON data: arrays to lists, nan and infinities to null, data sets to descriptions."""
    if isinstance(value, Dataset):
        value = value.describe()
    if is_option(value):
        return text(value, whole=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, np.floating):  # an item of a long one is long, too
        value = float(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return to_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def check_target(what: str, path: Path, suffixes: Sequence[str]) -> None:
    """Raises ValueError if a file cannot be written there, or its suffix is none of these, before it is made."""
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"the {what} {path}: name a file that ends in {' or '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"the {what} {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the {what} {path}: there is no folder {path.absolute().parent}; make it first")


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Writes a JSON file."""
    write_text(path, json.dumps(to_json(value), indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file."""
    with replacing(path) as partial:
        partial.write_text(text, "utf-8", "replace", newline="")


def check_free(path: Path, what: str = "run", files: Sequence[str] = (CONFIG, ROWS, SUMMARY, CHECKPOINTS)) -> None:
    """Raises RunFolderError if `path` holds a run, which has some of these files, or other files; hidden ones do not count."""
    if taken := [name for name in files if (path / name).exists()]:
        raise RunFolderError(
            f"the folder {path} already holds a {what} ({taken[0]}); go on with it (resume=True, or --resume), name another "
            "folder, or delete it first"
        )
    if others := sorted(p.name for p in path.glob("[!.]*") if p.name != LOCK):
        some = ", ".join(others[:3])
        raise RunFolderError(f"the folder {path} holds other files, no {what} ({some}); name a new or empty folder")


def check_links(path: Path, names: Sequence[str]) -> None:
    """Raises RunFolderError if one of these in a folder is a symbolic link: what is written or deleted would be elsewhere."""
    if links := [path / name for name in names if (path / name).is_symlink()]:
        raise RunFolderError(f"{links[0]} is a link, and what is written there would change other files; put it there itself")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Creates a run's folder, and keeps other processes from writing to it; the system ends the lock with the process."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file; name a folder for the run")
    saved = [f"{CHECKPOINTS}/{each.name}" for each in (path / CHECKPOINTS).glob("*")]
    check_links(path, (*_WRITTEN, ROWS, CHECKPOINTS, *saved))
    if folders := [path / name for name in _WRITTEN if (path / name).is_dir()]:
        raise RunFolderError(f"{folders[0]} is a folder, where a run has a file; move it away, or name another folder")
    new = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    lock = path / LOCK

    def remove_empty() -> None:  # a run that wrote nothing leaves no trace
        with contextlib.suppress(OSError):
            for folder in new:
                folder.rmdir()

    with contextlib.ExitStack() as stack:
        stack.callback(remove_empty)
        with writing(lock):
            file = stack.enter_context(lock.open("ab+", buffering=0))  # nothing is left for its end to write
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock.exists() or os.stat(lock).st_ino != os.fstat(file.fileno()).st_ino:
                raise BlockingIOError  # its owner has just removed it, and a third process may have made another one
        except BlockingIOError:
            file.seek(0)
            owner = file.read().decode(errors="replace").strip() or "unknown"
            raise RunFolderError(
                f"another process writes to the run in {path} ({owner}); wait for its end, stop it, or name another folder"
            ) from None
        stack.callback(lock.unlink, missing_ok=True)
        with writing(lock):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n".encode())
        yield


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Appends rows of the history to `metrics.jsonl`; a file that cannot take them all keeps its size."""
    file = path / ROWS
    size = file.stat().st_size if file.exists() else 0
    try:
        with writing(file), file.open("a", newline="") as lines:
            lines.write("".join(json.dumps(to_json(row)) + "\n" for row in rows))
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(file, size)
        raise


def write_table(path: Path) -> None:
    """Writes the rows of `metrics.jsonl` to `metrics.csv`."""
    write_csv(path / TABLE, [scalars(row) | {name: int(row[name]) for name in _COUNTS} for row in read_rows(path)])


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a CSV file, in which nan and what a row lacks are empty cells, as `write_json` does."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), restval="")
    table.writeheader()
    table.writerows({k: "" if isinstance(x, float) and math.isnan(x) else x for k, x in row.items()} for row in rows)
    with replacing(path) as partial:
        partial.write_text(text.getvalue(), newline="")


def rewind_rows(path: Path, count: int) -> None:
    """Removes the rows of a killed run that are newer than its checkpoint."""
    file = path / ROWS
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    with replacing(file) as partial:
        partial.write_text("".join(lines[:count]), newline="")


def read_rows(path: Path, count: int | None = None) -> list[Row]:
    """Reads the rows of `metrics.jsonl` in a run's folder: the first ones that a checkpoint counts, or all that are whole."""
    file = path / ROWS
    try:
        lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []  # the last line is empty, or cut off
    except OSError as error:
        raise RunFolderError(f"{file} cannot be read ({error}); restore the file, or start a new run") from error
    rows: list[Row] = []
    for number, line in enumerate(lines[:count], 1):
        try:
            row = {name: _from_json(value) for name, value in parse_json(line).items()}
            if not all(isinstance(row.get(name), int | float) for name in _COUNTS) or not all(map(_is_number, row.values())):
                raise ValueError
            if rows and any(row[name] <= rows[-1][name] for name in _COUNTS):
                raise ValueError
            if rows and any(np.shape(value) != np.shape(rows[0].get(name, value)) for name, value in row.items()):
                raise ValueError
        except (ValueError, AttributeError):
            raise RunFolderError(f"line {number} of {file} is damaged; restore the file, or start a new run") from None
        rows.append(row)
    if count is not None and len(rows) < count:
        raise RunFolderError(
            f"{file} has fewer rows than the {count} that the checkpoint counts; restore the file, or start a new run"
        )
    return rows


def _is_number(value: Any) -> bool:
    return np.asarray(value).dtype.kind in "biuf"


def _from_json(value: Any) -> float | np.ndarray:
    if isinstance(value, list):
        return np.array([math.nan if x is None else x for x in value])
    return math.nan if value is None else value


def read_json(path: Path, *fields: str) -> dict[str, Any]:
    """Reads a JSON file of a run's folder."""
    if not path.exists():
        raise RunFolderError(f"{path.parent} holds no run: {path.name} is missing")
    try:
        content = parse_json(path.read_text())
    except (ValueError, OSError) as error:
        raise RunFolderError(f"{path} is damaged ({error}); restore the file, or start a new run") from None
    lacking = [name for name in fields if not isinstance(content, dict) or name not in content]
    if lacking:
        raise RunFolderError(f"{path} lacks {lacking[0]!r}: it is damaged, or another version wrote it; start a new run")
    return content
