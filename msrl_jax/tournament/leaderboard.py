"""The leaderboard of a tournament, a folder:

    leaderboard.json     the environment, and the maximum number of members
    members/ID/          a run, as `Result.load` reads it, and `entry.json`: its score and origin
    workers/             runs in progress; the next worker removes those of processes that have ended
    rounds.jsonl         one line per round of a worker
    lock                 held while members change

Members are added and removed by renaming their folder, so readers always see complete runs, even if a worker is killed.
"""

import contextlib
import dataclasses
import fcntl
import json
import math
import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax._files import as_path, parse_json, writing
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.terminal import table
from msrl_jax.run.disk.folder import check_links, locked, read_json, write_json
from msrl_jax.run.disk.store import ResumeWarning
from msrl_jax.run.experiment.plain_data import RunFolderError, to_json

SETTINGS, MEMBERS, WORKERS, ROUNDS, LOCK = "leaderboard.json", "members", "workers", "rounds.jsonl", "lock"
ENTRY = "entry.json"


@dataclasses.dataclass(frozen=True)
class Entry:
    """A member of a leaderboard.

    Attributes:
      id: its name on the board.
      score: mean return of the evaluation at the end of its last round.
      algorithm: name of its algorithm.
      step: environment steps of its run, including those of its ancestors.
      finished: whether it has done all its steps and is not trained further.
      parent: the member that it was trained from; None if it was trained from scratch.
      worker: the process that trained it last.
      seconds: when it was added, in seconds since the board was created.
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
    """The members of a tournament: `entries`, best first, `best`, and `rounds`; `print` shows a table.

    Attributes:
      path: its folder. The contents are read from it on every access.
    """

    path: Path

    def __post_init__(self):
        object.__setattr__(self, "path", as_path("path", self.path).absolute())

    @classmethod
    def make(cls, path: str | os.PathLike, env: str, size: int | None, env_params: Any = None) -> "Leaderboard":
        """Opens a leaderboard, or creates an empty one; RunFolderError if it differs, or if the folder contains other files.

        If `size` is None, it is that of the board, or 8 for a new one; `env_params` are plain data.
        """
        board = cls(as_path("path", path))
        size = None if size is None else whole("size", size)
        if board.path.exists() and not board.path.is_dir():
            raise RunFolderError(f"{path} is a file; choose a folder for the leaderboard")
        board.path.mkdir(parents=True, exist_ok=True)
        check_links(board.path, (SETTINGS, MEMBERS, WORKERS, ROUNDS, LOCK))
        other_files = sorted(
            file.name for file in board.path.iterdir() if file.name not in (SETTINGS, MEMBERS, WORKERS, ROUNDS, LOCK)
        )
        if other_files and not (board.path / SETTINGS).exists():
            raise RunFolderError(
                f"the folder {path} has other files ({other_files[0]}); choose a new folder for the leaderboard"
            )
        with board._locked():
            if not (board.path / SETTINGS).exists():
                settings = {"env": env, "env_params": env_params, "size": size or 8, "made": time.time()}
                write_json(board.path / SETTINGS, settings)
        saved_settings = board.settings
        for name, value in {"env": env, "env_params": to_json(env_params), "size": size or saved_settings["size"]}.items():
            if value != saved_settings[name]:
                raise RunFolderError(
                    f"the leaderboard in {path} has {name}={saved_settings[name]!r}, and cannot continue with "
                    f"{name}={value!r}; remove it, or choose another folder"
                )
        return board

    @property
    def settings(self) -> dict[str, Any]:
        """Its environment, size, and creation time (seconds since 1970); RunFolderError if the folder holds no leaderboard."""
        if not (self.path / SETTINGS).exists():
            remedy = f"msrl.tournament.compete({str(self.path)!r}, ...) makes one"
            raise RunFolderError(f"{self.path} does not contain a leaderboard; {remedy}")
        return read_json(self.path / SETTINGS, "env", "env_params", "size", "made")

    @property
    def entries(self) -> list[Entry]:
        """The members, best first."""
        _ = self.settings
        entries = []
        for path in (self.path / MEMBERS).glob("[!.]*"):
            try:
                about = parse_json((path / ENTRY).read_text())
                entries.append(Entry(path=path, **about))
                if entries[-1].id != path.name or not isinstance(entries[-1].score, int | float):
                    entries.pop()
                    raise ValueError("it was not written by a worker")
            except FileNotFoundError:
                continue  # another process has just removed it
            except (TypeError, ValueError) as error:
                note = "so this member is ignored; restore the file, or delete the folder"
                warnings.warn(f"{path / ENTRY} is damaged ({error}), {note}", ResumeWarning, stacklevel=2)
        return sorted(entries, key=lambda entry: (-entry.score, entry.seconds))

    @property
    def best(self) -> Entry:
        """The member with the highest score.

        Raises:
          ValueError: if it has no members yet.
        """
        if not (entries := self.entries):
            raise ValueError(f"the leaderboard in {self.path} has no members yet; workers add them after a round")
        return entries[0]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The rounds of workers: `worker`, `parent`, `step`, `score`, `accepted`, `best` (the best score so far), `seconds`."""
        if not (self.path / ROUNDS).exists():
            return []
        rounds = []
        for line in (self.path / ROUNDS).read_text().splitlines():
            with contextlib.suppress(ValueError):  # a line that a killed process did not finish
                rounds.append(parse_json(line))
        return rounds

    def draw(self, rng: np.random.Generator, algorithm: str, max_step: float = math.inf) -> Entry | None:
        """Draws a member of an algorithm for training: each rank has half the probability of the one above.

        The member is not finished, and has done fewer steps than `max_step`; None if there is none.
        """
        candidates = [e for e in self.entries if e.algorithm == algorithm and not e.finished and e.step < max_step]
        if not candidates:
            return None
        weights = 0.5 ** np.arange(len(candidates))
        return candidates[rng.choice(len(candidates), p=weights / weights.sum())]

    def put(
        self, run: Path, score: float, *, algorithm: str, step: int, finished: bool, parent: Entry | None, worker: str
    ) -> bool:
        """Offers the folder of a run to the board, which keeps it if it is better than the run that it replaces.

        It replaces the member that it was trained from; or, if that no longer exists or the run is new, the worst member of a
        full board. The best score therefore never decreases. Returns whether the board accepted it; if not, the folder is
        unchanged.
        """
        settings = self.settings
        with self._locked():
            entries = self.entries
            rival = next((entry for entry in entries if parent is not None and entry.id == parent.id), None)
            if rival is None and len(entries) >= settings["size"]:
                rival = entries[-1]
            is_accepted = math.isfinite(score) and (rival is None or score > rival.score)
            about = {
                "score": score,
                "algorithm": algorithm,
                "step": step,
                "parent": parent and parent.id,
                "worker": worker,
                "seconds": time.time() - settings["made"],
            }
            if is_accepted:
                new_entry = Entry(id=uuid.uuid4().hex[:12], finished=finished, path=run, **about)
                write_json(run / ENTRY, about | {"id": new_entry.id, "finished": finished})
                (self.path / MEMBERS).mkdir(exist_ok=True)
                os.replace(run, self.path / MEMBERS / new_entry.id)
                entries.append(new_entry)
                best_first = sorted((entry for entry in entries if entry is not rival), key=lambda entry: -entry.score)
                for loser in [*filter(None, [rival]), *best_first[settings["size"] :]]:  # more than one only after a crash
                    removed_path = self.path / MEMBERS / f".gone-{loser.id}"
                    with contextlib.suppress(FileNotFoundError):
                        os.replace(self.path / MEMBERS / loser.id, removed_path)
                    shutil.rmtree(removed_path, ignore_errors=True)
            row = about | {"accepted": is_accepted, "best": max((entry.score for entry in entries), default=score)}
            with writing(self.path / ROUNDS), (self.path / ROUNDS).open("a") as file:
                file.write(json.dumps(to_json(row)) + "\n")
        return is_accepted

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Prevents other processes from changing members; the system releases the lock when the process ends."""
        with writing(self.path / LOCK), (self.path / LOCK).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    @contextlib.contextmanager
    def workplace(self) -> Iterator[Path]:
        """A folder for the runs of one worker, removed at its end; also removes the folders of killed workers."""
        folder = self.path / WORKERS
        folder.mkdir(exist_ok=True)
        with contextlib.ExitStack() as stack:
            with self._locked():
                for other in folder.iterdir():
                    with contextlib.suppress(RunFolderError, OSError), locked(other):  # locks are released with their process
                        shutil.rmtree(other, ignore_errors=True)
                for removed_path in (self.path / MEMBERS).glob(".gone-*"):
                    shutil.rmtree(removed_path, ignore_errors=True)
                worker_folder = folder / uuid.uuid4().hex[:12]
                stack.enter_context(locked(worker_folder))
            stack.callback(shutil.rmtree, worker_folder, ignore_errors=True)
            yield worker_folder

    def __str__(self) -> str:
        head = ("rank", "score", "algorithm", "steps", "member", "parent", "worker")
        rows = [
            (str(i + 1), f"{e.score:.6g}", e.algorithm, f"{e.step:,}", e.id, e.parent or "", e.worker)
            for i, e in enumerate(self.entries)
        ]
        about = f"leaderboard of {self.settings['env']} in {self.path}, {len(self.rounds)} rounds"
        return "\n".join([about, *(table(head, rows) if rows else ["no members yet"])])
