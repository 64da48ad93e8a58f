"""Text streams that survive write errors, so that failing output never stops a run."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


class Lasting:
    """A text stream that drops its text after a write fails: the reader left, the disk is full, the stream is closed.

    Attributes:
      error: why writing failed; None while it works.
    """

    def __init__(self, stream: TextIO | None):
        """Wraps a stream; None, Python's stand-in for a closed standard stream, drops the text."""
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
    """Wraps the process's standard streams in `Lasting` within the context, and gives the wrapped `sys.stdout`.

    Afterwards a failed stream writes to the null device, so that the interpreter can close it.
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
