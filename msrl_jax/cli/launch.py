"""Starts the processes of a run on one machine, and stops them together."""

import collections
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from msrl_jax.cli.options import UsageError
from msrl_jax.fragments.support.compiling import use_cpu_devices
from msrl_jax.fragments.support.naming import paths

# Environment variables that give a process the address of process 0, the number of processes, and its own index.
ADDRESS, COUNT, INDEX = "MSRL_JAX_COORDINATOR", "MSRL_JAX_PROCESSES", "MSRL_JAX_PROCESS"
LOST = 76  # exit code if a process ended, which stopped the others too
PATIENCE = 10  # seconds that the other processes have to stop by themselves after one has failed

_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected|preemption_notifier\.cc")


def start(
    argv: Sequence[str], *, processes: int | None = None, distributed: bool = False, cpu_devices: int | None = None
) -> int | None:
    """Starts the processes of a run, or makes this process part of one; returns the exit code if the run is over.

    Args:
      processes: start this many processes on this machine; each has one CPU device, or --cpu-devices.
      distributed: join the processes of a cluster, which JAX detects: SLURM, Open MPI, GKE, a TPU pod.
    """
    child = os.environ.get(INDEX)
    if processes is not None and distributed:
        raise UsageError("--processes starts processes on this machine, and --distributed joins those of a cluster; give one")
    if processes is not None and processes < 1:
        raise UsageError(f"--processes {processes}: use at least 1")
    if processes is not None and child is None:
        return launch(argv, processes)
    if child is not None:
        end_with_parent()
    use_cpu_devices(1 if cpu_devices is None and child is not None else cpu_devices)
    if child is not None or distributed:
        from msrl_jax.run import processes as all_processes

        if child is None:
            all_processes.start()
        else:
            all_processes.start(os.environ[ADDRESS], int(os.environ[COUNT]), int(child))
    return None


def launch(argv: Sequence[str], count: int) -> int:
    """Runs processes of `python -m msrl_jax` with equal arguments; signals to this process are passed on, and they end with it.

    Returns 0 if all succeeded; otherwise the exit code of the first that failed, or `LOST` if a signal ended it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    children: list[subprocess.Popen[bytes]] = []
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def forward(signum: int, frame: object) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(signum)

    tails = [collections.deque[bytes](maxlen=200) for _ in range(count)]
    readers: list[threading.Thread] = []
    try:
        for s, handler in handlers.items():
            if handler is not signal.SIG_IGN:
                signal.signal(s, forward)
        for i in range(count):
            settings = os.environ | {ADDRESS: address, COUNT: str(count), INDEX: str(i), "PYTHONPATH": paths()}
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "msrl_jax", *argv],
                env=settings,
                stdin=subprocess.PIPE,
                start_new_session=True,
                stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
                stderr=None if i == 0 else subprocess.PIPE,
            )
            children.append(child)
            # The first process writes to the terminal; stderr of the others is shown if the run fails.
            work = (child.stdout, _print) if i == 0 else (child.stderr, tails[i].append)
            readers.append(threading.Thread(target=_follow, args=work, daemon=True))
            readers[-1].start()
        failed = _wait(children)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
        for reader in readers:
            reader.join(5)
        for s, handler in handlers.items():
            signal.signal(s, handler)
    if failed is None:
        return 0
    code = children[failed].returncode
    if failed and (children[0].returncode != code or code < 0):
        sys.stderr.write("".join(f"[process {failed}] {line.decode(errors='replace')}" for line in tails[failed]))
    if code >= 0:
        return code
    cause = f"was ended by {signal.Signals(-code).name}"
    if code == -signal.SIGABRT:  # JAX aborts the process when the heartbeat of another process stops
        cause = "lost contact with another process"
    print(f"msrl-jax: error: process {failed} of {count} {cause}, so all stopped; use --resume to continue", file=sys.stderr)
    return LOST


def _wait(children: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Waits for the processes; returns the index of the first that failed, after the others have had time to stop."""

    def cause() -> int | None:  # processes that see another one die end with LOST
        codes = [child.poll() for child in children]
        return next((i for lost in (False, True) for i, code in enumerate(codes) if code and (code == LOST) == lost), None)

    failed, deadline = None, float("inf")
    while any(child.poll() is None for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
        if failed is None and (failed := cause()) is not None:
            deadline = time.monotonic() + PATIENCE
    return cause() if failed is None or children[failed].returncode == LOST else failed


def _follow(stream: IO[bytes], take: Callable[[bytes], object]) -> None:
    for line in stream:
        if not _NOISE.search(line):
            take(line)


def _print(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.flush()


def end_with_parent() -> None:
    """Ends this process when its launcher dies, which closes the stdin of this process."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(LOST)

    threading.Thread(target=watch, daemon=True).start()
