"""Sweeps: trials are chosen and checked first, then trained as the members of as few programs as possible."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from msrl_jax import _compile_cache, algorithms, envs
from msrl_jax._checks import as_path, check_seed, whole
from msrl_jax._streams import progress_stream
from msrl_jax.envs import Environment
from msrl_jax.envs.base import env_name
from msrl_jax.envs.host.base import is_on_host
from msrl_jax.envs.params import GivenParams
from msrl_jax.envs.params import describe as describe_params
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.policies.base import spec as policy_text
from msrl_jax.search import sw_plan as plan
from msrl_jax.search import sw_record as record
from msrl_jax.search import sw_search as search
from msrl_jax.search.result import SweepResult
from msrl_jax.search.space import Axis, Method, check_method, choose, count_of, read_axes
from msrl_jax.search.sw_batch import Common
from msrl_jax.search.sw_conduct import Sweep
from msrl_jax.search.sw_halving import rung_steps
from msrl_jax.search.sw_trials import Group, Trial, make_trials, ranked
from msrl_jax.training import folder, processes, stopping
from msrl_jax.training.progress import Progress, choose_display
from msrl_jax.training.resume import describe_env
from msrl_jax.training.setup import resolve_policy


@processes.in_words()
def sweep(
    algo: str = "ppo",
    env: str | Environment = "CartPole-v1",
    *,
    num: int | None = None,
    method: Method = "random",
    policy: str | DistributionPolicy = "GPUOnly",
    total_steps: int = 500_000,
    seed: int = 0,
    seeds: int = 1,
    config: Any = None,
    devices: Sequence[Device] | None = None,
    out: str | os.PathLike | None = None,
    resume: bool = False,
    halving: int | None = None,
    rungs: int | None = None,
    min_steps: int | None = None,
    members_at_once: int | None = None,
    eval_episodes: int = 32,
    checkpoint_every: int | str | None = None,
    time_limit: float | str | None = None,
    env_params: GivenParams | None = None,
    progress: Progress = "auto",
    **fields: Any,
) -> SweepResult:
    """Trains many settings of an algorithm, and ranks them by their returns.

    Trials that differ in `Tunable` fields only are members of one program; other fields, such as `num_envs`, make a program of
    their own. A trial computes what `train` computes for its setting, up to float tolerance, under every policy. A member whose
    numbers become nan or infinite disturbs no other: its return is nan.

    Args:
      algo: name of an algorithm, such as `"ppo"`.
      env: an environment, or the name of one, as in `train`.
      num: number of trials; of a grid, the points of each field that has a distribution, between its bounds and on them.
      method: "random"; "sobol", which fills the space more evenly; "grid", all combinations; or "optuna", which asks a study of
        Optuna (its TPE sampler) for the next trials after every few.
      policy: a distribution policy, or the name of one, as in `train`.
      total_steps: environment steps of every member, rounded down to whole iterations.
      seed: the seed of the choice of trials, and the first seed of each trial.
      seeds: members of each trial, with the seeds `seed`, `seed + 1`, ...
      config: the config to start from; the algorithm's defaults if None.
      devices: the devices to use; all if None.
      out: folder of the sweep; None writes nothing, and keeps the results of all runs in memory.
      resume: go on with the sweep in `out`, or start it there if there is none. Its table is then that of a sweep that was
        never interrupted. Policy and devices may differ.
      halving: with a factor such as 3, all trials train for a few steps, the best third of them for three times as many, and so
        on (successive halving); None trains all to the end.
      rungs: the number of comparisons, the last one included; by default as many as leave one trial.
      min_steps: the steps up to the first comparison, in place of `rungs`.
      members_at_once: members that are trained side by side; None takes as many as memory is estimated to hold. With "optuna",
        those of an eighth of the trials by default.
      eval_episodes: number of greedy episodes of each member, whose mean return ranks it; 0 takes the training return.
      checkpoint_every: steps or time between checkpoints of a run, as in `train`.
      time_limit: time after which the sweep is saved and ends, as in `train`.
      env_params: what parameters of the environment are drawn from, as in `train`.
      progress: "auto", "bar", "lines", "notebook" or False, as in `train`.
      **fields: fields of the algorithm's config. A swept field has a list of its values, `envs.uniform(low, high)`,
        `envs.log_uniform(low, high)` or `envs.choice([...])`, also as text: `"log:1e-4:1e-2"`, `"uniform:0.9:1"`,
        `"1e-4,3e-4"`. A field whose single value is a sequence, such as `hidden_sizes`, has a list of sequences.

    Returns:
      The result. Ctrl-C, SIGTERM, SIGHUP and the time limit end the sweep after the current chunk of its run; the result so far
      has `interrupted` True.

    Raises:
      ValueError: before anything compiles, on an unknown name or an invalid value of any trial; if a trial alone does not fit
        into memory.
      RunFolderError: a ValueError, if the folder holds another sweep.
      ImportError: if Optuna is asked for and not installed.
    """
    limit = None if time_limit is None else stopping.seconds("time_limit", time_limit)
    choose_display(progress)
    method, num = check_method(method, num)
    seeds, total_steps = whole("seeds", seeds), whole("total_steps", total_steps)
    seed, episodes = check_seed(seed, seeds), whole("eval_episodes", eval_episodes, least=0)
    wanted = plan.trials_at_once(members_at_once, seeds)
    algorithm = algorithms.get(algo)
    if resume and not fields:
        raise ValueError("resume=True: give the arguments of the sweep again; they are compared with those in its folder")
    axes, constants = read_axes(algorithm, fields)
    distribution = resolve_policy(policy)
    path = None if out is None else as_path("out", out).absolute()
    if resume and path is None:
        raise ValueError("resume=True goes on with the sweep in out=...; give the folder there")
    if method == "optuna":
        search.check_optuna()
        if halving is not None:
            raise ValueError('halving= chooses among trials that are known from the start; leave it out with method="optuna"')
    made_env = envs.make(env) if isinstance(env, str) else env
    algorithm.check_env(made_env)
    common = Common(
        algorithm, env, distribution, devices, total_steps, seed, seeds, config, constants, episodes, checkpoint_every,
        env_params, progress,
    )  # fmt: skip
    groups: list[Group] = []

    def make(chosen: Sequence[Mapping[str, Any]], first: int = 0) -> list[Trial]:
        shared = constants | {"total_steps": total_steps}
        return make_trials(algorithm, config, shared, chosen, groups, first=first, shared=not is_on_host(made_env))

    count = count_of(method, num) if method == "optuna" else 0
    trials = [] if count else make(choose(axes, method, num, seed))
    description = _describe(common, axes) | {
        "method": method, "num": num, "halving": halving, "rungs": rungs, "min_steps": min_steps,
        "members_at_once": members_at_once,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compile_cache.on())
        requests = stack.enter_context(stopping.stop_requests(limit))
        with processes.together("setting up the sweep"):
            if path is not None and processes.is_first():
                stack.enter_context(folder.locked(path))
            saved = {} if path is None else record.open_sweep(path, description, resume)
            run = Sweep(common, groups, wanted, path, description, saved, _say if progress else lambda text: None)
            run.say(f"sweep: {algorithm.name} on {description['env']}, {_counted(count or len(trials), num, method)}")
            run.prepare(trials)
            if count:
                order = search.asked(axes, make, num=count, each=wanted or -(-count // 8), until=total_steps, seed=seed)
            else:
                least = max(share.steps_per_iteration for share in run.shares)
                order = search.rungs(trials, rung_steps(total_steps, halving, rungs, min_steps, len(trials), least), halving)
        reason = run.conduct(order, requests)
        table = tuple(ranked([run.trials[number] for number in sorted(run.trials)]))
        status = "interrupted" if reason else "finished"
        if path is not None and processes.is_first():
            record.write_table(path, table, run.runs, {"status": status, "stop_reason": reason})  # type: ignore[arg-type]
        processes.gathered("")  # no process ends while another one writes
    return SweepResult(
        table, tuple(run.runs), status, reason, description, None if isinstance(env, str) else env, path
    )  # fmt: skip


def _counted(count: int, num: int | None, method: str) -> str:
    left_out = num - count if num is not None and method in ("random", "sobol") else 0
    return f"{count} trials" + f" ({left_out} repeats are left out)" * (left_out > 0)


def _say(text: str) -> None:
    if processes.is_first():
        print(text, file=progress_stream(), flush=True)


def _describe(common: Common, axes: Sequence[Axis]) -> dict[str, Any]:
    """What the runs of a sweep compute, as plain data."""
    algorithm, env = common.algorithm, common.env
    start = algorithm.config() if common.config is None else common.config
    constants = {name: algorithm.config.canonical(name, value) for name, value in common.constants.items()}
    spec = {
        "algorithm": algorithm.name,
        "env": env if isinstance(env, str) else env_name(env),
        "env_spec": env if isinstance(env, str) else None,
        "env_object": None if isinstance(env, str) else describe_env(env),
        "env_params": describe_params(common.env_params),
        "policy": policy_text(common.distribution),
        "seed": common.seed,
        "seeds": common.seeds,
        "total_steps": common.total_steps,
        "eval_episodes": common.eval_episodes,
        "fields": {
            axis.field: {"kind": axis.values.kind, "numbers": axis.values.numbers, "is_whole": axis.is_whole} for axis in axes
        },
        "config": {field.name: getattr(start, field.name) for field in dataclasses.fields(start)} | constants,
    }  # fmt: skip
    return folder.to_json(spec)
