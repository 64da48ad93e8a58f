"""Processes that tests start: each in a group of its own, which ends with the test."""

import contextlib
import os
import signal
import subprocess

_started: list[subprocess.Popen] = []


def start(command, **options):
    """Starts a process as `subprocess.Popen` does; SIGINT reaches it, even if whoever started the tests ignores it."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN:  # a child would inherit that
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = subprocess.Popen(list(map(str, command)), start_new_session=True, **options)
    finally:
        if before is signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)
    _started.append(process)
    return process


def run(command, timeout=300, **options):
    """Runs a process to its end as `subprocess.run` does; its output is text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = start(command, **(pipes | options))
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        end(process)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def end(process):
    """Kills what is left of a process and of those that it started."""
    _started.remove(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in filter(None, (process.stdin, process.stdout, process.stderr)):
        with contextlib.suppress(BrokenPipeError):
            stream.close()


def end_all():
    """Ends all processes that were started."""
    while _started:
        end(_started[-1])
