"""Environments by name: `make`, `register`, `names`."""

from collections.abc import Callable
from typing import Any

from msrl_jax import _gymnax, _jaxmarl, _pgx, _registry
from msrl_jax._spelling import suggestion
from msrl_jax.envs.agents.games import KuhnPoker, RockPaperScissors
from msrl_jax.envs.base import Environment

_factories: dict[str, Callable[..., Environment]] = {
    "KuhnPoker": KuhnPoker, "RockPaperScissors": RockPaperScissors,
}  # fmt: skip

SUITES = (_jaxmarl.PREFIX, _pgx.PREFIX)
"""The beginnings of names that belong to suites of environments."""


def register(name: str, factory: Callable[..., Environment]) -> None:
    """Registers an environment for `make`, `train` and the command line.

    Args:
      name: the name for `make`.
      factory: a function or class that takes the keyword arguments of `make` and returns an environment.

    Raises:
      TypeError: if the factory cannot be called.
      ValueError: if the name is taken.
    """
    if not callable(factory):
        raise TypeError(f"register({name!r}): {factory!r} cannot be called; pass a class or a function")
    _registry.add("environment", dict.fromkeys(names()), name, factory)
    _factories[name] = factory


def make(name: str, **params: Any) -> Environment:
    """Builds an environment.

    Args:
      name: a registered name, or one of gymnax's (`"CartPole-v1"`, `"Breakout-MinAtar"`), or one of JaxMARL's behind
        `jaxmarl:` (`"jaxmarl:MPE_simple_spread_v3"`), or one of pgx's behind `pgx:` (`"pgx:tic_tac_toe"`); `names` lists all.
      **params: arguments of the registered factory; of a gymnax environment, fields of its `EnvParams`
        (`max_steps_in_episode=100`) and arguments of its constructor; of a JaxMARL environment, arguments of its constructor.

    Returns:
      The environment; a `MultiAgentEnvironment` if it has several agents.

    Raises:
      TypeError: if the name is no text.
      ImportError: if JaxMARL or pgx is needed and not installed; the message says how to install it.
      ValueError: if there is no environment with that name, or it has no such parameter.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of the environment is {name!r}; write one such as 'CartPole-v1', envs.names() lists all")
    if name in _factories:
        return _factories[name](**params)
    if name.startswith(_jaxmarl.PREFIX):
        from msrl_jax.envs.agents import jaxmarl_env

        return jaxmarl_env.make(name.removeprefix(_jaxmarl.PREFIX), **params)
    if name.startswith(_pgx.PREFIX):
        from msrl_jax.envs.agents import pgx_env

        return pgx_env.make(name.removeprefix(_pgx.PREFIX), **params)
    if name not in names():
        raise ValueError(
            f"unknown environment {name!r}{suggestion(name, names())}; envs.names() lists all, envs.register adds one"
        )
    _gymnax.put_off()
    from msrl_jax.envs import gymnax_env

    return gymnax_env.make(name, **params)


def names() -> list[str]:
    """The names of all environments: the registered ones, gymnax's, and those of JaxMARL and pgx if they are installed."""
    return [*_factories, *_gymnax.names(), *_jaxmarl.names(), *_pgx.names()]
