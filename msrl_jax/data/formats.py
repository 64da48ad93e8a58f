"""Reading and writing data sets: npz and Parquet files, Minari data sets, parts of a recording, and RLDS episodes.

A Parquet file has one column per field or part, with fixed-size lists for arrays; the shapes are in the metadata.
"""

import importlib
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np

from msrl_jax._files import parse_json, writing
from msrl_jax.data.dataset import FIELDS, OPTIONAL, Dataset, columns, from_columns, from_lanes, parts_by_path, top_fields
from msrl_jax.fragments.support.checks import shown
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.replay import Transition

ABOUT, CUT = "about", "cut"
_KEY = b"msrl_jax"  # the key of our metadata in Parquet files
PARTS = ".parts"  # suffix of the folder that holds an incomplete recording


@entry
def save(dataset: Dataset, path: str | os.PathLike) -> Path:
    """Writes a data set; a reader sees either the whole file or none.

    Args:
      dataset: the data set.
      path: the file. Its suffix names the format: `.npz` (NumPy, compressed) or `.parquet` (needs the extra `data`).

    Returns:
      The path.

    Raises:
      ValueError: if the suffix is unknown.
      TypeError: if an argument is not a path or not a data set.
      ImportError: if the format needs a package that is not installed; the message says how to install it.
    """
    path = Path(path)
    check_suffix(path)
    write = _FORMATS[path.suffix][1]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial{path.suffix}")
    with writing(path):
        write(dataset, partial)
        os.replace(partial, path)
    return path


@entry
def load(path: str | os.PathLike | Dataset) -> Dataset:
    """Reads a data set.

    Args:
      path: a file that `save` wrote, or a file of the same format with the fields of `Dataset`; the folder of a Minari data
        set, or the id of a local one ("mujoco/hopper/medium-v0"); or the folder of parts of a killed run. A `Dataset` is
        returned unchanged.

    Returns:
      The data set.

    Raises:
      ValueError: if the file does not exist, has another format, or lacks fields.
      ImportError: if the format needs a package that is not installed; the message says how to install it.
    """
    if isinstance(path, Dataset):
        return path
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"data is {type(path).__name__}; pass the path of a file, or a Dataset, e.g. from from_episodes")
    name, path = os.fspath(path), Path(path)
    if path.is_dir():
        return read_parts(path) if path.suffix == PARTS else _read_minari(path)
    if not path.exists() and re.fullmatch(r"([\w-]+/)*[\w-]+-v\d+", name):
        return _read_minari(name)
    check_suffix(path)
    if not path.is_file():
        raise ValueError(f"the file {path} does not exist; write one with msrl_jax.data.record or train(record=...)")
    return _FORMATS[path.suffix][0](path)


def check_suffix(path: str | os.PathLike) -> None:
    """Raises ValueError unless the suffix is that of a format."""
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"{path} has the suffix {path.suffix!r}; use a file name that ends in {' or '.join(_FORMATS)}")


def check_new(path: str | os.PathLike) -> None:
    """Raises ValueError if the path exists, or its suffix is unknown."""
    check_suffix(path)
    if Path(path).exists():
        raise ValueError(f"{path} already exists; record to another file, or delete it first")


def write_part(folder: Path, number: int, rows: Transition) -> None:
    """Adds steps `[T, E, ...]` to a folder of parts, as part `number`."""
    path, partial = folder / f"part-{number:06d}.npz", folder / f".part-{number:06d}.npz"
    with writing(path):
        np.savez(partial, **columns(rows))
        os.replace(partial, path)


def keep_parts(folder: Path, count: int) -> None:
    """Removes all but the first `count` parts; raises ValueError if there are fewer."""
    paths = sorted(folder.glob("part-*.npz"))
    if len(paths) < count:
        raise ValueError(
            f"{folder} has {len(paths)} of the {count} parts that the run has recorded so far; restore the folder, or "
            "record further steps to another file"
        )
    for path in paths[count:]:
        path.unlink()


