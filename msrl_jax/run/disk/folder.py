"""A run on disk: a folder of plain files and checkpoints.

    config.json      the settings: algorithm, environment, policy, seed, every config field, versions, devices
    run.toml         the file to repeat the run from the command line, see `run_toml.py`
    metrics.jsonl    one row per chunk; metrics.csv holds the same
    checkpoints/     the whole state of the run at several times, see `checkpoint.py`
    summary.json     the outcome of the run
    evaluation.json  every episode of the last evaluation, if there was one
    lock             held by the process that writes to the folder

Rows and checkpoints are written during the run. The config is written with the first of them, so that a run that fails to
compile leaves the folder free for the next run. The other files are written at the end.
"""

import contextlib
import csv
import fcntl
import importlib.metadata
import itertools
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax._files import parse_json, replacing, writing
from msrl_jax.run.evaluation.history import Row, scalars
from msrl_jax.run.experiment.plain_data import RunFolderError, to_json

CONFIG, REPEAT, ROWS, TABLE = "config.json", "run.toml", "metrics.jsonl", "metrics.csv"
SUMMARY, EVALUATION, LOCK = "summary.json", "evaluation.json", "lock"
CHECKPOINTS = "checkpoints"
TIMINGS = ("setup_seconds", "train_seconds", "evaluation_seconds")  # parts of a run's time, in addition to compilation
_WRITTEN = (REPEAT, TABLE, SUMMARY, EVALUATION, LOCK)
_COUNTS = ("step", "iteration")  # columns of every row
_PACKAGES = ("msrl-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "orbax-checkpoint", "numpy")


class NotSavedError(OSError):
    """A run could not be saved in its folder, from which something else would read it."""


class SaveWarning(UserWarning):
    """Something could not be saved; the run continues."""


def versions(*packages: str) -> dict[str, str]:
    """Returns the versions of Python, of all packages that affect a run's numbers, and of `packages`, if installed."""
    found_versions = {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in _PACKAGES}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found_versions[package] = importlib.metadata.version(package)
    return found_versions


def describe_devices(devices: Sequence[Any]) -> dict[str, Any]:
    """Describes the devices in use (platform, kind, number), and the JAX and XLA settings that affect the last bits."""
    config: Any = jax.config
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": len({d.process_index for d in devices}),
        "matmul_precision": config.jax_default_matmul_precision or "default",
        "x64": config.jax_enable_x64,
        "prng_impl": config.jax_default_prng_impl,
        "threefry_partitionable": config.jax_threefry_partitionable,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def check_target(kind: str, path: Path, suffixes: Sequence[str]) -> None:
    """Raises ValueError if a file cannot be written there, or has none of these suffixes; call it before making the file."""
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"the {kind} {path} must end in {' or '.join(suffixes)}; change its suffix")
    if path.is_dir():
        raise ValueError(f"the {kind} {path} is a folder; name a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"the {kind} {path}: the folder {path.absolute().parent} does not exist; create it first")


def write_json(path: Path, value: object, indent: int | None = 2) -> None:
    """Writes a JSON file."""
    write_text(path, json.dumps(to_json(value), indent=indent) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a text file."""
    with replacing(path) as partial:
        partial.write_text(text, "utf-8", "replace", newline="")


def check_free(path: Path, kind: str = "run", files: Sequence[str] = (CONFIG, ROWS, SUMMARY, CHECKPOINTS)) -> None:
    """Raises RunFolderError if `path` holds a run (some of these files) or other files; hidden files do not count."""
    if run_files := [name for name in files if (path / name).exists()]:
        raise RunFolderError(
            f"the folder {path} already holds a {kind} ({run_files[0]}); resume it (resume=True, or --resume), choose another "
            "folder, or delete it first"
        )
    if other_files := sorted(p.name for p in path.glob("[!.]*") if p.name != LOCK):
        examples = ", ".join(other_files[:3])
        raise RunFolderError(
            f"the folder {path} holds files that are not of a {kind} ({examples}); choose a new or empty folder"
        )


def check_links(path: Path, names: Sequence[str]) -> None:
    """Raises RunFolderError if one of these names in a folder is a symbolic link, which would redirect writes and deletions."""
    if links := [path / name for name in names if (path / name).is_symlink()]:
        raise RunFolderError(f"{links[0]} is a symbolic link, so writing there would change other files; replace it by a copy")


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Creates a run's folder and locks it against other processes; the system releases the lock when the process ends."""
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file; choose a folder for the run")
    checkpoints = [f"{CHECKPOINTS}/{checkpoint.name}" for checkpoint in (path / CHECKPOINTS).glob("*")]
    check_links(path, (*_WRITTEN, ROWS, CHECKPOINTS, *checkpoints))
    if folders := [path / name for name in _WRITTEN if (path / name).is_dir()]:
        raise RunFolderError(f"{folders[0]} is a folder, but the run needs a file there; move it, or choose another folder")
    new_folders = [p for p in (path, *path.parents) if not p.exists()]
    path.mkdir(parents=True, exist_ok=True)
    lock = path / LOCK

    def remove_empty() -> None:  # a run that wrote nothing leaves no empty folder
        with contextlib.suppress(OSError):
            for folder in new_folders:
                folder.rmdir()

    with contextlib.ExitStack() as stack:
        stack.callback(remove_empty)
        with writing(lock):
            file = stack.enter_context(lock.open("ab+", buffering=0))  # unbuffered, so that closing it writes nothing
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


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Appends rows of the history to `metrics.jsonl`; if they do not all fit, the file keeps its size."""
    file = path / ROWS
    size = file.stat().st_size if file.exists() else 0
    try:
        with writing(file), file.open("a", newline="") as lines:
            lines.writelines(json.dumps(to_json(row)) + "\n" for row in rows)
    except OSError:
        with contextlib.suppress(OSError):
            os.truncate(file, size)
        raise


def write_table(path: Path) -> None:
    """Writes the rows of `metrics.jsonl` to `metrics.csv`, with one row in memory at a time."""
    write_csv(path / TABLE, lambda: (scalars(row) | {name: int(row[name]) for name in _COUNTS} for row in each_row(path)))


def write_csv(path: Path, rows: Callable[[], Iterable[Mapping[str, Any]]]) -> None:
    """Writes a CSV file, with empty cells for nan and missing values, as in `write_json`.

    `rows` is called twice: once for the names of the columns, and once for their values.
    """
    columns = list(dict.fromkeys(name for row in rows() for name in row))
    with replacing(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        table.writerows(
            {k: "" if isinstance(value, float) and math.isnan(value) else value for k, value in row.items()} for row in rows()
        )


def rewind_rows(path: Path, count: int) -> None:
    """Removes the rows of a killed run that are newer than its checkpoint."""
    file = path / ROWS
    if file.exists():
        with writing(file), file.open("rb+") as lines:
            lines.truncate(sum(map(len, itertools.islice(lines, count))))


def read_rows(path: Path, count: int | None = None) -> list[Row]:
    """Reads the rows of `metrics.jsonl` in a run's folder: the first `count` rows of a checkpoint, or all complete rows."""
    rows = list(each_row(path, count))
    if count is not None and len(rows) < count:
        raise RunFolderError(
            f"{path / ROWS} has fewer rows than the {count} that the checkpoint counts; restore the file, or start a new run"
        )
    return rows


def each_row(path: Path, count: int | None = None) -> Iterator[Row]:
    """Yields rows one by one; see `read_rows`."""
    file = path / ROWS
    first_row, last_counts = dict[str, Any](), dict.fromkeys(_COUNTS, -math.inf)
    try:
        for number, content in enumerate(itertools.islice(json_lines(file), count), 1):
            row = _row_of(content)
            first_row = first_row or row
            differs = any(np.shape(value) != np.shape(first_row.get(name, value)) for name, value in row.items())
            if not row or differs or any(row[name] <= last_counts[name] for name in _COUNTS):
                raise RunFolderError(f"line {number} of {file} is damaged; restore the file, or start a new run")
            yield row
            last_counts = {name: row[name] for name in _COUNTS}
    except OSError as error:
        raise RunFolderError(f"{file} cannot be read ({error}); restore the file, or start a new run") from error


def json_lines(file: Path) -> Iterator[Any]:
    """Yields lines of JSON one by one, None for a damaged one; ignores a last line that was cut off."""
    with file.open("rb") if file.exists() else contextlib.nullcontext(()) as lines:
        for line in lines:
            if line.endswith(b"\n"):
                content = None
                with contextlib.suppress(ValueError):
                    content = parse_json(line)
                yield content


def _row_of(content: Any) -> Row:
    """Converts a line of `metrics.jsonl` to a row; an empty one if it is damaged."""
    try:
        row = {name: _from_json(value) for name, value in content.items()}
    except (ValueError, AttributeError):
        return {}
    is_sound = all(isinstance(row.get(name), int | float) for name in _COUNTS) and all(map(_is_number, row.values()))
    return row if is_sound else {}


def _is_number(value: object) -> bool:
    return np.asarray(value).dtype.kind in "biuf"


def _from_json(value: Any) -> float | np.ndarray:
    if isinstance(value, list):
        return np.array([math.nan if number is None else number for number in value])
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
