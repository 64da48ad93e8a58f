"""The command line: parses the arguments of `msrl-jax COMMAND`, runs the command, and reports errors in one line.

Names may have parameters after a colon, as in `--policy SingleLearnerCoarse:learners=2,staleness=1` and
`--env CartPole-v1:max_steps_in_episode=200`. Every field of the chosen algorithm's config is a flag.
"""

import contextlib
import errno
import importlib.metadata
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from msrl_jax.cli import config_file, launch
from msrl_jax.cli.command import Parsed, parse
from msrl_jax.cli.commands import COMMANDS, DIVERGED, NOT_SAVED
from msrl_jax.cli.config_file import ConfigFile
from msrl_jax.cli.options import UsageError
from msrl_jax.fragments.support import compiling
from msrl_jax.fragments.support.checks import suggestion
from msrl_jax.fragments.support.tracebacks import hide_frames, operation, with_all_frames
from msrl_jax.run import streams

PROG = "msrl-jax"
BAD_INPUT, INTERRUPTED = 2, 130
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def _overview() -> str:
    lines = [f"usage: {PROG} COMMAND [OPTIONS], or {PROG} --version", ""]
    lines += [f"  {name:<10}{command.about.splitlines()[0]}" for name, command in COMMANDS.items()]
    about = [
        f"{PROG} COMMAND --help lists the options of a command.",
        "--config FILE.toml takes options from a file; --print-config writes that file, with all options.",
        f"Compiled programs are kept in the user's cache folder; {compiling.VARIABLE} is another folder, or off.",
    ]
    return "\n".join([*lines, "", *about])


_CALLS = ("CALL", "CALL_FUNCTION_EX", "CALL_KW")  # instructions of Python


def _is_ours(error: BaseException) -> bool:
    """Returns whether this package raised the error itself. Other errors are bugs, and need their traceback."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    module = "" if frame is None else frame.tb_frame.f_globals.get("__name__", "")
    # A function of the package that raised the error has hidden its frames; then the last one is that of the call here.
    raises = ["RAISE_VARARGS", "RERAISE", *(_CALLS if module.startswith("msrl_jax.cli") else ())]
    return frame is not None and module.startswith("msrl_jax.") and operation(frame) in raises


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; continues if an output stream closes or its disk is full.

    Args:
      argv: the arguments without the program's name; None uses those of the process.

    Returns:
      The exit code:

      - 0: success.
      - 1: a run diverged, an environment does not conform, or a recipe does not agree with its record.
      - 2: bad input, with one line on stderr; or a command that only prints cannot write its output.
      - 3: the run, or a file, could not be written, for example because a disk is full.
      - 75: the time limit ended the run.
      - 76: another process of the run ended.
      - 128 plus the number of a signal (130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP): the signal ended the run.
    """
    is_whole_process = argv is None
    argv = list(sys.argv[1:] if argv is None else argv)
    with streams.tolerant_streams() as out, _short_warnings(), with_all_frames():
        try:
            code = _run_command(argv)
        except Exception as error:
            hide_frames(error)
            if not _is_one_of_several():
                raise
            traceback.print_exc()
            _end_process(1)
        out.flush()
        lost = out.error is not None and not isinstance(out.error, BrokenPipeError)  # `| head -1` has read enough
        if lost and code == 0:
            complaint = _complain(f"cannot write to standard output: {out.error}")
            code = 0 if argv[0] in ("train", "record") else complaint  # these commands have written their files
    if (code and _is_one_of_several()) or (is_whole_process and (code == INTERRUPTED or compiling.is_busy())):
        _end_process(code)
    return code


def _is_one_of_several() -> bool:
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _end_process(code: int) -> NoReturn:
    """Ends the process immediately: a normal exit would wait for other processes, and for threads that compile or compute."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Shows the warnings of this package, and JAX's first one about its compilation cache, in one line each on stderr."""
    show, was_shown = warnings.showwarning, False

    def show_shortly(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        nonlocal was_shown
        is_of_cache = "persistent compilation cache" in str(message)
        if category.__module__.startswith("msrl_jax.") or (is_of_cache and not was_shown):
            print(f"{PROG}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
        elif not is_of_cache:
            show(message, category, *args, **kwargs)
        was_shown = was_shown or is_of_cache

    warnings.showwarning = show_shortly
    try:
        yield
    finally:
        warnings.showwarning = show


def _complain(message: object) -> int:
    print(f"{PROG}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return BAD_INPUT


def _run_command(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else BAD_INPUT
    if argv[0] == "--version":
        print(f"{PROG} {importlib.metadata.version(PROG)}")
        return 0
    name, *words = argv
    parsed = Parsed({}, ConfigFile(), [], [])
    try:
        if name not in COMMANDS:
            commands = [*COMMANDS, "--help", "--version"]
            raise UsageError(f"unknown command {name!r}{suggestion(name, commands)}; {PROG} --help lists them")
        command = COMMANDS[name]
        parsed = parse(f"{PROG} {name}", command, words)
        values, is_json = parsed.values, parsed.values.get("json")
        if values.get("print_config"):
            if command.check is not None:
                command.check(values)
            print(config_file.text(name, [*parsed.options, *parsed.fields], values), end="")
            return 0
        if values.get("resume") and "out" not in values:
            raise UsageError("--resume needs --out, the folder to resume")
        processes = {option: values[option] for option in ("processes", "distributed", "cpu_devices") if option in values}
        if (code := launch.start(argv, **processes)) is not None:
            return code
        with contextlib.ExitStack() as stack:
            if is_json:  # such as what an environment or a package that draws prints
                stack.enter_context(contextlib.redirect_stdout(sys.stderr))
            if name != "list":
                stack.enter_context(compiling.on_disk())
            text, data, code = command(values)
        if is_json and data is not None:
            if "jax" in sys.modules:  # otherwise the data are plain already
                from msrl_jax.run.experiment.plain_data import to_json

                data = to_json(data)
            print(json.dumps(data))
        elif text != "":
            print(text)
        return code
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except FloatingPointError as error:
        _complain(error)
        return DIVERGED
    except (RuntimeError, OSError, ValueError, TypeError, ImportError) as error:
        is_lost = type(error).__name__ == "ProcessError"
        is_of_disk = type(error).__name__ == "NotSavedError" or getattr(error, "errno", None) in _DISK  # full or failing
        if not (is_lost or isinstance(error, OSError) or _is_ours(error)):
            raise
        _complain(parsed.file.located(error, parsed.values))
        return launch.LOST if is_lost else NOT_SAVED if is_of_disk else BAD_INPUT
