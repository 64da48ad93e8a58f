"""Sweeps: chooses and checks all trials, then trains them as members of as few programs as possible.

    sweep.json   what the sweep computes, its programs, and its trials
    stage-S/program-P/batch-B/   the folder of a run
    table.json   the results of every trial; table.csv holds the same
    lock         held by the process that writes to the folder

Runs have their folders from the start; the table is written at the end.
"""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msrl_jax import algorithms, policies
from msrl_jax._files import as_path
from msrl_jax.configs.deferred import is_object
from msrl_jax.envs import Environment
from msrl_jax.envs.base import is_on_host
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.support import compiling
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.policies.helpers import policy_text
from msrl_jax.run import processes
from msrl_jax.run.disk import folder
from msrl_jax.run.experiment.plain_data import RunFolderError, plain_fields
from msrl_jax.run.loop import hooks
from msrl_jax.run.loop.callbacks import ProgressDisplay, choose_display
from msrl_jax.run.prepare import ARGUMENTS, make_experiment
from msrl_jax.search import space
from msrl_jax.search.space import Method
from msrl_jax.search.sweep_result import SweepResult, write_sweep_table
from msrl_jax.search.trial_scheduler import SWEEP, TrialScheduler


@entry
@processes.in_words()
def sweep(
    algo: Any = None,
    env: str | Environment | None = None,
    *,
    num: int | None = None,
    method: Method = "random",
    policy: str | DistributionPolicy | None = None,
    devices: Sequence[Device] | None = None,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    halving: int | None = None,
    min_steps: int | None = None,
    members_at_once: int | None = None,
    eval_episodes: int = 32,
    checkpoint_every: int | str | None = None,
    time_limit: float | str | None = None,
    progress: ProgressDisplay = "auto",
    **overrides: Any,
) -> SweepResult:
    """Trains many settings of an algorithm, and ranks them by their returns or by a metric of the environment.

    Trials that differ only in tunable fields are members of one program; other fields, such as `num_envs`, need a separate
    program per value. A trial computes the same as `train` with its setting, up to float tolerance, under every policy. A
    member with non-finite values does not affect the others; its return is nan.

    Args:
      algo: an algorithm, as in `train`; or an `Experiment`, whose config and seeds the trials have.
      env: an environment, or the name of one, as in `train`.
      num: number of trials; for a grid, the number of points of each field with a distribution, bounds included.
      method: "random"; "sobol", which fills the space more evenly; "grid", all combinations; or "optuna", which
        repeatedly gets a few trials from an Optuna study (with its TPE sampler).
      policy: a distribution policy, or the name of one, as in `train`.
      devices: the devices to use; all if None.
      out: folder of the sweep; None writes nothing and keeps the results of all runs in memory.
      resume: resume the sweep in `out`, or start it if there is none. The table is the same as without an interruption. Policy
        and devices may differ.
      halving: with a factor such as 3, all trials train for a few steps, the best third for three times that number, and so on
        (successive halving); None trains all trials to the end.
      min_steps: the steps until the first comparison; by default so few that the last comparison leaves one trial.
      members_at_once: number of members to train together; None takes the estimated number that fits in memory. With "optuna",
        the default is the members of an eighth of the trials.
      eval_episodes: number of greedy episodes of each member, whose mean return ranks it; 0 uses the training return.
      checkpoint_every: steps or time between checkpoints of a run, as in `train`.
      time_limit: time after which the sweep is saved and ends, as in `train`.
      progress: "auto", "bar", "lines", "notebook" or False, as in `train`.
      **overrides: arguments of `train` that determine what is computed: `total_steps`, `seed`, which also chooses the trials,
        `seeds`, the members of each trial, `env_params` and `rank_by`; and fields of the algorithm's config. For a swept
        field, give a list of values, `envs.uniform(low, high)`, `envs.log_uniform(low, high)` or `envs.choice([...])`, also
        as text: `"log:1e-4:1e-2"`, `"uniform:0.9:1"`, `"1e-4,3e-4"`. For a field whose value is a sequence, such as
        `hidden_sizes`, give a list of sequences.

    Returns:
      The result. Ctrl-C, SIGTERM, SIGHUP and the time limit end the sweep after the current chunk of its run; the partial
      result has `interrupted` True.

    Raises:
      ValueError: before anything compiles, if a name is unknown or a value of any trial is invalid; or if a single trial does
        not fit in memory.
      RunFolderError: a ValueError, if the folder holds another sweep.
      ImportError: if `method` is "optuna" and Optuna is not installed.
    """
    limit = None if time_limit is None else hooks.parse_duration("time_limit", time_limit)
    choose_display(progress)
    num = space.check_method(method, num, halving)
    fields = {name: overrides.pop(name) for name in [*overrides] if name not in ARGUMENTS}
    template, episodes = make_experiment(algo, env, **overrides), whole("eval_episodes", eval_episodes, least=0)
    if template.settings or template.pbt is not None or template.guard not in ("halt", "ignore"):
        raise ValueError(
            "the members of a sweep are its trials, and one with non-finite values affects no other; leave pbt and guard out, "
            "and pass fields with several values to sweep"
        )
    trials_at_once = None if members_at_once is None else whole("members_at_once", members_at_once) // template.seeds
    if trials_at_once == 0:
        fact = f"members_at_once={members_at_once}: the seeds of a trial train together"
        raise ValueError(f"{fact}; use at least seeds={template.seeds}")
    config = template.algorithm
    if resume and not fields:
        raise ValueError("resume=True: give the arguments of the sweep again; they are compared with those in its folder")
    axes, constants = space.read_axes(type(config), fields)
    config = algorithms.make(config, {name: value for name, value in constants.items() if is_object(value)})
    path = None if out is None else as_path("out", out).absolute()
    if resume and path is None:
        raise ValueError("resume=True needs the folder of the sweep; give it as out=...")
    base = dataclasses.replace(template, algorithm=config, guard="ignore")
    distribution = policies.get(base.usual_policy if policy is None else policy)
    about = base.to_json()
    description = folder.to_json(
        about
        | {
            "config": about["config"] | plain_fields(constants),
            "policy": policy_text(distribution),
            "eval_episodes": episodes,
            "method": method,
            "num": num,
            "halving": halving,
            "min_steps": min_steps,
            "members_at_once": members_at_once,
            "fields": {
                axis.field: {"kind": axis.values.kind, "numbers": axis.values.numbers, "is_whole": axis.is_whole}
                for axis in axes
            },
        }
    )
    watch = {"eval_episodes": episodes, "checkpoint_every": checkpoint_every, "progress": progress}
    shares_programs = not is_on_host(base.environment)
    scheduler = TrialScheduler(
        base, constants, distribution, devices, watch, shares_programs, trials_at_once, path, description, {}
    )
    trials = [] if method == "optuna" else scheduler.make(space.choose_trials(axes, method, num, base.seed))
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling.on_disk())
        requests = stack.enter_context(hooks.stop_requests(limit))
        with processes.together("setting up the sweep"):
            if path is not None:
                if processes.is_first():
                    stack.enter_context(folder.locked(path))
                scheduler.saved_sweep = open_sweep(path, description, resume)
            repeats = num - len(trials) if num is not None and method in ("random", "sobol") else 0
            left_out = f" ({repeats} repeats are left out)" if repeats else ""
            scheduler.say(f"sweep: {base.name} on {base.env_name}, {len(trials) or num} trials{left_out}")
            scheduler.prepare(trials)
            if method == "optuna":
                assert num is not None
                trials_per_stage = trials_at_once or -(-num // 8)
                end = base.total_steps
                stages = space.optuna_stages(
                    scheduler.trials,
                    axes,
                    scheduler.make,
                    num=num,
                    trials_per_stage=trials_per_stage,
                    steps=end,
                    seed=base.seed,
                )
            else:
                steps = space.rung_steps(base.total_steps, halving, min_steps, len(trials), scheduler.least_steps)
                stages = space.halving_stages(scheduler.trials, steps, halving)
        reason = scheduler.conduct(stages, requests)
        table, status = space.ranked(scheduler.trials.values()), "interrupted" if reason else "finished"
        objects = {name: value for name, value in scheduler.base.objects.items() if name not in ("env", "env_params")}
        runs, env = tuple(scheduler.runs), scheduler.base.env
        result = SweepResult(table, runs, status, reason, description, env, objects, folder=path)
        if path is not None and processes.is_first():
            write_sweep_table(result, path)
        processes.gathered("")  # keep all processes alive while one writes
    return result


def open_sweep(path: Path, description: Mapping[str, Any], resume: bool) -> dict[str, Any]:
    """Returns the content of `sweep.json`, empty without the file; raises RunFolderError if the folder is another sweep's."""
    if not resume or not (path / SWEEP).exists():
        folder.check_free(path, "sweep", [SWEEP])
        return {}
    saved_sweep = folder.read_json(path / SWEEP, "sweep", "programs", "trials")
    saved_facts, current = _facts(saved_sweep["sweep"]), _facts(description)
    if current["members_at_once"] is None:
        current["members_at_once"] = saved_facts["members_at_once"]
    for name in {**saved_facts, **current}:
        saved_value, value = saved_facts.get(name, "a constant"), current.get(name, "a constant")
        if saved_value != value:
            raise RunFolderError(
                f"the sweep in {path} has {name}={saved_value}, and cannot resume with {name}={value}; give the same, or start "
                "a new sweep in another folder"
            )
    return saved_sweep


def _facts(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that must not change when a sweep resumes, by name, including fixed and swept fields of the config."""
    facts = {name: value for name, value in description.items() if name not in ("policy", "config", "fields")}
    return facts | description["config"] | description["fields"]
