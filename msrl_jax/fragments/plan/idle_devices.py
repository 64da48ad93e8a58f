"""Warns about idle devices, and suggests numbers of environments and policy parameters that would use all devices."""

import dataclasses
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msrl_jax.fragments.passes.divisibility import Fit


def warn_of_idle(fit: Fit) -> str | None:
    """Says which devices stay idle, and how to use them.

    It finds suggestions by trying other numbers on the policy, because only the policy knows how it divides devices.

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
        return f"{fact}. Other numbers were not tried: {fit.layout.policy} raises {error!r}; raise ValueError to refuse one"
    return f"{fact}. {' or '.join(ways)} would use all {total}" if ways else fact


def _num_envs(fit: Fit) -> int:
    """The size of the axis "env" if there is one and all leaves agree on it; else 0."""
    return fit.sizes["env"] if len({size for _, size in fit.leaves.get("env", ())}) == 1 else 0


def _sizes(fit: Fit) -> Iterator[str]:
    """The nearest numbers of environments, below and above, that leave no device idle."""
    now = _num_envs(fit)
    reach = len(fit.devices) if now else 0  # a multiple of the number of devices is at most this far away
    for numbers in (range(now - 1, max(now - reach, 1) - 1, -1), range(now + 1, now + reach + 1)):
        yield from _first(numbers, lambda n: dataclasses.replace(fit, leaves={**fit.leaves, "env": [("", n)]}), "num_envs={}")


def _parameters(fit: Fit) -> list[str]:
    """The policy with one number of devices changed; if no change helps, also with its other optional numbers set to None."""
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
    """The first number that leaves no device idle, as text."""
    for n in numbers:
        try:
            fit = make(n)
            idle = fit.idle
        except ValueError:  # the policy refuses this number
            continue
        if not idle:
            yield text.format(n, policy=fit.layout.policy)
            return
