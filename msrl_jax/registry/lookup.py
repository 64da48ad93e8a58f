"""Looks up algorithms by name, makes their configs, and checks whether they support an environment."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from msrl_jax import envs
from msrl_jax.configs.config import DECLARED
from msrl_jax.configs.names import all_fields
from msrl_jax.configs.replacing import import_options, with_values
from msrl_jax.envs.base import check_made, env_name
from msrl_jax.envs.privileged import has_privileged
from msrl_jax.fragments.support import checks, naming
from msrl_jax.fragments.support.checks import shown, suggestion
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.registry import files, resolve
from msrl_jax.registry.table import ALGORITHMS, check_name


def names() -> list[str]:
    """Returns the names of all algorithms."""
    return sorted(ALGORITHMS)


@entry
def get(algorithm: str | type) -> type:
    """Looks up the config of an algorithm.

    Args:
      algorithm: its name; the path of a file with its config (`my_ppo.py`, or `my_ppo.py:PPO` if the file has several configs);
        `MODULE:CLASS` of a config that is defined elsewhere; or the config class.

    Returns:
      The config, a class.

    Raises:
      TypeError: if it is none of these.
      ValueError: if the name is unknown (the message suggests the nearest one), if a custom config has the name of an algorithm
        in an optional room, or if the file fails to run or has no such config.
    """
    if _is_config(algorithm):
        assert isinstance(algorithm, type)
        if "multi_agent" not in vars(algorithm):
            base = next(c.__name__ for c in algorithm.__mro__ if "multi_agent" in vars(c))
            raise TypeError(
                f"{algorithm.__name__} is a subclass of the config {base}, but not a config itself; decorate it with "
                "algorithms.config, under a new name"
            )
        check_name(algorithm)
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(f"the algorithm is {shown(algorithm)}; give a config such as PPO(), or a name: {', '.join(names())}")
    if files.is_file(algorithm):
        return get(files.load(algorithm))
    if ":" in algorithm:
        return get(naming.imported("algorithm", algorithm, "a class made with algorithms.config", _is_config))
    return get(files.newest(checks.find("algorithm", ALGORITHMS, algorithm)))


def _is_config(value: object) -> bool:
    return isinstance(value, type) and hasattr(value, "build") and hasattr(value, "multi_agent")


@entry
def make(algorithm: Any, overrides: Mapping[str, Any]) -> Any:
    """Makes the config of a run.

    Args:
      algorithm: an argument of `get`, or a config whose fields are the defaults.
      overrides: fields to replace; fields of options have dotted names, such as `exploration.base`.

    Returns:
      The config.

    Raises:
      ValueError: if the algorithm or a field is unknown (the message suggests the nearest one), or a value is invalid.
    """
    base = as_config(algorithm)
    import_options(type(base), overrides)
    kind, field_names = type(base), list(all_fields(type(base)))
    for name in overrides:
        if name not in field_names:
            near = suggestion(name, field_names) or _having(name, base)
            raise ValueError(f"{kind.__name__} has no field {name!r}{near}; its fields are {', '.join(field_names) or 'none'}")
    new = with_values(base, overrides)
    resolve.check(new)
    resolve.check_fits(new)
    return new


def as_config(algorithm: Any) -> Any:
    """Returns a config as it is, or the default config for an argument of `get`."""
    if dataclasses.is_dataclass(algorithm) and not isinstance(algorithm, type):
        get(type(algorithm))
        return algorithm
    return get(algorithm)()


def _having(name: str, config: Any) -> str:
    """Lists the algorithms for the same actions that have a field, for a message about one that has not."""
    similar = [c for c in DECLARED.values() if (c.actions, c.multi_agent) == (config.actions, config.multi_agent)]  # type: ignore[attr-defined]
    having = sorted(c.name for c in similar if name in all_fields(c))  # type: ignore[attr-defined]
    return f"; {', '.join(having)} have it" if having and config.actions else ""


def check_env(config: Any, env: Any) -> None:
    """Raises TypeError unless the algorithm supports the environment, ValueError if JAX may not promote dtypes or ranks."""
    check_made(env)
    for setting, default in {"dtype": "standard", "rank": "allow"}.items():
        if (value := str(getattr(jax.config, f"jax_numpy_{setting}_promotion"))) not in (default, "warn"):
            raise ValueError(
                f"jax_numpy_{setting}_promotion={value!r}: algorithms rely on the promotion of {setting}s; "
                f"call this under jax.numpy_{setting}_promotion({default!r})"
            )
    several = envs.has_agents(env)
    if config.multi_agent in (None, several):
        if has_privileged(env) and not config.privileged:
            privileged_names = ", ".join(n for n in names() if ALGORITHMS[n].privileged)  # type: ignore[attr-defined]
            alternatives = "the method global_state of environments of several agents" if several else privileged_names
            raise TypeError(
                f"environment {env_name(env)!r} has a privileged_state, which only critics see, and algorithm {config.name!r} "
                f"does not take one; use {alternatives}, or envs.Unprivileged(env)"
            )
        return
    name = env_name(env)
    alternatives = [n for n, c in ALGORITHMS.items() if c.multi_agent in (None, several) and c.offline == config.offline]  # type: ignore[attr-defined]
    if config.multi_agent:
        fact = f"algorithm {config.name!r} trains several agents, but environment {name!r} has one: it has no `agents`"
    else:
        fact = f"algorithm {config.name!r} trains one agent, but environment {name!r} has {len(env.agents)}"
    remedy = f"use {', '.join(sorted(alternatives))}, or another environment"
    if not alternatives:
        remedy = "no algorithm that learns from data alone trains several agents"
    raise TypeError(f"{fact}; {remedy}")
