"""What a run computes and where it writes: the arguments of `train` together with the folder of a run that goes on."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl_jax._checks import whole
from msrl_jax.data.experience import ExperienceWriter
from msrl_jax.data.files import check_new
from msrl_jax.data.spaces import bytes_per_step
from msrl_jax.envs.host.base import is_on_host
from msrl_jax.envs.params import describe as describe_params
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.policies.base import spec
from msrl_jax.training import folder
from msrl_jax.training.guard import GuardPolicy, check_guard
from msrl_jax.training.pace import chunk_length
from msrl_jax.training.resume import Saved, config_of, describe_env, env_params_of, find_dataset, holds_run, same_settings
from msrl_jax.training.setup import Setup, resolve, resolve_policy

DEFAULTS = {
    "algo": "ppo", "env": "CartPole-v1", "policy": "GPUOnly", "total_steps": 500_000, "seed": 0, "seeds": 1,
    "env_params": None, "pbt": None,
}  # fmt: skip
"""What a new run uses where nothing is given; a run that goes on uses what it began with."""

_TICKS = {"eval_episodes": 32, "eval_every": None, "chunk": None}
"""The same for what happens between chunks."""

_RING_BYTES = 2**26
"""Largest size of the steps of a chunk on the devices, if a run is recorded and `chunk` is not given."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """A run, ready to begin.

    Attributes:
      setup: the agent, its environments and its seeds.
      distribution: the distribution policy.
      devices: the devices that it may use; all if None.
      program: the iteration, compiled for the policy.
      iterations: iterations of the whole run.
      most: the largest number of iterations of a chunk.
      chunk: iterations of each chunk, if the user chose it.
      eval_episodes: episodes per evaluation; 0 never evaluates.
      eval_every: steps between evaluations; None evaluates at the end only.
      guard: what happens on nan and infinities.
      experience: writes the steps, if the run is recorded.
      description: the content of `config.json`.
    """

    setup: Setup
    distribution: DistributionPolicy
    devices: Sequence[Device] | None
    program: Program
    iterations: int
    most: int
    chunk: int | None
    eval_episodes: int
    eval_every: int | None
    guard: GuardPolicy
    experience: ExperienceWriter | None
    description: dict[str, Any]


def check_ticks(**given: Any) -> dict[str, int | None]:
    """Checks `eval_episodes`, `eval_every` and `chunk`, where they are given."""
    return {name: None if x is None else whole(name, x, 0 if name == "eval_episodes" else 1) for name, x in given.items()}


def settle(
    given: dict[str, Any],
    ticks: dict[str, int | None],
    config: Any,
    overrides: dict[str, Any],
    guard: GuardPolicy | None,
    record: Path | None,
    devices: Sequence[Device] | None,
    saved: Saved | None,
) -> Settings | None:
    """Decides what a run computes.

    Args:
      given: arguments of `train` that have defaults in `DEFAULTS`; None where not given.
      ticks: `eval_episodes`, `eval_every` and `chunk`; None where not given.
      config: the algorithm's config, or None.
      overrides: fields of the config.
      guard: what happens on nan and infinities, or None.
      record: file for the steps, or None.
      devices: the devices that the run may use; all if None.
      saved: the run that goes on, if one does.

    Returns:
      The settings; None if the saved run has done all its steps.

    Raises:
      ValueError: on an invalid argument, or one that contradicts the saved run.
    """
    setup, distribution, total_steps = resolve_run(given, config, overrides, saved)
    was: Mapping[str, Any] = {} if saved is None else saved.description
    guard = check_guard(guard or was.get("guard", "halt"), record)
    setup = dataclasses.replace(setup, skips=guard == "skip")
    kept = _TICKS if saved is None else was
    ticks = {name: kept.get(name) if x is None else x for name, x in ticks.items()}
    if setup.pbt is not None and ticks["chunk"] is not None:
        setup.pbt.check_chunk(ticks["chunk"])
    iterations = whole_iterations(total_steps, setup.behavior.agent.steps_per_iteration, saved)
    if setup.pbt is not None and iterations < setup.pbt.every:
        raise ValueError(
            f"PBT.every={setup.pbt.every}: the run has {iterations} iterations, so nobody would ever copy; use fewer, or a "
            f"larger total_steps (an iteration has {setup.behavior.agent.steps_per_iteration})"
        )
    if saved is not None and saved.checkpoint is not None and saved.iteration == iterations:
        return None
    setup, experience, most = recorded(setup, record, ticks["chunk"], iterations, distribution, saved)
    program = setup.compile(distribution, devices)
    description = describe(setup, program, distribution, total_steps, saved) | {
        **ticks,
        "guard": guard,
        "rollbacks": list(was.get("rollbacks", [])),
        "record": None if experience is None else os.path.abspath(experience.path),
    }
    return Settings(
        setup, distribution, devices, program, iterations, most, ticks["chunk"], ticks["eval_episodes"] or 0,
        ticks["eval_every"], guard, experience, description,
    )  # fmt: skip


def run_folder(out: str | os.PathLike | None, resume: bool | str | os.PathLike) -> tuple[Path | None, bool]:
    """The folder of the run, and whether the run in it goes on."""
    path = None if out is None else Path(out)
    if isinstance(resume, bool):
        if resume and path is None:
            raise ValueError("resume=True goes on with the run in out=...; give the folder there, or as resume=")
        return path, resume and path is not None and holds_run(path)
    where = Path(resume)
    if path is not None and path.absolute() != where.absolute():
        raise ValueError(f"out={str(path)!r} and resume={str(where)!r} are two folders; a run goes on in its own")
    return where, True


def resolve_run(
    given: dict[str, Any], config: Any, overrides: dict[str, Any], saved: Saved | None
) -> tuple[Setup, DistributionPolicy, int]:
    """The run that the arguments and the folder describe, its policy, and its number of steps."""
    was: Mapping[str, Any] = {}
    if saved is not None:
        was = saved.description
        same_settings(saved, given, config, overrides)
        fallback = {name: was[name] for name in ("policy", "total_steps", "seed", "seeds")}
        fallback |= {"algo": was["algorithm"], "env": was["env_spec"]}
        fallback["pbt"] = was.get("pbt")
        fallback["env_params"] = env_params_of(was, given["env_params"], f"the run in {saved.path}")
        dataset = find_dataset(saved, overrides.get("data", getattr(config, "data", None)))
        config, overrides = config_of(was, dataset), dict(was.get("settings") or {})
    else:
        fallback = DEFAULTS
    settings = {name: fallback[name] if value is None else value for name, value in given.items()}
    total_steps = whole("total_steps", settings["total_steps"])
    setup = resolve(
        settings["algo"], settings["env"], seed=settings["seed"], seeds=settings["seeds"], config=config,
        overrides=overrides | {"total_steps": total_steps}, env_params=settings["env_params"],
        pbt=settings["pbt"],
    )  # fmt: skip
    if saved is None and given["policy"] is None and is_on_host(setup.env):
        settings["policy"] = "MultiLearner"
    return setup, resolve_policy(settings["policy"]), total_steps


def whole_iterations(total_steps: int, per_iteration: int, saved: Saved | None) -> int:
    """The number of whole iterations of a run; raises ValueError if there is none, or if the saved run has done more."""
    iterations = total_steps // per_iteration
    if not iterations:
        raise ValueError(
            f"total_steps={total_steps} is less than the {per_iteration} steps of one iteration; use at least "
            f"{per_iteration}, or fewer environments or shorter unrolls"
        )
    if saved is not None and saved.iteration > iterations:
        raise ValueError(
            f"total_steps={total_steps}: the run in {saved.path} has done {saved.iteration * per_iteration} steps already; "
            "give more to extend it"
        )
    return iterations


def recorded(
    setup: Setup,
    record: str | os.PathLike | None,
    chunk: int | None,
    iterations: int,
    distribution: DistributionPolicy,
    saved: Saved | None,
) -> tuple[Setup, ExperienceWriter | None, int]:
    """The run with recorded environments if it is recorded, and the largest number of iterations of a chunk."""
    most = min(chunk or chunk_length(iterations), iterations)
    done: dict[str, int] | None = None
    if saved is not None:
        done = {"steps": 0, "parts": 0} if saved.checkpoint is None else saved.checkpoint.progress["recorded"]
        if done is None and record is not None:
            raise ValueError(
                f"record={os.fspath(record)!r}: the run in {saved.path} is not recorded from its start; leave it out"
            )
        was = saved.description["record"]
        if record is None:
            record = was
        elif was is None or os.path.abspath(record) != was:
            check_new(record)  # the further steps go to a file of their own
            done = None if done is None else done | {"parts": 0}
    if record is None:
        return setup, None, most
    agent = setup.behavior.agent
    if agent.unit != "environment steps":
        raise ValueError(f"record={os.fspath(record)!r}: {setup.algorithm.name} takes no environment steps; leave it out")
    steps = agent.steps_per_iteration // agent.env.num_envs
    if chunk is None:
        most = max(1, min(most, _RING_BYTES // (bytes_per_step(setup.env) * agent.steps_per_iteration * setup.members)))
    experience = ExperienceWriter(record, setup.about() | {"policy": spec(distribution)}, done)
    return setup.record(most * steps), experience, most


def describe(
    setup: Setup, program: Program, distribution: DistributionPolicy, total_steps: int, saved: Saved | None
) -> dict[str, Any]:
    """The content of `config.json`."""
    now = {
        "algorithm": setup.algorithm.name,
        "env": setup.env_name,
        "env_spec": setup.env_spec,
        "env_object": None if setup.env_spec else describe_env(setup.env if setup.env_params is None else setup.env.env),  # type: ignore[attr-defined]
        "env_params": describe_params(setup.env_params),
        "policy": spec(distribution),
        "seed": setup.seed,
        "seeds": setup.seeds,
        "settings": {name: list(values) for name, values in setup.settings.items()} or None,
        "pbt": None if setup.pbt is None else setup.pbt.to_json(),
        "total_steps": total_steps,
        "config": folder.to_json(setup.config),
        "data": setup.data_source,
        "versions": folder.versions(),
        "devices": folder.describe_devices(program.devices),
        "registers": program.registers,
        "resumed": [],
    }
    if saved is not None:
        was = {name: saved.description.get(name) for name in ("policy", "devices", "total_steps", "versions")}
        now["resumed"] = [*saved.description.get("resumed", []), {"iteration": saved.iteration, "before": was}]
    return now
