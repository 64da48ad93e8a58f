"""Helpers of distribution policies: dividing devices, writing policies as text, and declaring codecs."""

import inspect
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax

from msrl_jax.fragments import codecs
from msrl_jax.fragments.codecs import Codec
from msrl_jax.fragments.placement import Device, Edge
from msrl_jax.fragments.support.checks import shown, whole

CodecChoice: TypeAlias = str | Codec | Mapping[str, str | Codec] | None
"""The codecs of one direction: a codec or its name, for all values that it supports; a mapping text -> codec, for values whose
names (as shown in plans) contain the text, where the first match is used; or None."""


def policy_repr(policy: object) -> str:
    """Returns a policy in Python syntax, such as `SingleLearnerCoarse(learners=2)`: its name and its non-default parameters."""
    return f"{type(policy).__name__}({', '.join(_arguments(policy))})"


def policy_text(policy: object) -> str:
    """Returns a policy in command-line syntax, such as `SingleLearnerCoarse:learners=2`; `MODULE:CLASS` for a custom one.

    Raises ValueError if the text would lack a parameter, because the policy has no attribute of that name.
    """
    kind = type(policy)
    is_custom = kind.__module__.partition(".")[0] not in ("msrl_jax", "__main__")
    is_custom = is_custom and getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    if is_custom and (lost := [name for name in _parameters(policy) if not hasattr(policy, name)]):
        fact = f"the policy {kind.__name__} has the parameter {lost[0]!r}, but no attribute of that name"
        raise ValueError(f"{fact}, so the folder of a run cannot say what it is; make the class a frozen dataclass")
    return ":".join(filter(None, [kind.__module__ if is_custom else "", kind.__name__, ",".join(_arguments(policy))]))


def _arguments(policy: object) -> list[str]:
    values = {name: (getattr(policy, name, default), default) for name, default in _parameters(policy).items()}
    return [f"{name}={value!r}" for name, (value, default) in values.items() if value != default]


def _parameters(policy: object) -> dict[str, object]:
    """Returns the parameters with which a policy is made, and their defaults."""
    if type(policy).__init__ is object.__init__:
        return {}
    return {name: p.default for name, p in inspect.signature(type(policy)).parameters.items()}


ACTING = ("env", "worker")
"""The logical axes that are split over devices of environments, actors and learners."""

BUFFERING = (*ACTING, "shard")
"""The logical axes that are split over devices of replay buffers."""


def axes_to_split(axes: Sequence[str]) -> tuple[str, ...]:
    """Returns the logical axes that a placement splits: `axes`, and agents and members if divisible."""
    return (*axes, *(axis for axis in ("agent", "member") if axis not in axes))


def max_dividing_devices(available: int, sizes: Mapping[str, int], axes: Sequence[str] = ACTING) -> int:
    """Returns the largest number of devices, at most `available`, that divides the sizes of logical axes, or the number of
    members.
    """
    size = math.gcd(*(sizes[a] for a in axes if a in sizes))
    return max((n for n in range(1, available + 1) if size % n == 0 or sizes.get("member", 1) % n == 0), default=1)


def divide_devices(
    devices: Sequence[Device],
    num_devices: Mapping[str, int | None],
    sizes: Mapping[str, int],
    policy: object,
    axes: Sequence[str] = ACTING,
) -> dict[str, list[Device]]:
    """Divides devices between parts of a deployment, in order; if there is only one device, the parts share it.

    Args:
      devices: the devices.
      num_devices: number of devices of each part; one may be None, the largest remaining number that divides the axes.
      sizes: the size of each logical axis.
      policy: the policy, for errors.
      axes: the logical axes that are split over the part with None.

    Returns:
      The devices of each part.

    Raises:
      ValueError: if a number is below 1 or there are not enough devices.
    """
    name = policy_repr(policy)
    # Those of a custom policy may be anything; the standard policies check theirs when they are made.
    num_devices = {part: None if count is None else whole(f"{name}: {part}", count) for part, count in num_devices.items()}
    explicit = sum(count for count in num_devices.values() if count is not None)
    total = explicit + sum(count is None for count in num_devices.values())
    if len(devices) == 1 and total == len(num_devices):
        return {part: list(devices) for part in num_devices}
    if total > len(devices):
        parts = ", ".join(f"{part}={'1 or more' if count is None else count}" for part, count in num_devices.items())
        raise ValueError(
            f"{name} needs {total} devices ({parts}), but there are {len(devices)}. "
            "Use fewer, or create more: on a CPU, `jax.config.update('jax_num_cpu_devices', n)` before JAX starts "
            "(`--cpu-devices n` on the command line)"
        )
    remaining = len(devices) - explicit
    counts = {
        part: max_dividing_devices(remaining, sizes, axes) if count is None else count for part, count in num_devices.items()
    }
    devices_by_part: dict[str, list[Device]] = {}
    start = 0
    for part, count in counts.items():
        devices_by_part[part] = list(devices[start : start + count])
        start += count
    return devices_by_part


def _codecs_by_label(choice: CodecChoice) -> Mapping[str, str | Codec]:
    return choice if isinstance(choice, Mapping) else {} if choice is None else {"": choice}


def edges(lower: str, upper: str, *, up: CodecChoice = None, down: CodecChoice = None) -> tuple[Edge, ...]:
    """Returns the edges with codecs between two placements, given by name: `up` from `lower` to `upper`, `down` back.

    Raises ValueError on an unknown codec.
    """
    ways = (lower, upper, up), (upper, lower, down)
    return tuple(
        Edge(a, b, codecs.get(codec), only) for a, b, choice in ways for only, codec in _codecs_by_label(choice).items()
    )


def check_counts(policy: object, *fields: str) -> None:
    """Makes numbers of devices integers; raises ValueError if one is below 1, or is None and not by default."""
    for name in fields:
        if not (getattr(policy, name) is None and getattr(type(policy), name) is None):
            object.__setattr__(policy, name, whole(f"{type(policy).__name__}: {name}", getattr(policy, name)))


def check_codecs(policy: object, *fields: str) -> None:
    """Raises TypeError if a field of a policy is not a `CodecChoice`."""
    for name in fields:
        choice = getattr(policy, name)
        if not all(
            isinstance(only, str) and isinstance(codec, str | Codec) for only, codec in _codecs_by_label(choice).items()
        ):
            raise TypeError(
                f"{type(policy).__name__}: {name}={shown(choice)} is not a codec; use the name of one (such as 'bfloat16'; "
                "codecs.names() lists them), a Codec, a mapping from parts of values' names to these, or None"
            )


def on_platform(platform: str | None, devices: Sequence[Device]) -> list[Device]:
    """Returns the devices of a platform, such as "cpu", in this process; the given devices if `platform` is None."""
    if platform is None:
        return list(devices)
    if jax.process_count() > 1:
        raise ValueError(f"env_platform={platform!r} needs a single process, but there are {jax.process_count()}; remove it")
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError as error:
        raise ValueError(f"env_platform={platform!r}: this process has no such devices ({error})") from None
