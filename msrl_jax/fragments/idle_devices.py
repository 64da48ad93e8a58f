"""Advice on devices that a policy leaves idle: which numbers of environments, and which parameters, would use them all."""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msrl_jax.fragments.divisibility import Fit


def warn_of_idle(fit: Fit) -> str | None:
    """Says which devices stay idle, and how to use them.

    The policy itself is asked what it makes of other numbers, since nobody else knows how it divides devices.

    Args:
      fit: the policy, its devices and the sizes of the logical axes.

    Returns:
      A warning; None if no device is idle.
    """
    if not fit.idle:
        return None
    idle, total = len(fit.idle), len(fit.devices)
    envs = f" with num_envs={_num_envs(fit)}" if _num_envs(fit) else ""
    names = ", ".join(f"{d.platform}:{d.id}" for d in fit.idle)
    stay = "stay" if idle > 1 else "stays"
    fact = f"{idle} of {total} devices {stay} idle ({names}): {fit.layout.policy} uses {total - idle}{envs}"
    try:
        ways = [*_sizes(fit), *_parameters(fit)]
    except Exception as error:
        return f"{fact}. No other numbers were tried: {fit.layout.policy} raises {error!r}, where a policy raises ValueError"
    return f"{fact}. {' or '.join(ways)} would use all {total}" if ways else fact


def _num_envs(fit: Fit) -> int:
    """The number of environments, if all that belongs to them is of that size; else 0."""
    return fit.sizes["env"] if len({size for _, size in fit.leaves.get("env", ())}) == 1 else 0


def _sizes(fit: Fit) -> Iterator[str]:
    """The nearest numbers of environments, below and above, with which no device is idle."""
    now = _num_envs(fit)
    reach = len(fit.devices) if now else 0  # some multiple of any number of devices is no farther
    for numbers in (range(now - 1, max(now - reach, 1) - 1, -1), range(now + 1, now + reach + 1)):
        yield from _first(numbers, lambda n: dataclasses.replace(fit, leaves={**fit.leaves, "env": [("", n)]}), "num_envs={}")


def _parameters(fit: Fit) -> list[str]:
    """The policy with another number of devices somewhere, and if need be all others its own choice."""
    policy: Any = fit.policy
    if not dataclasses.is_dataclass(policy) or isinstance(policy, type):
        return []
    hints = typing.get_type_hints(type(policy))
    numbers = [f.name for f in dataclasses.fields(policy) if f.init and hints[f.name] in (int, int | None)]
    free = {name: None for name in numbers if hints[name] == int | None}

    def found(others: dict[str, None]) -> Iterator[str]:
        for name in numbers:

            def other(n: int, name: str = name) -> Fit:
                return dataclasses.replace(fit, policy=dataclasses.replace(policy, **(others | {name: n})))

            yield from _first(range(1, len(fit.devices) + 1), other, "{policy}")

    return list(found({})) or list(found(free))


def _first(numbers: Iterable[int], make: Callable[[int], Fit], text: str) -> Iterator[str]:
    """The first number with which no device is idle, in words."""
    for n in numbers:
        try:
            fit = make(n)
            idle = fit.idle
        except ValueError:  # the policy refuses this number
            continue
        if not idle:
            yield text.format(n, policy=fit.layout.policy)
            return
