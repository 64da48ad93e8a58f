"""Tournaments: workers draw an agent from a leaderboard, train it further, and put back what is better.

Liu et al., 2021, ElegantRL-Podracer, arXiv 2112.05923. Workers are processes that know nothing of each other: they join and
leave at any time, and differ in algorithm, policy, devices and speed. None waits for another one. A leaderboard is a folder:

    leaderboard.json     the environment, and how many members there may be
    members/ID/          a run, as `Result.load` reads it, and `entry.json`: its score and where it comes from
    workers/             runs in progress; those of processes that have ended are removed by the next one
    rounds.jsonl         one line for each round of a worker
    lock                 held while members change

Members appear and disappear by renaming their folder, so every reader sees whole runs, whoever is killed.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import numbers
import os
import platform
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax import policies
from msrl_jax._checks import as_path, check_seed, parse_json, whole, writing
from msrl_jax._terminal import progress_stream, table
from msrl_jax._tracebacks import entry
from msrl_jax.envs import Environment
from msrl_jax.envs.params import GivenParams
from msrl_jax.envs.params import describe as describe_params
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.run.disk.folder import check_links, locked, read_json, write_json
from msrl_jax.run.disk.store import ResumeWarning, check_saved
from msrl_jax.run.experiment.agent_transforms import fold_keys
from msrl_jax.run.experiment.plain_data import RunFolderError, to_json
from msrl_jax.run.experiment.spec import Experiment
from msrl_jax.run.loop import hooks
from msrl_jax.run.loop.callbacks import Callback, Tick
from msrl_jax.run.loop.guard import DivergedError
from msrl_jax.run.prepare import make_experiment
from msrl_jax.run.result import Result
from msrl_jax.run.train import train

SETTINGS, MEMBERS, WORKERS, ROUNDS, LOCK = "leaderboard.json", "members", "workers", "rounds.jsonl", "lock"
ENTRY = "entry.json"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A member of a leaderboard.

    Attributes:
      id: its name on the board.
      score: mean return of the evaluation at the end of its last round.
      algorithm: name of its algorithm.
      step: environment steps of its run, those of its ancestors included.
      finished: whether it has done all its steps, so that nobody trains it further.
      parent: the member that it was trained from; None if it began anew.
      worker: the process that trained it last.
      seconds: when it was put there, in seconds since the board was made.
      path: the folder of its run, for `Result.load`.
    """

    id: str
    score: float
    algorithm: str
    step: int
    finished: bool
    parent: str | None
    worker: str
    seconds: float
    path: Path


