"""The command line, `msrl-jax`."""

import sys
from collections.abc import Sequence

PROG, INTERRUPTED = "msrl-jax", 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, as `command_line.main` does, which lists the exit codes; Ctrl-C may also come during the imports.

    Args:
      argv: the arguments without the program's name; None uses those of the process.

    Returns:
      The exit code.
    """
    try:
        from msrl_jax.cli import command_line

        return command_line.main(argv)
    except KeyboardInterrupt:
        print(f"{PROG}: error: interrupted", file=sys.stderr)
        return INTERRUPTED
