"""`run.toml`: the config file that repeats a run, with `msrl-jax train --config run.toml`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from msrl_jax import policies
from msrl_jax.fragments.support.naming import reference
from msrl_jax.fragments.support.text_values import parse_spec
from msrl_jax.policies.helpers import policy_text
from msrl_jax.run.disk import toml
from msrl_jax.run.experiment.experiment import Experiment

_HEAD = (
    "msrl-jax train --config FILE repeats this run; flags win over the file. Callbacks, and where and how often the run was "
    "saved, are not here."
)
_OBJECT = "an object, which a file cannot hold: name one with the flag, or give it to msrl.train."


def repeating(experiment: Experiment, about: Mapping[str, Any]) -> str:
    """Returns the content of `run.toml`.

    Args:
      experiment: what the run computes.
      about: the content of its `config.json`.

    Returns:
      TOML with every field of the config, and every option of `train` that determines what is computed. An object is a table
      with the key `object`, which the command line rejects.
    """
    options = {
        "algo": _algorithm_value(experiment),
        "env": about["env_spec"] or {"object": about["env_object"] or about["env"]},
        "env_params": _params_value(about["env_params"]),
        "policy": _policy_value(about["policy"]),
        **{name: about[name] for name in ("total_steps", "seed", "seeds")},
        "pbt": _pbt_text(about["pbt"]),
        **{name: about[name] for name in ("rank_by", "guard", "eval_episodes", "eval_every", "chunk")},
        **_cpu_options(about["devices"]),
    }
    text = toml.comment(_HEAD) + "\n"
    text += "".join(_entry(name, value) for name, value in options.items() if value is not None)
    values = {f.name: _field_value(experiment, about, f.name) for f in dataclasses.fields(experiment.algorithm)}
    texts = {f.name: f.metadata["doc"] for f in dataclasses.fields(experiment.algorithm)}
    text += "\n" + "".join(_entry(name, value, texts[name]) for name, value in values.items())
    option_values = {name: value for name, value in (about["settings"] or {}).items() if name not in values}
    return text + "".join(_entry(name, value) for name, value in option_values.items())


def _entry(name: str, value: object, doc: str = "") -> str:
    note = toml.comment(_OBJECT) if isinstance(value, Mapping) else ""
    return note + toml.entry(name, value, doc)


def _algorithm_value(experiment: Experiment) -> str | dict[str, str]:
    kind = type(experiment.algorithm)
    return experiment.name if kind.__module__.startswith("msrl_jax.") else reference(kind)


def _params_value(params: Mapping[str, str] | str | None) -> str | dict[str, str] | None:
    if isinstance(params, Mapping):
        return ",".join(f"{name}={text}" for name, text in params.items())
    return params and {"object": params}


def _policy_value(text: str) -> str | dict[str, str]:
    try:
        name, params = parse_spec(text, prefixes=True)
        is_same = policy_text(policies.get(name, **params)) == text
    except (ValueError, TypeError):
        is_same = False
    return text if is_same else {"object": text}


def _pbt_text(pbt: Mapping[str, Any] | None) -> str | None:
    if pbt is None:
        return None
    fields = {name: value for name, value in pbt.items() if name != "search"}
    return ",".join(f"{name}={value}" for name, value in (fields | pbt["search"]).items())


def _cpu_options(devices: Mapping[str, Any]) -> dict[str, int]:
    """Returns options for the processes of a run on CPUs and the virtual devices of each; both default to 1."""
    devices_per_process, remainder = divmod(devices["count"], devices["processes"])
    if devices["platform"] != "cpu" or remainder:
        return {}
    return {name: n for name, n in (("processes", devices["processes"]), ("cpu_devices", devices_per_process)) if n > 1}


def _field_value(experiment: Experiment, about: Mapping[str, Any], name: str) -> Any:
    value = (about["settings"] or {}).get(name, about["config"][name])
    if name == "data" and value is not None:
        return about["data"]["path"] or {"object": "a data set"}
    if name.endswith("learning_rate") and isinstance(value, float) and about["rollbacks"]:
        return value * 2 ** len(about["rollbacks"])  # each rollback halved it
    return value
