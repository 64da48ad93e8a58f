"""Parquet files: one column per field or part of it, with lists of fixed size for arrays; the shapes are in the metadata."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from msrl_jax.data.dataset import FIELDS, OPTIONAL, Dataset
from msrl_jax.data.parts import fields_of

_KEY = b"msrl_jax"


def require(module: str, what: str) -> ModuleType:
    """Imports a package of the extra `data`.

    Args:
      module: name of the module.
      what: name of the format that needs it, for the message.

    Returns:
      The module.

    Raises:
      ImportError: if it is not installed; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{what} needs the package {package!r}; install it with: pip install 'msrl-jax[data]'") from error


def write_parquet(dataset: Dataset, path: Path) -> None:
    """Writes a data set.

    Raises:
      ImportError: if pyarrow is not installed; the message says how to install it.
    """
    pa, parquet = require("pyarrow", "Parquet"), require("pyarrow.parquet", "Parquet")

    def column(x: np.ndarray) -> Any:
        flat = pa.array(x.reshape(-1))
        return flat if x.ndim == 1 else pa.FixedSizeListArray.from_arrays(flat, int(np.prod(x.shape[1:])))

    arrays = dataset.columns
    about = {
        "shapes": {name: x.shape[1:] for name, x in arrays.items()},
        "about": dict(dataset.about),
        "cut": np.flatnonzero(dataset.cut).tolist(),
    }
    table = pa.table({name: column(x) for name, x in arrays.items()})
    parquet.write_table(table.replace_schema_metadata({_KEY: json.dumps(about).encode()}), path)


def read_parquet(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], list[str]]:
    """Reads the fields of a data set; columns hold numbers, or lists of equal length, which may be nested.

    Args:
      path: the file.

    Returns:
      The fields in the file, `about` of the data set, and the names of all columns.

    Raises:
      ImportError: if pyarrow is not installed; the message says how to install it.
      ValueError: if the file is damaged, or a column has empty cells or lists of different lengths.
    """
    pa, parquet = require("pyarrow", "Parquet"), require("pyarrow.parquet", "Parquet")
    try:
        table = parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no Parquet file, or it is damaged ({error}); write it again") from error
    said = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
    arrays = {}
    for name in table.column_names:
        if fields_of([name]).keys() <= {*FIELDS, *OPTIONAL}:
            x = _array(table[name].combine_chunks(), f"column {name} of {path}")
            arrays[name] = x.reshape(len(x), *said["shapes"][name]) if said else x
    if "cut" in said:
        arrays["cut"] = np.isin(np.arange(len(table)), said["cut"])
    return arrays, said.get("about", {}), table.column_names


def _array(column: Any, what: str) -> np.ndarray:
    pa, compute = require("pyarrow", "Parquet"), require("pyarrow.compute", "Parquet")
    shape = [len(column)]
    while True:
        if column.null_count:
            raise ValueError(f"{what} has {column.null_count} empty cells; fill them, or leave such rows out")
        kind = column.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
            return np.asarray(column.to_numpy(zero_copy_only=False)).reshape(shape)
        lengths = np.unique(compute.list_value_length(column).to_numpy(zero_copy_only=False))
        if len(lengths) != 1:
            raise ValueError(f"{what} has lists of {len(lengths)} different lengths; every row has to have the same shape")
        shape.append(int(lengths[0]))
        column = column.flatten()
