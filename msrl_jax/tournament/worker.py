"""A worker of a tournament: draws an agent from a leaderboard, trains it further, and returns it if it improved.

Liu et al., 2021, ElegantRL-Podracer, arXiv 2112.05923. Workers are independent processes: they join and leave at any time, and
can differ in algorithm, policy, devices and speed. None waits for another.
"""

import dataclasses
import math
import numbers
import os
import platform
import shutil
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax import policies
from msrl_jax.envs import Environment
from msrl_jax.envs.params import params_text as describe_params
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.support.checks import check_seed, whole
from msrl_jax.fragments.support.random_keys import fold_keys
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk.store import ResumeWarning, check_saved
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.loop import hooks
from msrl_jax.run.loop.callbacks import Callback, ProgressDisplay, Tick
from msrl_jax.run.loop.guard import DivergedError
from msrl_jax.run.prepare import make_experiment
from msrl_jax.run.result import Result
from msrl_jax.run.streams import progress_stream
from msrl_jax.run.training import train
from msrl_jax.tournament.leaderboard import Entry, Leaderboard


@entry
def compete(
    path: str | os.PathLike,
    algo: Any = None,
    env: str | Environment | None = None,
    *,
    round_steps: int = 100_000,
    rounds: int | None = None,
    time_limit: float | str | None = None,
    target: float | None = None,
    fresh: float = 0.2,
    size: int | None = None,
    seed: int | None = None,
    policy: str | DistributionPolicy | None = None,
    devices: Sequence[Device] | None = None,
    eval_episodes: int = 64,
    callbacks: Sequence[Callback] = (),
    progress: ProgressDisplay = False,
    **overrides: Any,
) -> Leaderboard:
    """Works on a leaderboard: draws a member, trains it for a round, evaluates it, and returns it if it improved.

    Any number of processes may call this function with the same folder at the same time, and may end at any time. A member is
    drawn by rank (each rank has half the probability of the one above) and resumes where its run stopped, with new random
    numbers. If its score is higher, it replaces the member that it was trained from. New runs are added to a board that is not
    full, or replace the worst member if they are better.

    The score is the mean return of a round's evaluation, so the best of many is biased upwards: evaluate it again
    (`Result.load(board.best.path).evaluate(1000)`) before you report it.

    Args:
      path: folder of the leaderboard, shared by all workers; created if it does not exist.
      algo: the algorithm of this worker, as in `train`, or an `Experiment`; it draws only members of that algorithm.
      env: the environment, the same for all members, as in `train`.
      round_steps: environment steps of a round; it ends at the first evaluation after that many steps.
      rounds: number of rounds of this worker; unlimited if None.
      time_limit: time after which this worker ends, in seconds or as text, such as `"5h50m"`; the round is discarded.
      target: the worker ends when the best score reaches this value.
      fresh: probability of starting a new run instead of drawing a member.
      size: maximum number of members; by default that of the board, or 8 for a new one.
      seed: seed of this worker's draws and new runs; a different one each time if None.
      policy: a distribution policy, or its name, as in `train`.
      devices: the devices of this worker; all if None.
      eval_episodes: number of episodes of an evaluation.
      callbacks: called with a `Tick` as in `train`; the worker ends if one returns True, and the round is discarded.
      progress: "auto", "bar", "lines", "notebook" or False, as in `train`.
      **overrides: arguments of `train` that determine what a new run computes: `total_steps`, after which a member is complete
        and over which schedules run, by default 10 million; `guard` and `env_params`; and fields of the algorithm's config.

    Returns:
      The leaderboard.

    Raises:
      ValueError: before compilation, for an unknown name or field, for an invalid value, for an algorithm whose returns do not
        rank members, or if the leaderboard has another environment or size.
    """
    round_steps = whole("round_steps", round_steps)
    episodes, rounds = whole("eval_episodes", eval_episodes), None if rounds is None else whole("rounds", rounds)
    end = time.monotonic() + (float("inf") if time_limit is None else hooks.parse_duration("time_limit", time_limit))
    if isinstance(fresh, bool) or not isinstance(fresh, numbers.Real) or not 0 <= float(fresh) <= 1:
        raise ValueError(f"fresh={fresh!r}: use a probability, from 0 to 1")
    if target is not None and not (isinstance(target, numbers.Real) and math.isfinite(float(target))):
        raise ValueError(f"target={target!r}: use a finite number")
    if jax.process_count() > 1:
        raise ValueError("a worker must be a single process: call msrl.tournament.compete without jax.distributed")
    if policy is not None:
        policies.get(policy)
    default_arguments = {} if isinstance(algo, Experiment) else {"total_steps": 10_000_000}
    template = make_experiment(algo, env, **default_arguments | overrides)
    agent, total_steps = template.behavior.agent, template.total_steps
    if round_steps > total_steps:
        raise ValueError(f"round_steps={round_steps} exceeds total_steps={total_steps}, the steps of a whole run; use less")
    if not agent.ranked or agent.unit == "updates":
        raise ValueError(f"algo={template.name!r}: a tournament needs returns that rank members; use another algorithm")
    if template.has_members or template.rank_by != "return":
        field_name = next(iter(template.settings), "seeds")
        fact = (
            f"{field_name} has several values, but a member has one"
            if template.has_members
            else "members are ranked by returns"
        )
        raise ValueError(f"{fact}; let workers differ" if template.has_members else f"{fact}; leave rank_by out")
    board = Leaderboard.make(path, template.env_name, size, describe_params(template.env_params))
    max_steps = total_steps // agent.steps_per_iteration * agent.steps_per_iteration
    rng = np.random.default_rng(None if seed is None else check_seed(seed))
    worker = f"{platform.node()}:{os.getpid()}"
    rounds_done = 0
    with board.workplace() as place:
        while (rounds is None or rounds_done < rounds) and time.monotonic() < end:
            if target is not None and any(entry.score >= target for entry in board.entries):
                break
            rounds_done += 1
            parent = board.draw(rng, template.name, max_steps) if rng.random() >= fresh else None
            run_path, number = place / f"round-{rounds_done}", int(rng.integers(2**32))
            if parent is not None and not _copy_run(parent, run_path, number, template):
                parent = None
            finished, stop = False, _RoundEnd(0 if parent is None else parent.step, round_steps)
            objects = {name: value for name, value in template.objects.items() if value is not None}
            start_arguments: dict[str, Any] = {"resume": run_path, "total_steps": total_steps} | objects
            if parent is None:
                start_arguments = {"algo": dataclasses.replace(template, seed=number % (2**32 - 1)), "out": run_path}
            try:
                result = train(
                    **start_arguments,
                    policy=policy or template.usual_policy,
                    devices=devices,
                    progress=progress,
                    eval_episodes=episodes,
                    eval_every=round_steps,
                    callbacks=[*callbacks, stop],
                    checkpoint_every="1000h",
                    keep_checkpoints=1,
                    time_limit=None if end == float("inf") else max(end - time.monotonic(), 1e-3),
                )
            except DivergedError:
                score = float("nan")
            else:
                check_saved(result)
                if result.interrupted or (result.status == "stopped" and not stop.over and stop.has_begun):
                    break
                if not stop.has_begun:
                    continue  # iterations have another length, and no whole one is left
                finished = result.status == "finished"
                score = float(np.mean(result.evaluation.mean_return)) if result.evaluation is not None else float("nan")
            is_accepted = board.put(
                run_path, score, algorithm=template.name, step=stop.step, finished=finished, parent=parent, worker=worker
            )
            if progress:
                start, verdict = f"from {parent.id}" if parent else "from the start", "kept" if is_accepted else "not kept"
                text = f"round {rounds_done}: {template.name} {start} to {stop.step:,} steps: {score:.6g}, {verdict}"
                print(text, file=progress_stream(), flush=True)
            shutil.rmtree(run_path, ignore_errors=True)  # exists unless the board accepted it
    return board


class _RoundEnd:
    """A callback that ends a run at the first evaluation after a number of steps."""

    def __init__(self, begin: int, steps: int):
        self.step, self.has_begun, self.over, self._end = begin, False, False, begin + steps

    def __call__(self, tick: Tick) -> bool:
        self.step, self.has_begun = tick.step, True
        self.over = tick.step >= self._end and bool(np.isfinite(tick.metrics.get("eval_return", np.nan)).all())
        return self.over


def _copy_run(parent: Entry, run: Path, number: int, experiment: Experiment) -> bool:
    """Copies a member's run, with new random numbers; False if it no longer exists or is damaged."""
    try:
        result = Result.load(parent.path, **experiment.objects)
    except (FileNotFoundError, ValueError) as error:
        if parent.path.exists():  # otherwise, another worker has just replaced it
            warnings.warn(f"member {parent.id} cannot be read, so a new run starts: {error}", ResumeWarning, stacklevel=2)
        return False
    agent = result.behavior.agent
    state = fold_keys(agent.without_data(result.run_state), number)
    dataclasses.replace(result, run_state=agent.with_data(state)).save(run)
    return True
