"""Data sets on disk."""

import json
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax.data.dataset import FIELDS, Dataset, from_lanes
from msrl_jax.replay import Transition

ABOUT = "about"
PARTS = ".parts"
"""What follows a file's name in that of the folder with its parts, as long as it is not complete."""


def save(dataset: Dataset, path: str | os.PathLike) -> Path:
    """Writes a data set; a reader sees a whole file or none.

    Args:
      dataset: the data set.
      path: a file whose suffix names the format: `.npz`, NumPy's, compressed.

    Returns:
      The path.

    Raises:
      ValueError: on another suffix.
    """
    path = Path(path)
    check_suffix(path)
    write = _FORMATS[path.suffix][1]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial{path.suffix}")
    write(dataset, beside)
    os.replace(beside, path)
    return path


def load(path: str | os.PathLike | Dataset) -> Dataset:
    """Reads a data set.

    Args:
      path: what `save` wrote, or a file of the same format with the fields of `Dataset`; a folder of parts that a recorded run
        left which was killed; a data set comes back as it is.

    Returns:
      The data set.

    Raises:
      ValueError: if there is no such file, or it is of another format, or fields are missing.
    """
    if isinstance(path, Dataset):
        return path
    path = Path(path)
    if path.is_dir():
        return read_parts(path)
    check_suffix(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}; msrl_jax.data.record and train(record=...) write data sets")
    return _FORMATS[path.suffix][0](path)


def check_suffix(path: str | os.PathLike) -> None:
    """Raises ValueError unless the suffix names a format."""
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; name a file that ends in {' or '.join(_FORMATS)}")


def check_new(path: str | os.PathLike) -> None:
    """Raises ValueError if there is something at a path already, or its suffix names no format."""
    check_suffix(path)
    if Path(path).exists():
        raise ValueError(f"{path} exists already; name another file to record to, or delete it first")


def write_part(folder: Path, rows: Transition) -> None:
    """Adds steps `[T, E, ...]` to a folder of parts."""
    number = len(list(folder.glob("part-*.npz")))
    beside = folder / f".part-{number:06d}.npz"
    np.savez(beside, **rows._asdict())
    os.replace(beside, folder / f"part-{number:06d}.npz")


def read_parts(folder: Path) -> Dataset:
    """Joins the parts in a folder, in which the steps of every environment follow each other."""
    paths = sorted(folder.glob("part-*.npz"))
    if not paths:
        raise ValueError(f"{folder} is a folder without a data set in it; name a file, or the folder of a recorded run")
    parts = []
    for path in paths:
        with np.load(path) as file:
            parts.append([file[name] for name in FIELDS])
    about = json.loads((folder / "about.json").read_text())
    return from_lanes(Transition(*(np.concatenate(x) for x in zip(*parts, strict=True))), about)


def check_fields(path: Path, names: list[str]) -> None:
    """Raises ValueError unless a file has all fields of a data set."""
    if missing := [name for name in FIELDS if name not in names]:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; a data set has {', '.join(FIELDS)}, and the file {', '.join(sorted(names))}"
        )


def _read_npz(path: Path) -> Dataset:
    try:
        with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in (*FIELDS, ABOUT) if name in file.files}
            names = file.files
            about = json.loads(str(arrays.pop(ABOUT, "{}")))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is no npz file of numbers, or it is damaged ({error}); write it again") from error
    check_fields(path, names)
    return Dataset(**arrays, about=about)


def _write_npz(dataset: Dataset, path: Path) -> None:
    arrays: dict[str, Any] = {name: getattr(dataset, name) for name in FIELDS}
    np.savez_compressed(path, **arrays, about=np.array(json.dumps(dataset.about)))


_FORMATS: dict[str, tuple[Callable[[Path], Dataset], Callable[[Dataset, Path], None]]] = {".npz": (_read_npz, _write_npz)}
