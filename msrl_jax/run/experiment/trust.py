"""Finds the code that plain data name: the content of `config.json`, a `--config` file, or what a learner sends its actors."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from msrl_jax import algorithms, envs, policies
from msrl_jax.registry import code_names, files

KINDS: Mapping[str, Callable[[str], bool]] = {
    "env": envs.is_custom,
    "algo": code_names.is_custom_algorithm,
    "policy": policies.is_custom,
    "algorithm": code_names.is_custom_algorithm,
    "beside": policies.is_custom,
}


def code_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Returns the options of a command that name files or modules, with the names; options not in `KINDS` are config fields."""
    names = {}
    for name, value in options.items():
        for text in code_names.texts(value) if name in KINDS else ():
            with contextlib.suppress(ValueError):  # such text cannot be parsed later either
                if KINDS[name](text):
                    names.setdefault(name, text)
    return names | code_names.code_of({name: value for name, value in options.items() if name not in KINDS})


def algorithm_of(about: Mapping[str, Any]) -> str:
    """Returns the argument by which `algorithms.get` finds the algorithm of plain data: its name if known here, or its file."""
    return about["algorithm"] if about["algorithm"] in algorithms.names() else files.saved(about)


def code_of_run(about: Mapping[str, Any]) -> dict[str, str]:
    """Returns the code that the plain data of an experiment name, by argument of `train`, except the policy."""
    code = code_of({"env": about["env_spec"], "algo": algorithm_of(about)})
    return code | code_names.code_of(about["config"]) | code_names.code_of(about["settings"] or {})
