"""Live progress: displays are callbacks, opened around the run. All of them write to stderr or to the notebook."""

import contextlib
import html
import sys
import time
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np

from msrl_jax.training.callbacks import Tick

Progress = bool | Literal["auto", "bar", "lines", "notebook"]
Show = Callable[[Tick], None]
Display = Callable[[str, int], contextlib.AbstractContextManager[Show]]

_SHOWN = {"episode_return": "return", "eval_return": "eval"}


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config


def choose_display(progress: Progress) -> Display:
    """Chooses how to show a run's progress.

    Args:
      progress: "bar" in a terminal, "lines" of text, "notebook"; "auto" or True chooses; False shows nothing.

    Returns:
      A function `(title, total_steps)` whose context manager gives the callback that updates the display.

    Raises:
      ValueError: on any other value of `progress`.
    """
    if progress is False:
        return _nothing
    if progress in ("auto", True):
        progress = "notebook" if in_notebook() else "bar" if sys.stderr.isatty() else "lines"
    displays = {"bar": _bar, "lines": _lines, "notebook": _notebook}
    if progress not in displays:
        raise ValueError(f"progress={progress!r}: choose one of {['auto', *displays]}, or False")
    return displays[progress]


def _facts(tick: Tick) -> str:
    """The numbers worth watching, as text: means over the members."""
    facts = [f"{tick.metrics['steps_per_second']:,.0f} {tick.unit.removeprefix('environment ')}/s"]
    for name, word in _SHOWN.items():
        value = float(np.mean(tick.metrics.get(name, np.nan)))
        if not np.isnan(value):
            facts.append(f"{word} {value:.1f}")
    return "  ".join(facts)


@contextlib.contextmanager
def _nothing(title: str, total_steps: int) -> Iterator[Show]:
    yield lambda tick: None


@contextlib.contextmanager
def _bar(title: str, total_steps: int) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        SpinnerColumn(), TextColumn("[bold]{task.description}"), BarColumn(),
        TextColumn("{task.completed:,.0f}/{task.total:,.0f} steps"), TimeElapsedColumn(), TextColumn("eta"),
        TimeRemainingColumn(), TextColumn("{task.fields[facts]}"),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_steps, facts="compiling")
        yield lambda tick: bar.update(task, completed=tick.step, facts=_facts(tick))


@contextlib.contextmanager
def _lines(title: str, total_steps: int) -> Iterator[Show]:
    print(f"{title}: compiling", file=sys.stderr, flush=True)
    last = -np.inf

    def show(tick: Tick) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= 1 or tick.step >= total_steps:
            last = now
            done = f"{tick.step:,}/{total_steps:,} steps ({tick.step / total_steps:.0%})"
            print(f"{title}: {done}  {_facts(tick)}", file=sys.stderr, flush=True)

    yield show


@contextlib.contextmanager
def _notebook(title: str, total_steps: int) -> Iterator[Show]:
    from IPython.display import HTML, display

    def page(step: int, facts: str) -> HTML:
        return HTML(
            f"<div><b>{html.escape(title)}</b> <progress max='{total_steps}' value='{step}'></progress> "
            f"{step:,}/{total_steps:,} steps &nbsp; {html.escape(facts)}</div>"
        )

    handle = display(page(0, "compiling"), display_id=True)
    assert handle is not None  # display_id=True asks for one
    yield lambda tick: handle.update(page(tick.step, _facts(tick)))
