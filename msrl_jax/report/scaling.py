"""The scaling of a plan: transfers, reductions and memory of each device, for several numbers of devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from msrl_jax import policies
from msrl_jax.fragments.plan.plan import Plan
from msrl_jax.fragments.plan.text import size
from msrl_jax.fragments.plan.topologies import plan_devices
from msrl_jax.fragments.runtime.memory import planning_for
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.terminal import table
from msrl_jax.policies.helpers import policy_text
from msrl_jax.run.prepare import make_experiment


@dataclasses.dataclass(frozen=True)
class Scaled:
    """The plan of one policy on some devices."""

    algorithm: str
    policy: str
    devices: str  # such as "tpu:v5e:8x8"
    count: int  # number of devices
    num_envs: int | None  # None if the algorithm has no environments
    plan: Plan
    tracing_seconds: float  # to trace the iteration and to cut it into programs
    xla_seconds: float  # to compile the programs

    def to_dict(self) -> dict[str, Any]:
        """Returns the numbers of each device as plain Python data, by placement; times and bytes are of one iteration."""
        plan = self.plan
        about = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "plan"}
        collectives = {
            name: sum(c.times * p.runs for p in plan.programs if p.placement == name for c in p.collectives)
            for name in plan.placements
        }
        return about | {
            "idle": len(plan.idle),
            "sizes": {name: len(devices) for name, devices in plan.placements.items()},
            "dispatches": plan.dispatches,
            "bytes_arriving": plan.bytes_arriving,
            "collectives": collectives,
            "bytes_of_collectives": plan.bytes_of_collectives,
            "memory": plan.memory,
            "launches": plan.launches,
        }


def plans(
    algo: Any = None,
    env: str | None = None,
    policy: str | None = None,
    devices: Sequence[str] = (),
    envs_per_device: int | None = None,
    **overrides: Any,
) -> list[Scaled]:
    """Plans an algorithm for several sets of devices, named as in `plan_devices`; compiles, but runs nothing. `overrides` are
    arguments of `train` that determine what is computed, and fields of the config.

    If the policy is None, it is that of `train`; in its text, `{n}` and `{half}` stand for the number of devices and half of
    it. Raises ValueError if a name is unknown or devices do not fit the policy, ImportError if a compiler is missing.
    """
    if envs_per_device is not None:
        whole("envs_per_device", envs_per_device)
        if "num_envs" in overrides:
            raise ValueError("num_envs and envs_per_device both choose the number of environments; leave one out")
    scaled = []
    for name, plan_on in [(name, plan_devices(name)) for name in devices]:  # check all names before the first plan
        count = len(plan_on)
        sized = {} if envs_per_device is None else {"num_envs": envs_per_device * count}
        with planning_for(plan_on):
            experiment = make_experiment(algo, env, **overrides | sized)
            text = experiment.usual_policy if policy is None else policy
            placed = policies.get(text.replace("{n}", str(count)).replace("{half}", str(max(1, count // 2))))
            program = experiment.compile(placed, plan_on)
            tracing_seconds, plan = program.compile_seconds, program.explain()
        num_envs = getattr(experiment.algorithm, "num_envs", None)
        seconds = tracing_seconds, program.compile_seconds - tracing_seconds
        scaled.append(Scaled(experiment.name, policy_text(placed), name, count, num_envs, plan, *seconds))
    return scaled


def cells_of(row: Scaled, columns: Sequence[str]) -> list[str]:
    """Returns the cells of a table row."""
    d = row.to_dict()

    def each(name: str, text: Callable[[int], str] = size) -> str:
        """Formats a number for every placement; once, if it is the same for all."""
        values = {placement: text(number) for placement, number in d[name].items()}
        differ = len({*values.values()}) > 1
        return (
            ", ".join(f"{k} {number_text}" for k, number_text in values.items()) if differ else next(iter(values.values()), "-")
        )

    cells = {
        "policy": row.policy,
        "devices": row.devices,
        "idle": str(d["idle"]),
        "envs": str(row.num_envs or "-"),
        "dispatches": str(d["dispatches"]),
        "launches": each("launches", "{:,}".format),
        "arriving": each("bytes_arriving"),
        "collectives": each("collectives", str),
        "in bytes": each("bytes_of_collectives"),
        "memory": each("memory"),
        "tracing": f"{row.tracing_seconds:.1f} s",
        "XLA": f"{row.xla_seconds:.1f} s",
    }
    return [cells[name] for name in columns]


def format_plans(rows: Sequence[Scaled]) -> str:
    """Formats plans as a table that fits the terminal; bytes and numbers are of one device and one iteration.

    The table has a column for launches if all plans count them; plans for CPUs do not.
    """
    columns = ["policy", "devices", "idle", "envs", "dispatches", "arriving", "collectives", "in bytes", "memory"]
    if all(row.plan.launches for row in rows):
        columns.insert(columns.index("arriving"), "launches")
    return "\n".join(table(columns, [cells_of(row, columns) for row in rows]))
