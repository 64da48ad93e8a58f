"""The function that `msrl-jax` and `python -m msrl_jax` call; it imports the rest, so that Ctrl-C may also come then."""

import sys
from collections.abc import Sequence

from msrl_jax.fragments.support.tracebacks import entry


@entry
def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command, as `command_line.main` does, which lists the exit codes.

    Args:
      argv: the arguments without the program's name; None uses those of the process.

    Returns:
      The exit code.
    """
    try:
        from msrl_jax.cli import command_line

        return command_line.main(argv)
    except KeyboardInterrupt:
        print("msrl-jax: error: interrupted", file=sys.stderr)
        return 130
