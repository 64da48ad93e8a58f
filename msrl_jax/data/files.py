"""Data sets on disk."""

import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax._checks import writing
from msrl_jax.data.dataset import FIELDS, OPTIONAL, Dataset, columns, from_columns, from_lanes
from msrl_jax.data.episodes import read_minari
from msrl_jax.data.parquet import read_parquet, write_parquet
from msrl_jax.data.parts import fields_of
from msrl_jax.replay import Transition

ABOUT, CUT = "about", "cut"
PARTS = ".parts"
"""Suffix of the folder that holds an incomplete recording."""


def save(dataset: Dataset, path: str | os.PathLike) -> Path:
    """Writes a data set; a reader sees either the whole file or none.

    Args:
      dataset: the data set.
      path: the file. Its suffix names the format: `.npz` (NumPy, compressed) or `.parquet` (needs the extra `data`).

    Returns:
      The path.

    Raises:
      ValueError: on another suffix.
      ImportError: if the format needs a package that is not installed; the message says how to install it.
    """
    path = Path(path)
    check_suffix(path)
    write = _FORMATS[path.suffix][1]
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.partial{path.suffix}")
    with writing(path):
        write(dataset, beside)
        os.replace(beside, path)
    return path


def load(path: str | os.PathLike | Dataset) -> Dataset:
    """Reads a data set.

    Args:
      path: a file that `save` wrote, or a file of the same format with the fields of `Dataset`; the folder of a Minari data
        set, or the id of a local one ("mujoco/hopper/medium-v0"); or the folder of parts of a killed run. A `Dataset` is
        returned unchanged.

    Returns:
      The data set.

    Raises:
      ValueError: if there is no such file, if it has another format, or if fields are missing.
      ImportError: if the format needs a package that is not installed; the message says how to install it.
    """
    if isinstance(path, Dataset):
        return path
    name, path = os.fspath(path), Path(path)
    if path.is_dir():
        return read_parts(path) if path.suffix == PARTS else read_minari(path)
    if not path.exists() and re.fullmatch(r"([\w-]+/)*[\w-]+-v\d+", name):
        return read_minari(name)
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
    """Raises ValueError if the path exists, or its suffix names no format."""
    check_suffix(path)
    if Path(path).exists():
        raise ValueError(f"{path} exists already; name another file to record to, or delete it first")


def write_part(folder: Path, number: int, rows: Transition) -> None:
    """Adds steps `[T, E, ...]` to a folder of parts, as part `number`."""
    path, beside = folder / f"part-{number:06d}.npz", folder / f".part-{number:06d}.npz"
    with writing(path):
        np.savez(beside, **columns(rows))
        os.replace(beside, path)


def keep_parts(folder: Path, count: int) -> None:
    """Removes all parts but the first `count`; raises ValueError if there are fewer."""
    paths = sorted(folder.glob("part-*.npz"))
    if len(paths) < count:
        raise ValueError(
            f"{folder} has {len(paths)} of the {count} parts that the run has recorded so far; restore the folder, or record "
            "the further steps to another file"
        )
    for path in paths[count:]:
        path.unlink()


def read_parts(folder: Path) -> Dataset:
    """Joins the parts in a folder; every part holds steps `[T, E, ...]`, in order."""
    paths = sorted(folder.glob("part-*.npz"))
    if not paths:
        raise ValueError(f"{folder} is a folder without a data set; name a file, or the folder of a recorded run")
    parts = []
    for path in paths:
        try:
            with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
                if not set(FIELDS) <= set(fields_of(file.files)):
                    raise ValueError(f"it has {', '.join(file.files)}")
                parts.append({name: file[name] for name in file.files})
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path} is damaged ({error}); restore it, or delete it and all later parts") from error
    try:
        about = json.loads((folder / "about.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'about.json'} is missing or damaged ({error}); write {{}} to it") from error
    return from_lanes({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, about)


def _read_npz(path: Path) -> Dataset:
    try:
        with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
            names = file.files
            ours = (*FIELDS, *OPTIONAL, CUT, ABOUT)
            arrays = {name: file[name] for name in names if fields_of([name]).keys() <= set(ours)}
            about = json.loads(str(arrays.pop(ABOUT, "{}")))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is no npz file of numbers, or it is damaged ({error}); write it again") from error
    return _dataset(path, arrays, about, names)


def _read_parquet(path: Path) -> Dataset:
    return _dataset(path, *read_parquet(path))


def _dataset(path: Path, arrays: dict[str, Any], about: dict[str, Any], names: list[str]) -> Dataset:
    if missing := [name for name in FIELDS if name not in fields_of(names)]:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; a data set has {', '.join(FIELDS)}, and the file {', '.join(sorted(names))}"
        )
    try:
        return from_columns(arrays, about)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _write_npz(dataset: Dataset, path: Path) -> None:
    arrays: dict[str, Any] = {**dataset.columns, CUT: dataset.cut}
    np.savez_compressed(path, **arrays, about=np.array(json.dumps(dataset.about)))


_FORMATS: dict[str, tuple[Callable[[Path], Dataset], Callable[[Dataset, Path], None]]] = {
    ".npz": (_read_npz, _write_npz),
    ".parquet": (_read_parquet, write_parquet),
}
