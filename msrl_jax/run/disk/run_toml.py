"""`run.toml`: the config file that repeats a run, with `msrl-jax train --config run.toml`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from msrl_jax import policies
from msrl_jax.fragments.support.naming import reference
from msrl_jax.fragments.support.text_values import parse_spec
from msrl_jax.policies.helpers import spec as policy_text
from msrl_jax.run.disk import toml
from msrl_jax.run.experiment.spec import Experiment

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
        "algo": _algorithm(experiment),
        "env": about["env_spec"] or {"object": about["env_object"] or about["env"]},
        "env_params": _params(about["env_params"]),
        "policy": _policy(about["policy"]),
        **{name: about[name] for name in ("total_steps", "seed", "seeds")},
        "pbt": _pbt(about["pbt"]),
        **{name: about[name] for name in ("rank_by", "guard", "eval_episodes", "eval_every", "chunk")},
        **_cpus(about["devices"]),
    }
    text = toml.comment(_HEAD) + "\n"
    text += "".join(_entry(name, x) for name, x in options.items() if x is not None)
    values = {f.name: _field(experiment, about, f.name) for f in dataclasses.fields(experiment.algorithm)}
    texts = {f.name: f.metadata["doc"] for f in dataclasses.fields(experiment.algorithm)}
    text += "\n" + "".join(_entry(name, x, texts[name]) for name, x in values.items())
    of_options = {name: x for name, x in (about["settings"] or {}).items() if name not in values}
    return text + "".join(_entry(name, x) for name, x in of_options.items())


def _entry(name: str, x: Any, doc: str = "") -> str:
    note = toml.comment(_OBJECT) if isinstance(x, Mapping) else ""
    return note + toml.entry(name, x, doc)


def _algorithm(experiment: Experiment) -> Any:
    kind = type(experiment.algorithm)
    return experiment.name if kind.__module__.startswith("msrl_jax.") else reference(kind)


def _params(params: Mapping[str, str] | str | None) -> Any:
    if isinstance(params, Mapping):
        return ",".join(f"{name}={text}" for name, text in params.items())
    return params and {"object": params}


def _policy(text: str) -> Any:
    try:
        name, params = parse_spec(text, prefixes=True)
        same = policy_text(policies.get(name, **params)) == text
    except (ValueError, TypeError):
        same = False
    return text if same else {"object": text}


def _pbt(pbt: Mapping[str, Any] | None) -> str | None:
    if pbt is None:
        return None
    own = {name: x for name, x in pbt.items() if name != "search"}
    return ",".join(f"{name}={x}" for name, x in (own | pbt["search"]).items())


def _cpus(devices: Mapping[str, Any]) -> dict[str, int]:
    """Returns options for the processes of a run on CPUs and the virtual devices of each; both default to 1."""
    each, others = divmod(devices["count"], devices["processes"])
    if devices["platform"] != "cpu" or others:
        return {}
    return {name: n for name, n in (("processes", devices["processes"]), ("cpu_devices", each)) if n > 1}


def _field(experiment: Experiment, about: Mapping[str, Any], name: str) -> Any:
    x = (about["settings"] or {}).get(name, about["config"][name])
    if name == "data" and x is not None:
        return about["data"]["path"] or {"object": "a data set"}
    if name.endswith("learning_rate") and isinstance(x, float) and about["rollbacks"]:
        return x * 2 ** len(about["rollbacks"])  # each rollback halved it
    return x