def read_parts(folder: Path) -> Dataset:
    """Joins the parts in a folder; every part holds steps `[T, E, ...]`, in order."""
    paths = sorted(folder.glob("part-*.npz"))
    if not paths:
        raise ValueError(f"{folder} is a folder without a data set; use a file, or the folder of a recorded run")
    parts = []
    for path in paths:
        try:
            arrays, names = _load_npz(path)
            if not set(FIELDS) <= set(top_fields(names)):
                raise ValueError(f"it has {', '.join(names)}")
        except _DAMAGED as error:
            raise ValueError(f"{path} is damaged ({error}); restore it, or delete it and all later parts") from error
        parts.append(arrays)
    try:
        about = parse_json((folder / "about.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / 'about.json'} is missing or damaged ({error}); write {{}} to it") from error
    names = list(parts[0])
    return from_lanes({name: np.concatenate([part.pop(name) for part in parts]) for name in names}, about)


_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError)


def _load_npz(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns the arrays of a data set in a file, and the names of everything in the file."""
    with path.open("rb") as stream, np.lib.npyio.NpzFile(stream, allow_pickle=False) as file:
        ours = {*FIELDS, *OPTIONAL, CUT, ABOUT}
        return {name: file[name] for name in file.files if top_fields([name]).keys() <= ours}, file.files


def _read_npz(path: Path) -> Dataset:
    try:
        arrays, names = _load_npz(path)
        about = parse_json(str(arrays.pop(ABOUT, "{}")))
    except _DAMAGED as error:
        raise ValueError(f"{path} is not an npz file of numbers, or it is damaged ({error}); write it again") from error
    return _make_dataset(path, arrays, about, names)


def _make_dataset(path: Path, arrays: dict[str, Any], about: dict[str, Any], names: list[str]) -> Dataset:
    if missing := [name for name in FIELDS if name not in top_fields(names)]:
        raise ValueError(
            f"{path} has no {', '.join(missing)}; a data set has {', '.join(FIELDS)}, and the file {', '.join(sorted(names))}"
        )
    try:
        return from_columns(arrays, about)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _write_npz(dataset: Dataset, path: Path) -> None:
    arrays: dict[str, Any] = {**dataset.columns, CUT: dataset.cut, ABOUT: np.array(json.dumps(dataset.about))}
    np.savez_compressed(path, **arrays)


def _require(module: str, purpose: str) -> ModuleType:
    """Imports a package of the extra `data`; if it is not installed, the ImportError says how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{purpose} needs the package {package!r}; install it with: pip install 'msrl-jax[data]'") from error


def _write_parquet(dataset: Dataset, path: Path) -> None:
    pa, parquet = _require("pyarrow", "Parquet"), _require("pyarrow.parquet", "Parquet")

    def column(x: np.ndarray) -> Any:
        flat = pa.array(x.reshape(-1))
        return flat if x.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, int(np.prod(x.shape[1:])))

    arrays = dataset.columns
    about = {
        "shapes": {name: x.shape[1:] for name, x in arrays.items()},
        ABOUT: dict(dataset.about),
        CUT: np.flatnonzero(dataset.cut).tolist(),
    }
    table = pa.table({name: column(x) for name, x in arrays.items()})
    parquet.write_table(table.replace_schema_metadata({_KEY: json.dumps(about).encode()}), path)


def _read_parquet(path: Path) -> Dataset:
    pa, parquet = _require("pyarrow", "Parquet"), _require("pyarrow.parquet", "Parquet")
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a Parquet file, or it is damaged ({error}); write it again") from error
    metadata = parse_json((table.schema.metadata or {}).get(_KEY, b"{}"))
    arrays = {}
    for name in table.column_names:
        if top_fields([name]).keys() <= {*FIELDS, *OPTIONAL}:
            values = _column_array(table[name].combine_chunks(), f"column {name} of {path}")
            arrays[name] = values.reshape(len(values), *metadata["shapes"][name]) if metadata else values
    if CUT in metadata:
        arrays[CUT] = np.isin(np.arange(len(table)), metadata[CUT])
    return _make_dataset(path, arrays, metadata.get(ABOUT, {}), table.column_names)


