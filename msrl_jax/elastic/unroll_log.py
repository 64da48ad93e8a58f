"""The log of unrolls that actors sent to the learner of a run, `arrivals.jsonl`.

Every line has one of these forms, in the order of events:

    {"run": TOKEN, "begins": ITERATION, "codec": NAME, ...}     a learner starts or resumes
    {"joins": TICKET}                                           an actor joins
    {"ticket": T, "unroll": N, "life": L, "version": V, ...}    an unroll arrives: the N-th of the actor with ticket T
    {"refuses": TICKET, "because": REASON}                      an actor sent something that is not an unroll of the run
    {"gap": LINES}                                              number of lines that could not be written

A learner also records `total_steps` and `guard`, which may change when a run is resumed, and then change its programs.
`life` is the number of the learner whose parameters were used for acting, and `version` its number of completed iterations. A
line has either `used`, the number of the iteration that learns from the unroll, or the reason why none does: `dropped` if it is
late, `refused` if it is invalid.
"""

import array
import errno
import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax.run.disk.folder import SaveWarning, check_links, json_lines
from msrl_jax.run.experiment.plain_data import RunFolderError

FILE = "arrivals.jsonl"
_MAX_UNWRITTEN = 100_000  # maximum number of lines kept in memory until they can be written


class UnrollLog:
    """Writes the log of a run, to a file if the run has a folder; first reads the lines of earlier learners of the run."""

    def __init__(self, folder: Path | None):
        self._file = None if folder is None else folder / FILE
        if folder is not None:
            check_links(folder, [FILE])
        self.lives: list[int] = []  # iterations at which learners started
        self.run, self.tickets, self.dropped, self.refused = secrets.token_hex(8), 0, 0, 0
        self._used_unrolls = array.array("q")  # the ticket, the number and the iteration of each unroll that was learned from
        for line in () if self._file is None else each_line(self._file):
            self.run = line.get("run", self.run)
            self.lives += [line["begins"]] if "begins" in line else []
            self.tickets += "joins" in line
            self._count(line)
            self._used_unrolls.extend((line["ticket"], line["unroll"], line["used"]) if "used" in line else ())
        self._last_unrolls: dict[int, int] = {}  # the last unroll accepted from each actor
        self._unwritten: list[bytes] = []  # lines that are not in the file yet
        self._gap, self._complete_bytes = 0, 0  # number of lost lines; number of bytes of complete lines in the file
        self._retry_time, self._lock = 0.0, threading.Lock()  # when to try to write again

    @property
    def life(self) -> int:
        """The number of this learner."""
        return len(self.lives) - 1

    def begin(self, iteration: int, **about: Any) -> None:
        """Records that a learner starts, and facts about it; what an earlier one learned after this iteration is lost."""
        self.lives.append(iteration)
        learned = np.reshape(self._used_unrolls, (-1, 3))
        tickets, unrolls, _ = learned[learned[:, 2] < iteration][::-1].T
        last_tickets, positions = np.unique(tickets, return_index=True)
        self._last_unrolls |= dict(zip(last_tickets.tolist(), unrolls[positions].tolist(), strict=True))
        self._used_unrolls = array.array("q")
        if self._file is not None and self._file.exists():
            self._complete_bytes = self._file.read_bytes().rfind(b"\n") + 1  # do not append to a line that was cut off
        self._write({"run": self.run, "begins": iteration, **about})

    def join(self) -> int:
        """Returns the ticket of a new actor."""
        self.tickets += 1
        self._write({"joins": self.tickets - 1})
        return self.tickets - 1

    def has_published(self, life: int, version: int, newest: int) -> bool:
        """Whether a learner published parameters after `version` iterations; `newest` is the newest of this learner."""
        return 0 <= life <= self.life and self.lives[life] <= version and (life < self.life or version <= newest)

    def refuse(self, ticket: int, reason: str) -> None:
        """Records that an actor sent something that is not an unroll of the run."""
        self._write({"refuses": ticket, "because": reason})

    def take(
        self, ticket: int, unroll: int, life: int, version: int, iteration: int, bound: int, flaw: str | None = None
    ) -> str | None:
        """Records an unroll that arrived at an iteration; returns the reason if it is not used, such as its flaw."""
        reason, age = None, iteration - version
        if unroll <= self._last_unrolls.get(ticket, -1):
            reason = "it arrived twice"
        elif version > min(self.lives[life + 1 :], default=version):
            reason = "the learner that made its parameters lost them"
        elif age > bound:
            reason = f"its parameters are {age} iterations old, and the bound is {bound}"
        self._last_unrolls[ticket] = max(unroll, self._last_unrolls.get(ticket, -1))
        outcome = {"used": iteration} if reason is None else {"dropped": reason}
        if reason is None and flaw is not None:
            reason, outcome = flaw, {"refused": flaw}
        self._write({"ticket": ticket, "unroll": unroll, "life": life, "version": version, **outcome})
        return reason

    def close(self) -> None:
        """Tries a last time to write the remaining lines."""
        with self._lock:
            if (self._unwritten or self._gap) and (error := self._flush()) is not None:
                self._warn_of_gap(error)

    def _count(self, line: dict[str, Any]) -> None:
        self.dropped += "dropped" in line
        self.refused += "refused" in line or "refuses" in line

    def _write(self, line: dict[str, Any]) -> None:
        with self._lock:
            self._count(line)
            if self._file is None:
                return
            waits = self._unwritten or self._gap
            self._unwritten.append(json.dumps(line).encode() + b"\n")
            if waits and time.monotonic() < self._retry_time:
                return
            error, self._retry_time = self._flush(), time.monotonic() + 1.0
            if error is not None and not waits:
                warnings.warn(f"arrivals wait in memory until they can be written: {error}", SaveWarning, stacklevel=4)
            if error is not None and len(self._unwritten) > _MAX_UNWRITTEN:
                if not self._gap:
                    self._warn_of_gap(error)
                self._gap, self._unwritten = self._gap + len(self._unwritten), []

    def _warn_of_gap(self, error: OSError) -> None:
        text = f"lines of {self._file} are lost, and the run cannot be replayed: {error}"
        warnings.warn(text, SaveWarning, stacklevel=4)

    def _flush(self) -> OSError | None:
        """Writes the waiting lines, all or none of them; returns the error if that fails."""
        assert self._file is not None
        gap = [json.dumps({"gap": self._gap}).encode() + b"\n"] if self._gap else []
        text = b"".join(gap + self._unwritten)
        try:
            with open(os.open(self._file, os.O_WRONLY | os.O_CREAT, 0o666), "wb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                start = min(size, self._complete_bytes)
                if size > start:
                    file.truncate(start)  # remove a partly written line
                file.seek(start)
                if file.write(text) != len(text):  # in one call: a learner that is killed has written whole lines
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return error
        self._gap, self._unwritten, self._complete_bytes = 0, [], start + len(text)
        return None


def read_log(file: Path) -> list[dict[str, Any]]:
    """Returns the lines of a log; none without a file."""
    return list(each_line(file))


def each_line(file: Path) -> Iterator[dict[str, Any]]:
    """Reads the lines of a log one after another; none without a file."""
    try:
        for number, line in enumerate(json_lines(file)):
            if not isinstance(line, dict) or not (number or "run" in line):
                raise ValueError("a line is not an entry of a log")
            yield line
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} is damaged ({error}); restore the file, or start a new run") from error
