"""Text for the terminal: streams that tolerate write errors, so that failing output stops no run; numbers; tables that fit."""

import contextlib
import io
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    before = sys.stdout, sys.stderr
    out, err = map(TolerantStream, before)
    sys.stdout, sys.stderr = out, err  # type: ignore[assignment]
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before
        for stream in (out, err):
            if stream.error is not None:  # the interpreter can close the null device
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def progress_stream() -> TolerantStream:
    """The stream that shows progress: stderr."""
    return TolerantStream(sys.stderr)


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns  # 100 without a terminal


def significant(value: float) -> str:
    """A number as text: three significant digits, or all digits before the point."""
    if value == 0 or not math.isfinite(value) or abs(value) >= 999.5:
        return f"{value + 0.0:.0f}"
    return f"{value:#.3g}".rstrip(".")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> list[str]:
    """The lines of a table that fits the terminal, indented; if numbers do not fit, each row becomes a paragraph."""
    from rich.console import Console  # a slow import
    from rich.table import Table
    from rich.text import Text

    rows, width = [list(row) for row in rows], max(_width() - indent, 20)
    cells = [max((len(row[i]) for row in rows), default=0) for i in range(len(head))]
    if sum(max(len(title), cell) + 2 for title, cell in zip(head, cells, strict=True)) - 2 > width:
        head = [title.replace("/", "/\n") for title in head]
    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    # Numbers and short words stay whole if there is space; sentences and paths are wrapped.
    least = [max(len(line) for line in title.split("\n")) for title in head]
    least = [max(title, cell) if cell <= 16 else 16 for title, cell in zip(least, cells, strict=True)]
    if sum(least) + 2 * (len(least) - 1) > width:
        titles, before = [title.replace("\n", "") for title in head[1:]], " " * indent
        each = (", ".join(f"{title} {cell.strip()}" for title, cell in zip(titles, row[1:], strict=True)) for row in rows)
        texts = (f"{row[0].strip()}: {rest}" for row, rest in zip(rows, each, strict=True))
        return [line for text in texts for line in paragraph(text, before, f"{before}  ")]
    for title, narrowest in zip(head, least, strict=True):
        grid.add_column(Text(title), overflow="fold", min_width=narrowest)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    page = io.StringIO()
    Console(file=page, width=width, color_system=None, force_jupyter=False).print(grid)
    return [f"{' ' * indent}{line}".rstrip() for line in page.getvalue().splitlines()]


def paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """The lines of a paragraph that fits the terminal; `first` and `rest` are the prefixes of the first and of other lines."""
    return textwrap.wrap(text, max(_width(), 20), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
