"""Live progress on stderr or in a notebook: displays are callbacks, opened around the run.

If a display cannot be written any more, the run continues without it.
"""

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from msrl_jax._terminal import Lasting, progress_stream
from msrl_jax.experiment.callbacks import Tick, short_unit
from msrl_jax.experiment.history import team_of

Progress = bool | Literal["auto", "bar", "lines", "notebook"]
Show = Callable[[Tick], None]
Display = Callable[..., contextlib.AbstractContextManager[Show]]

_SHOWN = {"episode_return": "return", "eval_return": "eval"}


def in_notebook() -> bool:
    """Whether this process is a notebook kernel."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


def choose_display(progress: Progress) -> Display:
    """Chooses the display of a run's progress."""
    if progress is False:
        return _nothing
    if progress in ("auto", True):
        progress = "notebook" if in_notebook() else "bar" if Lasting(sys.stderr).isatty() else "lines"
    displays = {"bar": _bar, "lines": _lines, "notebook": _notebook}
    if progress not in displays:
        raise ValueError(f"progress={progress!r}: choose one of {['auto', *displays]}, or False")
    return displays[progress]


def _facts(tick: Tick) -> str:
    """The most important metrics as text, averaged over the members."""
    facts = [f"{tick.metrics['steps_per_second']:,.0f} {short_unit(tick.unit)}/s"]
    known = {name: value for name, x in tick.metrics.items() if not np.isnan(value := float(np.mean(x)))}
    for name, word in _SHOWN.items():
        teams = [f"{team} {x:.1f}" for column, x in known.items() if (team := team_of(column, name))]
        if name in known:
            facts.append(f"{word} {known[name]:.1f}" + f" ({', '.join(teams)})" * bool(teams))
    return "  ".join(facts)


@contextlib.contextmanager
def _nothing(title: str, total_steps: int, unit: str = "steps") -> Iterator[Show]:
    yield lambda tick: None


@contextlib.contextmanager
def _bar(title: str, total_steps: int, unit: str = "steps") -> Iterator[Show]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
    from rich.text import Text

    console = Console(file=progress_stream())  # type: ignore[arg-type]
    narrow = console.width < 100
    count = TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}", table_column=Column(no_wrap=True))
    name = TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=30))
    elapsed = () if narrow else (TimeElapsedColumn(),)
    bar = Bar(
        SpinnerColumn(), name, BarColumn(bar_width=12 if narrow else 40), count, *elapsed, TextColumn("eta"),
        TimeRemainingColumn(),
    )  # fmt: skip
    task = bar.add_task(title, total=total_steps)

    def lines(facts: str) -> Group:  # two lines, so that the text takes no space from the bar
        return Group(bar, Text(f"  {facts}", no_wrap=True, overflow="ellipsis"))

    with Live(lines("compiling"), console=console) as live:

        def show(tick: Tick) -> None:
            bar.update(task, completed=tick.step)
            live.update(lines(_facts(tick)))

        yield show


@contextlib.contextmanager
def _lines(title: str, total_steps: int, unit: str = "steps") -> Iterator[Show]:
    stream = progress_stream()
    print(f"{title}: compiling", file=stream, flush=True)
    last = -np.inf

    def show(tick: Tick) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1 or tick.step >= total_steps:
            last = now
            done = f"{tick.step:,}/{total_steps:,} {unit} ({tick.step / total_steps:.0%})"
            print(f"{title}: {done}  {_facts(tick)}", file=stream, flush=True)

    yield show


@contextlib.contextmanager
def _notebook(title: str, total_steps: int, unit: str = "steps") -> Iterator[Show]:
    from IPython.display import HTML, display

    def page(step: int, facts: str) -> HTML:
        return HTML(
            f"<div><b>{html.escape(title)}</b> <progress max='{total_steps}' value='{step}'></progress> "
            f"{step:,}/{total_steps:,} {html.escape(unit)} &nbsp; {html.escape(facts)}</div>"
        )

    handle = display(page(0, "compiling"), display_id=True)
    assert handle is not None  # display_id=True asks for one
    yield lambda tick: handle.update(page(tick.step, _facts(tick)))
