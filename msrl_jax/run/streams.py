"""Output streams that tolerate write errors, so that failing output stops no run."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class TolerantStream:
    """A text stream that drops its text after a write fails: the reader left, the disk is full, the stream is closed."""

    def __init__(self, stream: TextIO | None):
        """Wraps a stream; None, Python's value of a closed standard stream, drops the text."""
        self._stream = stream
        self.error: Exception | None = None  # why writing failed

    def write(self, text: str) -> int:
        """Writes text, with `?` for characters that the stream's encoding lacks."""

        def put(stream: TextIO) -> None:
            try:
                stream.write(text)
            except UnicodeEncodeError as error:
                stream.write(text.encode(error.encoding, "replace").decode(error.encoding))

        self._unless_lost(put)
        return len(text)

    def flush(self) -> None:
        """Flushes buffered text."""
        self._unless_lost(lambda stream: stream.flush())

    def _unless_lost(self, action: Callable[[TextIO], None]) -> None:
        try:
            if self._stream is not None and self.error is None:
                action(self._stream)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
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
def tolerant_streams() -> Iterator[TolerantStream]:
    """Wraps the process's standard streams in `TolerantStream` within the context, and yields the wrapped `sys.stdout`."""
    originals = sys.stdout, sys.stderr
    out, err = map(TolerantStream, originals)
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = originals
        for stream in (out, err):
            if stream.error is not None:  # the interpreter can close the null device
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def progress_stream() -> TolerantStream:
    """Returns the stream that shows progress: stderr."""
    return TolerantStream(sys.stderr)
