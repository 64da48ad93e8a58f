"""The plain data of an experiment, the content of `config.json`, and which of them determine what is computed."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrl_jax.configs.deferred import is_object
from msrl_jax.configs.fields import is_option
from msrl_jax.configs.options import option_text
from msrl_jax.data import Dataset
from msrl_jax.fragments.support.naming import reference

MOST_SEEDS = 2**20  # in one program


class RunFolderError(ValueError):
    """A folder holds no run, a damaged one, a different one than expected, or one that another process writes to."""


def to_json(value: object) -> Any:
    """Converts a value to plain JSON data: arrays to lists, nan and infinities to null, data sets to descriptions."""
    if isinstance(value, Dataset):
        value = value.describe()
    if is_option(value):
        return option_text(value, full=True)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, np.floating):  # an item of a long double array is a long double, too
        value = float(value)
    if isinstance(value, (np.ndarray, np.generic)):
        return to_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Converts config fields to plain data; describes modules and other objects with `reference`."""
    return {name: reference(value) if is_object(value) else to_json(value) for name, value in fields.items()}


def _facts(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that determine what is computed, except the length and the data set, by argument of `train`."""
    fields = about["config"] | (about["settings"] or {})
    names = ("env", "env_object", "seed", "seeds", "env_params", "pbt", "rank_by")
    return (
        {"algo": about["algorithm"]} | {n: about[n] for n in names} | {n: value for n, value in fields.items() if n != "data"}
    )


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """Returns the first fact in which the contents of two `config.json` differ, with both values."""
    is_known = all(about["env_spec"] or about["env_object"] for about in (mine, theirs))  # whether the environment is known
    pairs = (
        (name, value, _facts(theirs).get(name)) for name, value in _facts(mine).items() if is_known or name != "env_object"
    )
    return next((pair for pair in pairs if pair[1] != pair[2]), None)


def fingerprint(about: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of the facts in the content of `config.json`, and of the rollbacks, which changed them in the run."""
    return hashlib.sha256(json.dumps(to_json([_facts(about), about["rollbacks"]]), sort_keys=True).encode()).hexdigest()


def each_member(seed: int, seeds: int, settings: Mapping[str, Sequence[float]], *, evolve: bool) -> list[dict[str, Any]]:
    """Returns the seed of every member and its values of the fields in which members differ. In a population that evolves,
    these are the initial values, and each member has a different seed."""
    settings_of_members = [dict(zip(settings, values, strict=True)) for values in zip(*settings.values(), strict=True)] or [{}]
    if evolve:
        return [{"seed": seed + i} | setting for i, setting in enumerate(settings_of_members)]
    return [{"seed": seed + i} | setting for setting in settings_of_members for i in range(seeds)]
