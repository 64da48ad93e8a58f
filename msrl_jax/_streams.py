"""Text streams that may die: output never decides whether the work behind it goes on."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Lasting:
    """A text stream that drops its text once writing has failed: the reader left, the disk is full, the stream is closed.

    Attributes:
      error: why writing failed; None while it works.
    """

    def __init__(self, stream: TextIO | None):
        """Wraps a stream.

        Args:
          stream: where text goes; None, which Python puts in the place of a closed standard stream, takes no text.
        """
        self._stream = stream
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        """Writes text, with `?` for characters that the stream's encoding lacks."""
        try:
            self._write(text)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.error = error
        return len(text)

    def _write(self, text: str) -> None:
        if self._stream is None or self.error is not None:
            return
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:
            self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))

    def flush(self) -> None:
        """Writes buffered text."""
        try:
            if self._stream is not None and self.error is None:
                self._stream.flush()
        except (OSError, ValueError) as error:
            self.error = error

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:
            return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def lasting() -> Iterator[Lasting]:
    """Makes the standard streams of the process last, inside of the context.

    Yields:
      The stream of `sys.stdout`. A stream that failed leads nowhere afterwards, so that the interpreter can close it.
    """
    before = sys.stdout, sys.stderr
    out, err = map(Lasting, before)
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        for stream in (out, err):
            if stream.error is not None:
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def progress_stream() -> Lasting:
    """The stream that shows progress: stderr."""
    return Lasting(sys.stderr)
