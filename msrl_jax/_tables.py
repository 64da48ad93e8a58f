"""Tables and paragraphs of text that fit the terminal."""

import io
import shutil
import textwrap
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100
"""Columns of text if there is no terminal."""


def text_width() -> int:
    """The columns of the terminal; `WIDTH` if there is none."""
    return shutil.get_terminal_size((WIDTH, 24)).columns


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> list[str]:
    """The lines of a table that fits the terminal, behind `indent` spaces.

    Long sentences and paths are folded; if numbers do not fit, each row becomes a paragraph.
    """
    rows, width = [list(row) for row in rows], max(text_width() - indent, 20)
    cells = [max((len(row[i]) for row in rows), default=0) for i in range(len(head))]
    if sum(max(len(title), cell) + 2 for title, cell in zip(head, cells, strict=True)) - 2 > width:
        head = [title.replace("/", "/\n") for title in head]
    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    # Numbers and short words stay whole if there is space; sentences and paths are folded.
    least = [max(len(line) for line in title.split("\n")) for title in head]
    least = [max(title, cell) if cell <= 16 else 16 for title, cell in zip(least, cells, strict=True)]
    if sum(least) + 2 * (len(least) - 1) > width:
        return [line for row in rows for line in _as_paragraph(head, row, " " * indent)]
    for title, narrowest in zip(head, least, strict=True):
        grid.add_column(Text(title), overflow="fold", min_width=narrowest)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    page = io.StringIO()
    Console(file=page, width=width, color_system=None, force_jupyter=False).print(grid)
    return [f"{' ' * indent}{line}".rstrip() for line in page.getvalue().splitlines()]


def _as_paragraph(head: Sequence[str], row: Sequence[str], indent: str) -> list[str]:
    titles = [title.replace("\n", "") for title in head[1:]]
    rest = ", ".join(f"{title} {cell.strip()}" for title, cell in zip(titles, row[1:], strict=True))
    return paragraph(f"{row[0].strip()}: {rest}", indent, f"{indent}  ")


def paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """The lines of a paragraph that fits the terminal; `first` and `rest` are the prefixes of the first and of other lines."""
    return textwrap.wrap(
        text, max(text_width(), 20), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
    )  # fmt: skip
