"""Callbacks: functions that are called with a `Tick` after every chunk. Loggers and progress displays are callbacks."""

import contextlib
import dataclasses
import hashlib
import html
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, TypeAlias

import jax
import numpy as np

from msrl_jax.envs.base import PyTree
from msrl_jax.envs.param_sources import changed, find_source, replace_sources
from msrl_jax.envs.params import ParamSampler
from msrl_jax.fragments.runtime.transfer import put
from msrl_jax.fragments.support.checks import name_of, shown, whole
from msrl_jax.fragments.support.terminal import significant
from msrl_jax.run import processes
from msrl_jax.run.evaluation.evaluate import MOST_SHOWN
from msrl_jax.run.evaluation.history import scalars, team_of
from msrl_jax.run.loop.loop import Run, StopReason, is_true
from msrl_jax.run.streams import TolerantStream, progress_stream


def _no_run(values: Any) -> None:
    raise RuntimeError("this Tick belongs to no run, so it has no parameters to set")


@dataclasses.dataclass(frozen=True)
class Tick:
    """The progress of a run after a chunk of iterations.

    Attributes:
      step: number of steps so far of one member, in units of `unit`.
      iteration: number of training iterations so far.
      total_steps: number of steps of the whole run.
      metrics: the chunk's row of the history: a float per metric, or an array `[M]` for a run of `M` seeds.
      get_state: returns the state of the run.
      unit: the unit of steps, `Agent.unit`.
      resumed_from: the step at which this run resumed from a checkpoint; 0 for a new run.
      set_env_params: changes the distributions from which the next episodes draw their environment parameters, in a run with
        `env_params`. Pass a mapping from some of the names to values of the same kinds as before, or the level of a
        `Curriculum`. Nothing is recompiled. If there are several processes, call it with the same values in all of them.
    """

    step: int
    iteration: int
    total_steps: int
    metrics: Mapping[str, float | np.ndarray]
    get_state: Callable[[], Any] = dataclasses.field(repr=False)
    unit: str = "environment steps"
    resumed_from: int = 0
    set_env_params: Callable[[Any], None] = dataclasses.field(default=_no_run, repr=False)

    @property
    def state(self) -> PyTree:
        """The state of the algorithm. The next chunk reuses its buffers, so copy what you keep (`jax.device_get`)."""
        return self.get_state()


Callback: TypeAlias = Callable[[Tick], object]
"""Called once per chunk; the run ends if it returns True (of Python, NumPy or JAX)."""


class Callbacks:
    """A hook that calls functions with a `Tick`, and writes the environment parameters that they set into the state."""

    def __init__(self, functions: Sequence[Callback]):
        self._functions, self._values = functions, None

    def after(self, run: Run) -> StopReason | None:
        """Calls all functions; ends the run if one of them, in any process, returned True."""
        steps_per_iteration = run.experiment.steps_per_iteration
        tick = Tick(
            run.step,
            run.iteration,
            run.iterations * steps_per_iteration,
            _read_only(run.rows[-1]),
            lambda: processes.to_hosts(run.state()),
            run.experiment.behavior.agent.unit,
            run.resumed_iteration * steps_per_iteration,
            lambda values: self._set_env_params(run, values),
        )
        with processes.together("a callback"):
            try:
                stops = [_call_function(function, tick) for function in self._functions]
                answer = "stop" if any(stops) else ""
            except KeyboardInterrupt:  # end the run as Ctrl-C does
                answer = "SIGINT"
        answers = processes.gathered(answer)
        self._apply_env_params(run)
        if "SIGINT" in answers:
            return StopReason("interrupted", "SIGINT")
        return StopReason("stopped") if any(answers) else None

    def _set_env_params(self, run: Run, values: Any) -> None:
        changed_values = changed(run.experiment.environment, values)
        if not find_source(run.run_state):
            fact = f"{run.experiment.name} keeps no environments between iterations"
            raise ValueError(f"{fact}, so no parameters can be set during its run")
        self._values = {**(self._values or {}), **changed_values} if isinstance(changed_values, Mapping) else changed_values

    def _apply_env_params(self, run: Run) -> None:
        values, self._values = self._values, None
        digest = "" if values is None else hashlib.sha256(repr(jax.tree.leaves_with_path(values)).encode()).hexdigest()
        if len(set(processes.gathered(digest))) > 1:
            raise ValueError("the processes of the run called tick.set_env_params with different values; use the same in all")
        if values is None:
            return

        def placed(old: jax.Array, new: Any) -> jax.Array:
            if new is old:
                return old
            return put([np.broadcast_to(new, old.shape)], [(old.sharding,)], copy=True)[0][0]  # type: ignore[list-item]

        def replaced(source: ParamSampler) -> ParamSampler:
            new_values = source.values | values if isinstance(values, Mapping) else values
            return source._replace(values=jax.tree.map(placed, source.values, new_values))

        run.run_state = replace_sources(run.run_state, replaced)
        if run.finding is None:
            run.changed_at = run.iteration