def _column_array(column: Any, name: str) -> np.ndarray:
    pa, compute = _require("pyarrow", "Parquet"), _require("pyarrow.compute", "Parquet")
    shape = [len(column)]
    while True:
        if column.null_count:
            raise ValueError(f"{name} has {column.null_count} empty cells; fill them, or remove such rows")
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)
        lengths = np.unique(compute.list_value_length(column).to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            raise ValueError(f"{name} has lists of {len(lengths)} different lengths; all rows must have the same shape")
        shape.append(int(lengths[0]))
        column = column.flatten()


def _read_minari(source: str | Path) -> Dataset:
    """Reads a local Minari data set (minari.farama.org): its folder, or its id, such as "mujoco/hopper/medium-v0"."""
    minari, storage = _require("minari", "a Minari data set"), _require("minari.storage", "a Minari data set")
    folder = source if isinstance(source, Path) else storage.get_dataset_path(source)
    folder = folder / "data" if isinstance(source, str) or (folder / "data").is_dir() else folder
    try:
        refusal = _why_unsafe(folder)
        minari_dataset = None if refusal else minari.MinariDataset(folder)
        episodes = [] if minari_dataset is None else [vars(episode) for episode in minari_dataset.iterate_episodes()]
    except (OSError, KeyError, ValueError, TypeError, AssertionError, RuntimeError) as error:
        raise ValueError(
            f"{source} cannot be read as a Minari data set ({error}); download it with: minari download ID, or pass its folder"
        ) from error
    if minari_dataset is None:
        raise ValueError(f"{source} is refused: {refusal}")
    spec = minari_dataset.env_spec
    about = {
        "env": spec.id if spec is not None else minari_dataset.id,
        "observation_space": str(minari_dataset.observation_space),
        "action_space": str(minari_dataset.action_space),
        "made_by": f"Minari data set {minari_dataset.id}",
    }
    return from_episodes(episodes, about)


def _why_unsafe(folder: Path) -> str | None:
    """Why a Minari data set is refused: reading it would run code or read other files; None if it is safe."""
    metadata = dict(parse_json((folder / "metadata.json").read_bytes()))
    if missing := [name for name in ("observation_space", "action_space") if not isinstance(metadata.get(name), str)]:
        return (
            f"metadata.json has no {missing[0]}, so Minari would make the environment that it names, which can run any code; "
            "if you trust it, read the data set yourself, and pass its episodes to msrl_jax.data.from_episodes"
        )
    if (path := folder / "main_data.hdf5").exists():
        h5py = _require("h5py", "a Minari data set in HDF5")
        with h5py.File(path, "r") as file:
            link_name = file.visititems_links(lambda name, link: name if isinstance(link, h5py.ExternalLink) else None)
            link_name = link_name or file.visititems(
                lambda name, item: name if isinstance(item, h5py.Dataset) and (item.external or item.is_virtual) else None
            )
        if link_name:
            return f"{link_name} of {path} is stored in another file; copy the data you need from that file into the data set"
    return None


_NAMES = {  # field -> its names here, in RLDS and in Minari
    "obs": ("obs", "observation", "observations"),
    "action": ("action", "actions"),
    "reward": ("reward", "rewards"),
    "terminated": ("terminated", "terminations", "is_terminal"),
    "truncated": ("truncated", "truncations"),
}


@entry
def from_episodes(episodes: Iterable[Mapping[str, Any]], about: Mapping[str, Any] | None = None) -> Dataset:
    """Makes a data set from whole episodes (RLDS: Ramos et al., 2021, arXiv 2111.02767).

    Args:
      episodes: the arrays of every episode, or `{"steps": arrays}`, or `{"steps": [step, ...]}`, as in RLDS. An episode of `T`
        steps has `T + 1` observations; actions and rewards `[T, ...]`, or `[T + 1, ...]` with a meaningless last entry, as in
        RLDS; `terminated [T]`, whether a step ended in a terminal state, or `is_terminal [T + 1]`, whether an observation is
        terminal; and optionally `truncated [T]`, whether a limit ended the episode after a step. Observations may be nested
        dicts and tuples of arrays. Plural names are also accepted.
      about: the origin of the episodes.

    Returns:
      The data set; an episode that does not end in a terminal state is truncated.

    Raises:
      ValueError: if no episode is given, if an array is missing or has the wrong length, or if rewards are those of several
        agents; the message names the array.
    """
    columns: dict[str, list[np.ndarray]] = {}
    for number, episode in enumerate(episodes):
        rows = _episode_rows(_episode_arrays(episode, f"episode {number}"), f"episode {number}")
        if number and (odd := sorted(rows.keys() ^ columns.keys())):
            raise ValueError(f"only some of the episodes 0 to {number} have {odd[0]}; all need the same parts of observations")
        for name, array in rows.items():
            columns.setdefault(name, []).append(array)
    if not columns:
        raise ValueError("no episode was given; pass at least one")
    for name, parts in columns.items():
        kinds = sorted({f"{array.dtype}{list(array.shape[1:])}" for array in parts})
        if len(kinds) > 1:
            raise ValueError(f"{name} is {' in some episodes and '.join(kinds)} in others; convert them to one of these")
    return from_columns({name: np.concatenate(parts) for name, parts in columns.items()}, about or {})


def _episode_arrays(episode: object, episode_name: str) -> Mapping[str, Any]:
    """Returns the arrays of an episode; in RLDS, they are under `steps`, which may be a list of single steps."""
    if not isinstance(episode, Mapping):
        raise ValueError(f"{episode_name} is {shown(episode)}; pass a list of episodes, each a dict of arrays")
    steps = episode.get("steps", episode)
    if isinstance(steps, Mapping):
        return steps
    rows = list(steps)
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"steps of {episode_name} are {shown(steps)}; pass a dict of arrays, or a list of dicts, one per step")
    return jax.tree.map(lambda *xs: np.stack(xs), *map(dict, rows))


