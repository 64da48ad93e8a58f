"""A run on disk: a folder of plain files beside one checkpoint.

    config.json      the settings: algorithm, environment, policy, seed, every config field, versions, devices
    metrics.jsonl    one row per chunk; metrics.csv holds the same
    checkpoint/      the whole state of the run (Orbax), and the registers of stale parameters if the policy has any
    summary.json     the outcome of the run
    evaluation.json  every episode of the last evaluation, if there was one

Rows are written during the run, and the config with the first row, so that a run that fails to compile leaves the folder free
for the next run. The rest is written at the end.
"""

import csv
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax._checks import writing
from msrl_jax.data import Dataset
from msrl_jax.training.callbacks import Tick, scalars
from msrl_jax.training.history import Row

CONFIG, ROWS, TABLE = "config.json", "metrics.jsonl", "metrics.csv"
STATE, REGISTERS = "checkpoint/state", "checkpoint/registers"
SUMMARY, EVALUATION = "summary.json", "evaluation.json"
_PRECISION = "jax_default_matmul_precision"
_PACKAGES = ("msrl-jax", "jax", "jaxlib", "flax", "optax", "gymnax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """The versions of Python and of every package that affects a run's numbers."""
    return {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in _PACKAGES}


def describe_devices(devices: Sequence[Any]) -> dict[str, Any]:
    """Platform, kind and number of the devices in use, and the default precision of matrix products."""
    first = devices[0]
    return {
        "platform": first.platform,
        "kind": first.device_kind,
        "count": len(devices),
        "matmul_precision": getattr(jax.config, _PRECISION) or "default",
    }


def to_json(value: Any) -> Any:
    """Converts a value to plain JSON data: arrays to lists, nan and infinities to null, data sets to descriptions."""
    if isinstance(value, Dataset):
        value = value.describe()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return to_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def write_json(path: Path, value: Any, indent: int | None = 2) -> None:
    """Writes a JSON file beside `path` and renames it, so that a reader sees either the whole file or none."""
    beside = path.with_name(f".{path.name}.partial")
    with writing(path):
        beside.write_text(json.dumps(to_json(value), indent=indent) + "\n")
        os.replace(beside, path)


def check_free(path: Path) -> None:
    """Raises ValueError if `path` holds a run, or is a file."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; name a folder for the run")
    if taken := [name for name in (CONFIG, ROWS, SUMMARY, STATE) if (path / name).exists()]:
        raise ValueError(f"the folder {path} already holds a run ({taken[0]}); name another one, or delete it first")


class RowWriter:
    """A callback that appends every tick to `metrics.jsonl` and `metrics.csv`; a killed run keeps all logged rows."""

    def __init__(self, path: Path, description: Mapping[str, Any]):
        """Creates the folder.

        Args:
          path: the folder; it may exist, but must not hold a run.
          description: the content of `config.json`.
        """
        check_free(path)
        path.mkdir(parents=True, exist_ok=True)
        self._path, self._description = path, description

    def __call__(self, tick: Tick) -> None:
        """Appends one tick."""
        self.append(dict(tick.metrics))

    def append(self, row: Row) -> None:
        """Appends one row of the history."""
        if not (self._path / CONFIG).exists():
            write_json(self._path / CONFIG, self._description)
        with writing(self._path / ROWS), (self._path / ROWS).open("a") as file:
            file.write(json.dumps(to_json(row)) + "\n")
        table = self._path / TABLE
        is_new = not table.exists()
        with writing(table), table.open("a", newline="") as file:
            flat = scalars(row)
            writer = csv.writer(file)
            if is_new:
                writer.writerow(flat)
            writer.writerow("" if math.isnan(x) else x for x in flat.values())


def read_rows(path: Path) -> list[Row]:
    """Reads the rows of `metrics.jsonl` in a run's folder."""
    return [
        {name: _from_json(value) for name, value in json.loads(line).items()} for line in (path / ROWS).read_text().splitlines()
    ]


def _from_json(value: Any) -> float | np.ndarray:
    if isinstance(value, list):
        return np.array([math.nan if x is None else x for x in value])
    return math.nan if value is None else value


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON file of a run's folder.

    Raises:
      ValueError: if the file is missing; the message names it.
    """
    if not path.exists():
        raise ValueError(f"{path.parent} holds no complete run: {path.name} is missing")
    return json.loads(path.read_text())
