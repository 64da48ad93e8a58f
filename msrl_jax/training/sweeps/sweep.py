"""Sweeps: trials are chosen and checked first, then trained as the members of as few programs as possible."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic as now
from typing import Any

import jax
import numpy as np

from msrl_jax import algorithms
from msrl_jax._checks import as_path, check_seed, whole
from msrl_jax._streams import progress_stream
from msrl_jax.algorithms import Algorithm
from msrl_jax.envs import Environment
from msrl_jax.envs.params import GivenParams
from msrl_jax.envs.params import describe as describe_params
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.policies.base import spec as policy_text
from msrl_jax.training import checkpoint, folder, processes, stopping
from msrl_jax.training.progress import Progress, choose_display
from msrl_jax.training.result import Result
from msrl_jax.training.resume import describe_env
from msrl_jax.training.settings import whole_iterations
from msrl_jax.training.setup import Setup, resolve, resolve_policy
from msrl_jax.training.sweeps import plan, record
from msrl_jax.training.sweeps.halving import rung_steps
from msrl_jax.training.sweeps.result import SweepResult
from msrl_jax.training.sweeps.search import Order, Stage, asked, check_optuna, rungs
from msrl_jax.training.sweeps.space import Axis, Method, check_method, choose, count_of, read_axes
from msrl_jax.training.sweeps.trials import Group, Trial, make_trials, ranked
from msrl_jax.training.train import train


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
    trials_at_once = plan.trials_at_once(members_at_once, seeds)
    algorithm = algorithms.get(algo)
    axes, constants = read_axes(algorithm, fields)
    distribution = resolve_policy(policy)
    path = None if out is None else as_path("out", out).absolute()
    if resume and path is None:
        raise ValueError("resume=True goes on with the sweep in out=...; give the folder there")
    if method == "optuna":
        check_optuna()
        if halving is not None:
            raise ValueError('halving= chooses among trials that are known from the start; leave it out with method="optuna"')
    start = algorithm.config() if config is None else config
    run = _Sweep(
        algorithm, env, distribution, devices, total_steps, seed, seeds, config, constants, episodes, checkpoint_every,
        env_params, progress, path,
    )  # fmt: skip
    groups: list[Group] = []

    def made(chosen: Sequence[Mapping[str, Any]], first: int = 0) -> list[Trial]:
        return make_trials(algorithm, config, constants | {"total_steps": total_steps}, chosen, groups, first)

    trials = [] if method == "optuna" else made(choose(axes, method, num, seed))
    steps = [] if method == "optuna" else None
    description = {
        "algorithm": algorithm.name,
        "env": env if isinstance(env, str) else getattr(env, "name", type(env).__name__),
        "env_spec": env if isinstance(env, str) else None,
        "env_object": None if isinstance(env, str) else describe_env(env),
        "env_params": describe_params(env_params),
        "policy": policy_text(distribution),
        "method": method,
        "num": num,
        "seed": seed,
        "seeds": seeds,
        "total_steps": total_steps,
        "eval_episodes": episodes,
        "halving": halving,
        "rungs": rungs,
        "min_steps": min_steps,
        "members_at_once": members_at_once,
        "fields": {
            a.field: {"kind": a.values.kind, "numbers": list(a.values.numbers), "is_whole": a.is_whole} for a in axes
        },
        "config": folder.to_json({
            **{f.name: getattr(start, f.name) for f in dataclasses.fields(start)},
            **{name: algorithm.config.canonical(name, value) for name, value in constants.items()},
        }),
    }  # fmt: skip