def _episode_rows(episode: Mapping[str, Any], episode_name: str) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    obs: dict[str, np.ndarray] = {}
    terminal = False
    for name, names in _NAMES.items():
        given_name = next((other for other in names if other in episode), None)
        value = episode[given_name] if given_name else None
        if given_name is None and name != "truncated":
            raise ValueError(f"{episode_name} has no {' or '.join(names)}; it has {', '.join(sorted(episode))}")
        if name == "obs":
            obs = {path: np.asarray(x) for path, x in parts_by_path(value, name).items()}
        elif isinstance(value, Mapping | tuple):
            raise ValueError(f"{given_name} of {episode_name} is a {type(value).__name__} of arrays; flatten it to one array")
        elif given_name is not None:
            arrays[name] = np.asarray(value)
            terminal |= given_name == "is_terminal"
    lengths = {path: len(x) if x.ndim else 0 for path, x in obs.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the parts of the observations of {episode_name} have different lengths, {lengths}; make them equal")
    steps = max(lengths.values()) - 1
    if steps < 1:
        raise ValueError(f"{episode_name} has {steps + 1} observations; pass one more than there are steps, so at least two")
    for name, x in arrays.items():
        lengths = [steps + 1] if name == "terminated" and terminal else [steps, steps + 1]
        if x.ndim == 0 or len(x) not in lengths:
            raise ValueError(
                f"{name} of {episode_name} has shape {list(x.shape)}, but there are {steps + 1} observations; pass one per "
                f"step, [{' or '.join(map(str, lengths))}, ...]"
            )
        if name == "reward" and x.ndim > 1:
            raise ValueError(
                f"reward of {episode_name} has shape {list(x.shape)}; these episodes have one agent, so pass one number per "
                "step; for several agents, make a Dataset with the field valid"
            )
        arrays[name] = x[1:] if name == "terminated" and terminal else x[:steps]
    truncated = arrays.setdefault("truncated", np.zeros(steps, bool)).astype(bool)
    truncated[-1] |= not arrays["terminated"][-1]
    obs_arrays, next_obs_arrays = {path: x[:-1] for path, x in obs.items()}, {f"next_{path}": x[1:] for path, x in obs.items()}
    return {**arrays, **obs_arrays, **next_obs_arrays, "truncated": truncated}


_FORMATS: dict[str, tuple[Callable[[Path], Dataset], Callable[[Dataset, Path], None]]] = {
    ".npz": (_read_npz, _write_npz),
    ".parquet": (_read_parquet, _write_parquet),
}
