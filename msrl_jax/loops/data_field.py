"""Checks the field `data` of a config."""

import os
from typing import Any, Protocol

from msrl_jax.configs.checking import check_unused
from msrl_jax.data import Dataset
from msrl_jax.fragments.support.checks import shown


class DataFields(Protocol):
    """The data set of a run."""

    @property
    def data(self) -> Any:
        """The path of a data set, a `Dataset`, or None."""
        ...


def check_data(config: DataFields) -> None:
    """Raises ValueError unless `data` is a path or a data set; without data, `data_fraction` must have its default."""
    name, source = type(config).__name__, config.data
    if not isinstance(source, str | os.PathLike | Dataset | None):
        raise ValueError(f"{name}.data={shown(source)}: use the path of a data set, or a msrl_jax.data.Dataset")
    if source is None:
        check_unused(config, ("data_fraction",), "without a data set; give data='experience.npz'")