def _read_only(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of metrics whose arrays are read-only views, because the history of the run shares them."""
    views = {name: value.view() for name, value in row.items() if isinstance(value, np.ndarray)}
    for view in views.values():
        view.setflags(write=False)
    return {**row, **views}


def _call_function(function: Callback, tick: Tick) -> bool:
    """Returns whether a function stops the run, by a Python, NumPy or JAX True; raises ValueError if it took its state."""
    states = []
    answer: Any = function(dataclasses.replace(tick, get_state=lambda: states.append(tick.get_state()) or states[-1]))
    for path, leaf in jax.tree.leaves_with_path(states[-1:]):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise ValueError(
                f"the callback {name} deleted or donated tick.state{jax.tree_util.keystr(path[1:])}, which the run still "
                "needs; donate a copy: jax.tree.map(jnp.copy, tick.state)"
            )
    return is_true(answer)


def _check_takes_tick(where: str, callback: Callable[..., object]) -> None:
    """Raises TypeError if a function cannot be called with one argument; a builtin may have no signature."""
    try:
        inspect.signature(callback).bind(None)
    except TypeError as error:
        raise TypeError(f"{where}: {error}; write a function of one argument, a Tick") from None
    except ValueError:
        return


def check_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """Returns the callbacks of a run as a tuple: functions of a `Tick`, or hooks."""
    if not isinstance(callbacks, Iterable):
        example = f"[{name_of(callbacks)}]" if callable(callbacks) else "[...], functions of a Tick, or leave it out"
        raise TypeError(f"callbacks={shown(callbacks)} is not a sequence; write callbacks={example}")
    callbacks = tuple(callbacks)
    for i, callback in enumerate(callbacks):
        if isinstance(callback, type) or (not callable(callback) and not is_hook(callback)):
            fact = f"callbacks[{i}]={shown(callback)} cannot be called"
            raise TypeError(f"{fact}; use a function of a Tick, or an instance of a hook")
        if inspect.isgeneratorfunction(callback) or inspect.iscoroutinefunction(callback):
            raise TypeError(f"callbacks[{i}]={shown(callback)} would not run when it is called; use a plain function")
        if not is_hook(callback):
            _check_takes_tick(f"callbacks[{i}]={shown(callback)}", callback)
        if is_hook(callback) and (interval := getattr(callback, "every", None)) is not None:
            whole(f"callbacks[{i}].every", interval)
    return callbacks


def is_hook(callback: object) -> bool:
    """Returns whether a callback is a hook, not a function of a `Tick`."""
    return any(hasattr(callback, phase) for phase in ("begin", "before", "after", "end"))


def _import_extra(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"logging to {extra} needs the package {module!r}; install it with: pip install 'msrl-jax[{extra}]'"
        ) from error


class TensorBoard:
    """Logs every metric to TensorBoard, against environment steps; close it after the run."""

    def __init__(self, folder: str | os.PathLike):
        """Finds TensorBoard's writer; the event file is opened at the first tick.

        Args:
          folder: folder of the event file.

        Raises:
          ImportError: if the extra is not installed; the message says how to install it.
        """
        self._writer_type = _import_extra("tensorboardX", "tensorboard").SummaryWriter
        self._folder = os.fspath(folder)
        self._writer = None

    def __call__(self, tick: Tick) -> None:
        """Logs one tick."""
        if self._writer is None:  # entries that a killed run logged after its checkpoint are logged again
            purge = tick.resumed_from + 1 if tick.resumed_from else None
            self._writer = self._writer_type(self._folder, purge_step=purge)
        for name, value in scalars(tick.metrics).items():
            if np.isfinite(value):
                self._writer.add_scalar(name, value, tick.step)

    def close(self) -> None:
        """Writes pending entries and closes the event file."""
        if self._writer is not None:
            self._writer.close()


class WandB:
    """Logs every metric to Weights & Biases, against environment steps; close it after the run."""

    def __init__(self, **init: Any):
        """Starts a run.

        Args:
          **init: the arguments of `wandb.init`, such as `project`, `name` and `config`.

        Raises:
          ImportError: if the extra is not installed; the message says how to install it.
        """
        self._run = _import_extra("wandb", "wandb").init(**init)

    def __call__(self, tick: Tick) -> None:
        """Logs one tick."""
        self._run.log({k: v for k, v in scalars(tick.metrics).items() if np.isfinite(v)}, step=tick.step)

    def close(self) -> None:
        """Uploads pending entries and ends the run."""
        self._run.finish()


# --- progress displays, on stderr or in a notebook; if a display fails, the run continues without it

ProgressDisplay = bool | Literal["auto", "bar", "lines", "notebook"]
Show = Callable[[Tick], None]
Display = Callable[..., contextlib.AbstractContextManager[Show]]

_SHOWN = {"episode_return": "return", "eval_return": "eval"}
_USUAL = ("episode_return", "episode_length")  # columns that start with these names are metrics of the environment


def choose_display(progress: ProgressDisplay) -> Display:
    """Chooses the display of a run's progress."""
    if progress is False:
        return lambda *args: contextlib.nullcontext(lambda tick: None)
    if progress in ("auto", True):
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython else None
        is_notebook = shell is not None and "IPKernelApp" in shell.config
        progress = "notebook" if is_notebook else "bar" if TolerantStream(sys.stderr).isatty() else "lines"
    displays = {"bar": _show_bar, "lines": _show_lines, "notebook": _show_in_notebook}
    if progress not in displays:
        raise ValueError(f"progress={shown(progress)}: choose one of {['auto', *displays]}, or False")
    return displays[progress]


def _facts(tick: Tick, members: int = 1) -> str:
    """Formats the most important metrics as text, averaged over the members."""
    rate, unit = tick.metrics["steps_per_second"] / members, tick.unit.removeprefix("environment ")
    facts = [f"{rate:,.0f} {unit}/s{_per_member(members)}"]
    values = {name: value for name, x in tick.metrics.items() if not np.isnan(value := float(np.mean(x)))}
    for name, word in _SHOWN.items():
        teams = [f"{team} {significant(value)}" for column, value in values.items() if (team := team_of(column, name))]
        if name in values:
            facts.append(f"{word} {significant(values[name])}" + f" ({', '.join(teams)})" * bool(teams))
    env_metrics = [name for name in values if name.startswith("episode_") and name.partition("/")[0] not in _USUAL]
    facts += [
        f"{name.removeprefix('episode_').replace('_', ' ')} {significant(values[name])}" for name in env_metrics[:MOST_SHOWN]
    ]
    return "  ".join(facts)


def _per_member(members: int) -> str:
    return " per member" * (members > 1)


def _line(tick: Tick, total_steps: int, unit: str, members: int) -> str:
    progress = f"{tick.step:,}/{total_steps:,} {unit}{_per_member(members)} ({tick.step / total_steps:.0%})"
    return f"{progress}  {_facts(tick, members)}"


def _is_evaluated(tick: Tick) -> bool:
    """Returns whether an evaluation followed the chunk; every display keeps the line of such a chunk."""
    return not np.isnan(tick.metrics.get("eval_return", np.nan)).all()


@contextlib.contextmanager
def _show_bar(title: str, total_steps: int, unit: str = "steps", members: int = 1) -> Iterator[Show]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
    from rich.text import Text

    console = Console(file=progress_stream())  # type: ignore[arg-type]
    narrow = console.width < 100
    per_member = _per_member(members)
    count = TextColumn(f"{{task.completed:,.0f}}/{{task.total:,.0f}} {unit}{per_member}", table_column=Column(no_wrap=True))
    widest = 30 - len(per_member) * narrow
    name = TextColumn("[bold]{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=widest))
    elapsed = () if narrow else (TimeElapsedColumn(),)
    bar = Bar(
        SpinnerColumn(),
        name,
        BarColumn(bar_width=12 if narrow else 40),
        count,
        *elapsed,
        TextColumn("eta"),
        TimeRemainingColumn(),
    )
    task = bar.add_task(title, total=total_steps)

    def lines(facts: str) -> Group:  # two lines, so that the text takes no space from the bar
        return Group(bar, Text(f"  {facts}", no_wrap=True, overflow="ellipsis"))

    with Live(lines("compiling"), console=console) as live:

        def show(tick: Tick) -> None:
            bar.update(task, completed=tick.step)
            live.update(lines(_facts(tick, members)))
            if _is_evaluated(tick):  # stays above the bar
                live.console.print(Text(_line(tick, total_steps, unit, members)))

        yield show


@contextlib.contextmanager
def _show_lines(title: str, total_steps: int, unit: str = "steps", members: int = 1) -> Iterator[Show]:
    stream = progress_stream()
    print(f"{title}: compiling", file=stream, flush=True)
    last_time = -np.inf

    def show(tick: Tick) -> None:
        nonlocal last_time
        current_time = time.monotonic()
        if current_time - last_time >= 1 or tick.step >= total_steps or _is_evaluated(tick):
            last_time = current_time
            print(f"{title}: {_line(tick, total_steps, unit, members)}", file=stream, flush=True)

    yield show


@contextlib.contextmanager
def _show_in_notebook(title: str, total_steps: int, unit: str = "steps", members: int = 1) -> Iterator[Show]:
    from IPython.display import HTML, display

    def page(step: int, facts: str) -> HTML:
        return HTML(
            f"<div><b>{html.escape(title)}</b> <progress max='{total_steps}' value='{step}'></progress> "
            f"{step:,}/{total_steps:,} {html.escape(unit)}{_per_member(members)} &nbsp; {html.escape(facts)}</div>"
        )

    handle = display(page(0, "compiling"), display_id=True)
    assert handle is not None  # because of display_id=True

    def show(tick: Tick) -> None:
        handle.update(page(tick.step, _facts(tick, members)))
        if _is_evaluated(tick):  # stays below the bar
            display(HTML(f"<div>{html.escape(_line(tick, total_steps, unit, members))}</div>"))

    yield show