@dataclasses.dataclass(frozen=True)
class Leaderboard:
    """The members of a tournament: `entries`, of which `best` is the first, and `rounds`; `print` shows a table.

    Attributes:
      path: its folder. What the board holds is read from it each time.
    """

    path: Path

    def __post_init__(self):
        object.__setattr__(self, "path", as_path("path", self.path).absolute())

    @classmethod
    def make(cls, path: str | os.PathLike, env: str, size: int | None, env_params: Any = None) -> "Leaderboard":
        """Finds a leaderboard, or makes an empty one; RunFolderError if it is another one, or if the folder holds other files.

        A `size` of None is that of the board, or 8 for a new one; `env_params` are plain data.
        """
        board = cls(as_path("path", path))
        size = None if size is None else whole("size", size)
        if board.path.exists() and not board.path.is_dir():
            raise RunFolderError(f"{path} is a file; name a folder for the leaderboard")
        board.path.mkdir(parents=True, exist_ok=True)
        check_links(board.path, (SETTINGS, MEMBERS, WORKERS, ROUNDS, LOCK))
        others = sorted(x.name for x in board.path.iterdir() if x.name not in (SETTINGS, MEMBERS, WORKERS, ROUNDS, LOCK))
        if others and not (board.path / SETTINGS).exists():
            raise RunFolderError(f"the folder {path} holds other files ({others[0]}); name a new folder for the leaderboard")
        with board._locked():
            if not (board.path / SETTINGS).exists():
                new = {"env": env, "env_params": env_params, "size": size or 8, "made": time.time()}
                write_json(board.path / SETTINGS, new)
        was = board.settings
        for name, now in {"env": env, "env_params": to_json(env_params), "size": size or was["size"]}.items():
            if now != was[name]:
                raise RunFolderError(
                    f"the leaderboard in {path} has {name}={was[name]!r}, and cannot go on with {name}={now!r}; leave it "
                    "out, or name another folder"
                )
        return board

    @property
    def settings(self) -> dict[str, Any]:
        """Its environment, its size, and when it was made (seconds since 1970); RunFolderError if there is no leaderboard."""
        if not (self.path / SETTINGS).exists():
            raise RunFolderError(f"{self.path} holds no leaderboard; msrl.compete({str(self.path)!r}, ...) makes one")
        return read_json(self.path / SETTINGS, "env", "env_params", "size", "made")

    @property
    def entries(self) -> list[Entry]:
        """Its members, the best one first."""
        _ = self.settings
        found = []
        for path in (self.path / MEMBERS).glob("[!.]*"):
            try:
                about = parse_json((path / ENTRY).read_text())
                found.append(Entry(path=path, **about))
                if found[-1].id != path.name or not isinstance(found[-1].score, int | float):
                    found.pop()
                    raise ValueError("it is not what a worker wrote")
            except FileNotFoundError:
                continue  # another process has just removed it
            except (TypeError, ValueError) as error:
                note = "so this member is left out; restore the file, or delete the folder"
                warnings.warn(f"{path / ENTRY} is damaged ({error}), {note}", ResumeWarning, stacklevel=2)
        return sorted(found, key=lambda entry: (-entry.score, entry.seconds))

    @property
    def best(self) -> Entry:
        """The member with the highest score.

        Raises:
          ValueError: if there is no member yet.
        """
        if not (entries := self.entries):
            raise ValueError(f"the leaderboard in {self.path} has no members yet; its workers put them there after a round")
        return entries[0]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """What workers did: `worker`, `parent`, `step`, `score`, `accepted`, `best` (the best score then) and `seconds`."""
        if not (self.path / ROUNDS).exists():
            return []
        rounds = []
        for line in (self.path / ROUNDS).read_text().splitlines():
            with contextlib.suppress(ValueError):  # the line of a process that was killed while it wrote
                rounds.append(parse_json(line))
        return rounds

    def draw(self, rng: np.random.Generator, algorithm: str, below: float = math.inf) -> Entry | None:
        """Draws a member of an algorithm to train on: each rank has half the probability of the one above it.

        It has not finished, and has done fewer steps than `below`; None if there is none.
        """
        fitting = [e for e in self.entries if e.algorithm == algorithm and not e.finished and e.step < below]
        if not fitting:
            return None
        weights = 0.5 ** np.arange(len(fitting))
        return fitting[rng.choice(len(fitting), p=weights / weights.sum())]

    def put(
        self, run: Path, score: float, *, algorithm: str, step: int, finished: bool, parent: Entry | None, worker: str
    ) -> bool:
        """Offers the folder of a run to the board, which keeps it if it is better than what it replaces.

        That is the member that it was trained from; or, if that is no longer there or the run is a new one, the worst member of
        a full board. So the best score never falls. Returns whether the board has it now; if not, the folder is as it was.
        """
        settings = self.settings
        with self._locked():
            entries = self.entries
            rival = next((entry for entry in entries if parent is not None and entry.id == parent.id), None)
            if rival is None and len(entries) >= settings["size"]:
                rival = entries[-1]
            kept = math.isfinite(score) and (rival is None or score > rival.score)
            about = {
                "score": score, "algorithm": algorithm, "step": step, "parent": parent and parent.id, "worker": worker,
                "seconds": time.time() - settings["made"],
            }  # fmt: skip
            if kept:
                new = Entry(id=uuid.uuid4().hex[:12], finished=finished, path=run, **about)
                write_json(run / ENTRY, about | {"id": new.id, "finished": finished})
                (self.path / MEMBERS).mkdir(exist_ok=True)
                os.replace(run, self.path / MEMBERS / new.id)
                entries.append(new)
                best_first = sorted((entry for entry in entries if entry is not rival), key=lambda entry: -entry.score)
                for loser in [*filter(None, [rival]), *best_first[settings["size"] :]]:  # more than one only after a kill
                    gone = self.path / MEMBERS / f".gone-{loser.id}"
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(self.path / MEMBERS / loser.id, gone)
                    shutil.rmtree(gone, ignore_errors=True)
            row = about | {"accepted": kept, "best": max((entry.score for entry in entries), default=score)}
            with writing(self.path / ROUNDS), (self.path / ROUNDS).open("a") as file:
                file.write(json.dumps(to_json(row)) + "\n")
        return kept

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Lets no other process change members meanwhile; the system ends the lock with the process."""
        with writing(self.path / LOCK), (self.path / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """A folder for the runs of one worker, which is removed with its end; also removes what killed workers left."""
        folder = self.path / WORKERS
        folder.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            with self._locked():
                for other in folder.iterdir():
                    with contextlib.suppress(RunFolderError, OSError), locked(other):  # a lock ends with its process
                        shutil.rmtree(other, ignore_errors=True)
                for gone in (self.path / MEMBERS).glob(".gone-*"):
                    shutil.rmtree(gone, ignore_errors=True)
                own = folder / uuid.uuid4().hex[:12]
                stack.enter_context(locked(own))
            stack.callback(shutil.rmtree, own, ignore_errors=True)
            yield own

    def __str__(self) -> str:
        head = ("rank", "score", "algorithm", "steps", "member", "parent", "worker")
        rows = [
            (str(i + 1), f"{e.score:.6g}", e.algorithm, f"{e.step:,}", e.id, e.parent or "", e.worker)
            for i, e in enumerate(self.entries)
        ]
        about = f"leaderboard of {self.settings['env']} in {self.path}, {len(self.rounds)} rounds"
        return "\n".join([about, *(table(head, rows) if rows else ["no members yet"])])


@entry
def compete(
    path: str | os.PathLike,
    algo: Any = "ppo",
    env: str | Environment = "CartPole-v1",
    *,
    round_steps: int,
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
    progress: Any = False,
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
        raise ValueError("a worker is one process: call msrl.compete in processes that do not share jax.distributed")
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
