"""A worker of a tournament: draws an agent from a leaderboard, trains it further, and puts it back if it is better.

Liu et al., 2021, ElegantRL-Podracer, arXiv 2112.05923. Workers are processes that know nothing of each other: they join and
leave at any time, and differ in algorithm, policy, devices and speed. None waits for another one.
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
from msrl_jax.envs.params import GivenParams
from msrl_jax.envs.params import describe as describe_params
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.support.checks import check_seed, whole
from msrl_jax.fragments.support.terminal import progress_stream
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk.store import ResumeWarning, check_saved
from msrl_jax.run.experiment.agent_transforms import fold_keys
from msrl_jax.run.experiment.spec import Experiment
from msrl_jax.run.loop import hooks
from msrl_jax.run.loop.callbacks import Callback, Progress, Tick
from msrl_jax.run.loop.guard import DivergedError
from msrl_jax.run.prepare import make_experiment
from msrl_jax.run.result import Result
from msrl_jax.run.training import train
from msrl_jax.tournament.leaderboard import Entry, Leaderboard


@entry
def compete(
    path: str | os.PathLike,
    algo: Any = "ppo",
    env: str | Environment = "CartPole-v1",
    *,
    round_steps: int = 100_000,
    total_steps: int = 10_000_000,
    rounds: int | None = None,
    time_limit: float | str | None = None,
    target: float | None = None,
    fresh: float = 0.2,
    size: int | None = None,
    seed: int | None = None,
    policy: str | DistributionPolicy | None = None,
    devices: Sequence[Device] | None = None,
    eval_episodes: int = 64,
    env_params: GivenParams | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = False,
    **overrides: Any,
) -> Leaderboard:
    """Works on a leaderboard: draws a member, trains it for a round, evaluates it, and puts it back if it is better.

    Any number of processes may call this with one folder at a time, and may end at any time. A member is drawn by its rank
    (each has half the probability of the one above), goes on exactly where its run was but for its random numbers, and
    takes the place of the member that it was trained from if its score is higher. New runs enter a board that is not full, or
    take the place of the worst member if they are better.

    The score is the mean return of a round's evaluation, so the best of many is a little lucky: evaluate it again
    (`Result.load(board.best.path).evaluate(1000)`) for a number to report.

    Args:
      path: folder of the leaderboard, which is made if there is none; on one disk for all workers.
      algo: the algorithm of this worker, its name or config; it draws members of the same one.
      env: the environment, the same for all members.
      round_steps: environment steps of a round; it ends at the first evaluation after as many.
      total_steps: environment steps after which a member is trained no further, and over which schedules go.
      rounds: rounds of this worker; None does not end.
      time_limit: time after which this worker ends, in seconds or as text, such as `"5h50m"`; the round is given up.
      target: the worker ends when the best score is as high.
      fresh: probability of a new run in place of a drawn member.
      size: largest number of members; by default that of the board, or 8 for a new one.
      seed: the seed of this worker's draws and new runs; None takes another one each time.
      policy: a distribution policy, or the name of one, as in `train`.
      devices: the devices of this worker; all if None.
      eval_episodes: episodes of an evaluation.
      env_params: what parameters of the environment are drawn from, as in `train`.
      callbacks: called with a `Tick` as in `train`; the worker ends if one returns True, and the round is given up.
      progress: "auto", "bar", "lines", "notebook" or False, as in `train`.
      **overrides: fields of the algorithm's config, for new runs.

    Returns:
      The leaderboard.

    Raises:
      ValueError: before anything compiles, on an unknown name or field, on an invalid value, on an algorithm whose returns do
        not tell which member is better, or if the leaderboard is of another environment or size.
    """
    round_steps, total_steps = whole("round_steps", round_steps), whole("total_steps", total_steps)
    episodes, rounds = whole("eval_episodes", eval_episodes), None if rounds is None else whole("rounds", rounds)
    end = time.monotonic() + (float("inf") if time_limit is None else hooks.seconds("time_limit", time_limit))
    if round_steps > total_steps:
        raise ValueError(f"round_steps={round_steps} is more than total_steps={total_steps}, those of a whole run; use less")
    if isinstance(fresh, bool) or not isinstance(fresh, numbers.Real) or not 0 <= float(fresh) <= 1:
        raise ValueError(f"fresh={fresh!r}: use a probability, from 0 to 1")
    if target is not None and not (isinstance(target, numbers.Real) and math.isfinite(float(target))):
        raise ValueError(f"target={target!r}: use a finite number")
    if jax.process_count() > 1:
        raise ValueError("a worker is one process: call msrl.tournament.compete in processes that do not share jax.distributed")
    if policy is not None:
        policies.get(policy)
    new = make_experiment(algo, env, total_steps=total_steps, env_params=env_params, overrides=overrides)
    agent = new.behavior.agent
    if not agent.ranked or agent.unit == "updates":
        raise ValueError(f"algo={new.name!r}: a tournament needs returns that tell which member is better; use another one")
    if new.settings:
        raise ValueError(f"{next(iter(new.settings))} has several values, but a member has one; let workers differ instead")
    board = Leaderboard.make(path, new.env_name, size, describe_params(env_params or None))
    most = total_steps // agent.steps_per_iteration * agent.steps_per_iteration
    rng = np.random.default_rng(None if seed is None else check_seed(seed))
    worker = f"{platform.node()}:{os.getpid()}"
    done = 0
    with board.workplace() as place:
        while (rounds is None or done < rounds) and time.monotonic() < end:
            if target is not None and any(entry.score >= target for entry in board.entries):
                break
            done += 1
            parent = board.draw(rng, new.name, most) if rng.random() >= fresh else None
            run, number = place / f"round-{done}", int(rng.integers(2**32))
            if parent is not None and not _copied(parent, run, number, new):
                parent = None
            finished, stop = False, _RoundEnd(0 if parent is None else parent.step, round_steps)
            again = {name: x for name, x in new.objects.items() if x is not None}
            begun: dict[str, Any] = {"resume": run, "total_steps": total_steps} | again
            if parent is None:
                begun = {"algo": dataclasses.replace(new, seed=number % (2**32 - 1)), "out": run}
            try:
                result = train(
                    **begun, policy=policy or new.usual_policy, devices=devices, progress=progress, eval_episodes=episodes,
                    eval_every=round_steps, callbacks=[*callbacks, stop], checkpoint_every="1000h", keep_checkpoints=1,
                    time_limit=None if end == float("inf") else max(end - time.monotonic(), 1e-3),
                )  # fmt: skip
            except DivergedError:
                score = float("nan")
            else:
                check_saved(result)
                if result.interrupted or (result.status == "stopped" and not stop.over and stop.has_begun):
                    break
                if not stop.has_begun:
                    continue  # iterations of another length: no whole one is left
                finished = result.status == "finished"
                score = float(np.mean(result.evaluation.mean_return)) if result.evaluation is not None else float("nan")
            kept = board.put(run, score, algorithm=new.name, step=stop.step, finished=finished, parent=parent, worker=worker)
            if progress:
                start, what = f"from {parent.id}" if parent else "from the start", "kept" if kept else "not kept"
                text = f"round {done}: {new.name} {start} to {stop.step:,} steps: {score:.6g}, {what}"
                print(text, file=progress_stream(), flush=True)
            shutil.rmtree(run, ignore_errors=True)  # unless the board has it now
    return board


class _RoundEnd:
    """A callback that ends a run at the first evaluation after a number of steps."""

    def __init__(self, begin: int, steps: int):
        self.step, self.has_begun, self.over, self._end = begin, False, False, begin + steps

    def __call__(self, tick: Tick) -> bool:
        self.step, self.has_begun = tick.step, True
        self.over = tick.step >= self._end and bool(np.isfinite(tick.metrics.get("eval_return", np.nan)).all())
        return self.over


def _copied(parent: Entry, run: Path, number: int, experiment: Experiment) -> bool:
    """Copies a member's run, with other random numbers; False if it is no longer there, or damaged."""
    try:
        result = Result.load(parent.path, **experiment.objects)
    except (FileNotFoundError, ValueError) as error:
        if parent.path.exists():  # else another worker has just replaced it
            warnings.warn(f"member {parent.id} cannot be read, and a new run begins: {error}", ResumeWarning, stacklevel=2)
        return False
    agent = result.behavior.agent
    state = fold_keys(agent.without_data(result.run_state), number)
    dataclasses.replace(result, run_state=agent.with_data(state)).save(run)
    return True
