"""Requests to stop a run: signals and a time limit. The current chunk is finished and saved first."""

import contextlib
import re
import signal
import threading
from collections.abc import Callable, Iterator
from time import monotonic as now
from typing import Any

from msrl_jax.experiment import processes
from msrl_jax.experiment.run import Ending, Run

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
TIME_LIMIT = "time limit"

_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def seconds(name: str, value: Any) -> float:
    """Reads a duration."""
    found: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = float(value)
    elif isinstance(value, str) and value and (match := _DURATION.fullmatch(value.strip().lower())) and any(match.groups()):
        found = sum(float(n) * unit for n, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True) if n)
    if found is None or not 0 < found < float("inf"):
        raise ValueError(f"{name}={value!r}: use seconds, or text such as '90s', '10m' or '5h50m'")
    return found


class StopRequests:
    """Why a run has to stop, as far as it is known; a hook that ends the run if any process knows a reason."""

    def __init__(self, deadline: float | None = None):
        self.deadline = deadline  # time of `now` at which the run has to be over
        self.signal = ""  # the name of the signal that came, if one did

    def reason(self, next_seconds: float) -> str:
        """Why the run has to stop now."""
        if self.signal:
            return self.signal
        late = self.deadline is not None and now() + next_seconds > self.deadline
        return TIME_LIMIT if late else ""

    def before(self, run: Run) -> Ending | None:
        """Ends the run if there is a reason to stop before the next chunk would be done and saved."""
        reasons = processes.gathered(self.reason(run.last_seconds + run.saving_seconds))
        reason = next(filter(None, reasons), "")
        return Ending("interrupted", reason) if reason else None

    def on_signal(self, signum: int, frame: Any) -> None:
        """Notes the first signal. A second one ends the process at once; a second Ctrl-C raises KeyboardInterrupt."""
        if self.signal and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(signum).name
        for other in SIGNALS:  # the default action takes effect even while compiled code runs
            if other != signal.SIGINT:
                signal.signal(other, signal.SIG_DFL)


@contextlib.contextmanager
def stop_requests(limit: float | None = None) -> Iterator[StopRequests]:
    """Notes signals that ask the process to end; outside of the main thread, which gets no signals, only the time limit."""
    requests = StopRequests(None if limit is None else now() + limit)
    if threading.current_thread() is not threading.main_thread():
        yield requests
        return
    before: dict[int, Callable[..., Any] | int | None] = {}
    for signum in SIGNALS:
        # A shell's nohup, for example, has the process ignore SIGHUP.
        if signal.getsignal(signum) is not signal.SIG_IGN:
            before[signum] = signal.signal(signum, requests.on_signal)
    try:
        yield requests
    finally:
        for signum, handler in before.items():  # None is a handler of compiled code, such as that of jax.distributed
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
