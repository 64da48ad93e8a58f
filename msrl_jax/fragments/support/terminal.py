"""Text for the terminal: numbers, and tables and paragraphs that fit."""

import io
import math
import shutil
import textwrap
from collections.abc import Iterable, Sequence


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns  # 100 without a terminal


def significant(value: float) -> str:
    """Returns a number as text: three significant digits, or all digits before the point."""
    if value == 0 or not math.isfinite(value) or abs(value) >= 999.5:
        return f"{value + 0.0:.0f}"
    return f"{value:#.3g}".rstrip(".")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: int = 0) -> list[str]:
    """Returns the lines of a table that fits the terminal, indented; if numbers do not fit, each row becomes a paragraph."""
    from rich.console import Console  # a slow import
    from rich.table import Table
    from rich.text import Text

    rows, width = [list(row) for row in rows], max(_width() - indent, 20)
    cells = [max((len(row[i]) for row in rows), default=0) for i in range(len(head))]
    if sum(max(len(title), cell) + 2 for title, cell in zip(head, cells, strict=True)) - 2 > width:
        head = [title.replace("/", "/\n") for title in head]
    grid = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
    # Numbers and short words stay whole if there is space; sentences and paths are wrapped.
    min_widths = [max(len(line) for line in title.split("\n")) for title in head]
    min_widths = [max(title, cell) if cell <= 16 else 16 for title, cell in zip(min_widths, cells, strict=True)]
    if sum(min_widths) + 2 * (len(min_widths) - 1) > width:
        titles, before = [title.replace("\n", "") for title in head[1:]], " " * indent
        detail_texts = (
            ", ".join(f"{title} {cell.strip()}" for title, cell in zip(titles, row[1:], strict=True)) for row in rows
        )
        texts = (f"{row[0].strip()}: {details}" for row, details in zip(rows, detail_texts, strict=True))
        return [line for text in texts for line in paragraph(text, before, f"{before}  ")]
    for title, narrowest in zip(head, min_widths, strict=True):
        grid.add_column(Text(title), overflow="fold", min_width=narrowest)
    for row in rows:
        grid.add_row(*(Text(cell) for cell in row))
    page = io.StringIO()
    Console(file=page, width=width, color_system=None, force_jupyter=False).print(grid)
    return [f"{' ' * indent}{line}".rstrip() for line in page.getvalue().splitlines()]


def paragraph(text: str, first: str = "", rest: str = "") -> list[str]:
    """Returns the lines of a paragraph that fits the terminal; `first` and `rest` are the prefixes of the first and of other
    lines.
    """
    return textwrap.wrap(text, max(_width(), 20), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
