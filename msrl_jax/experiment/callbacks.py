"""Callbacks: functions of a `Tick` that are called after every chunk, and loggers."""

import dataclasses
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import jax
import numpy as np

from msrl_jax._checks import whole
from msrl_jax.envs.params import ParamSource, changed, find_source, replace_sources
from msrl_jax.experiment import processes
from msrl_jax.experiment.history import scalars
from msrl_jax.experiment.run import Ending, Run
from msrl_jax.fragments.runtime.transfer import put


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
      resumed_from: the step at which this run went on from a checkpoint; 0 for a new run.
      set_env_params: changes what the next episodes draw the parameters of their environments from, of a run with
        `env_params`: name -> value for some of them, each of the kind that it was; or the level of a `Curriculum`. Nothing is
        compiled again. Several processes have to call it alike.
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
    def state(self) -> Any:
        """The state of the algorithm. The next chunk reuses its memory, so copy what you keep (`jax.device_get`)."""
        return self.get_state()


def short_unit(unit: str) -> str:
    """A unit of steps in one word: `"steps"` for `"environment steps"`."""
    return unit.removeprefix("environment ")


Callback: TypeAlias = Callable[[Tick], object]
"""Called once per chunk; the run ends if it returns True (of Python, NumPy or JAX)."""


class Callbacks:
    """A hook that calls functions of a `Tick`, and puts the parameters of environments that they set into the state.

    A KeyboardInterrupt from a function ends the run like Ctrl-C.
    """

    def __init__(self, functions: Sequence[Callback]):
        self._functions, self._values = functions, None

    def after(self, run: Run) -> Ending | None:
        """Calls all functions; ends the run if one of them, in any process, returned True."""
        each = run.experiment.steps_per_iteration
        tick = Tick(
            run.step, run.iteration, run.iterations * each, dict(run.rows[-1]), lambda: processes.to_hosts(run.state()),
            run.experiment.behavior.agent.unit, run.resumed_from * each, lambda values: self._set_env_params(run, values),
        )  # fmt: skip
        with processes.together("a callback"):
            try:
                stops = [_answer(function, tick) for function in self._functions]
                answer = "stop" if any(stops) else ""
            except KeyboardInterrupt:
                answer = "SIGINT"
        answers = processes.gathered(answer)
        self._apply_env_params(run)
        if "SIGINT" in answers:
            return Ending("interrupted", "SIGINT")
        return Ending("stopped") if any(answers) else None

    def _set_env_params(self, run: Run, values: Any) -> None:
        new = changed(run.experiment.environment, values)
        if not find_source(run.run_state):
            raise ValueError(f"{run.experiment.name} takes no environment steps, so no parameters can be set during its run")
        self._values = {**(self._values or {}), **new} if isinstance(new, Mapping) else new

    def _apply_env_params(self, run: Run) -> None:
        values, self._values = self._values, None
        digest = "" if values is None else hashlib.sha256(repr(jax.tree.leaves_with_path(values)).encode()).hexdigest()
        if len(set(processes.gathered(digest))) > 1:
            raise ValueError("the processes of the run called tick.set_env_params with different values; call it alike in all")
        if values is None:
            return

        def placed(old: jax.Array, new: Any) -> jax.Array:
            if new is old:
                return old
            return put([np.broadcast_to(new, old.shape)], [(old.sharding,)], copy=True)[0][0]  # type: ignore[list-item]

        def replaced(source: ParamSource) -> ParamSource:
            new = source.values | values if isinstance(values, Mapping) else values
            return source._replace(values=jax.tree.map(placed, source.values, new))

        run.run_state = replace_sources(run.run_state, replaced)
        if run.finding is None:
            run.changed_at = run.iteration


def _is_true(answer: Any) -> bool:
    """Whether a callback returned True (of Python, NumPy or JAX); other results have no effect."""
    return answer is True or (getattr(answer, "shape", None) == () and str(answer.dtype) == "bool" and bool(answer))


def _answer(function: Callback, tick: Tick) -> bool:
    """Whether a function stops the run; raises ValueError if it took the state that the run goes on with."""
    given = []
    stops = _is_true(function(dataclasses.replace(tick, get_state=lambda: given.append(tick.get_state()) or given[-1])))
    for path, leaf in jax.tree.leaves_with_path(given[-1:]):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            name = getattr(function, "__qualname__", type(function).__qualname__)
            raise ValueError(
                f"the callback {name} deleted or donated tick.state{jax.tree_util.keystr(path[1:])}, with which the run goes "
                "on; give away a copy: jax.tree.map(jnp.copy, tick.state)"
            )
    return stops


def check_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """The callbacks of a run as a tuple: functions of a `Tick`, or hooks."""
    if not isinstance(callbacks, Iterable):
        given = f"[{callbacks!r}]" if callable(callbacks) else "[...], functions of a Tick, or leave it out"
        raise TypeError(f"callbacks={callbacks!r} is no sequence; write callbacks={given}")
    callbacks = tuple(callbacks)
    for i, callback in enumerate(callbacks):
        if not callable(callback) and not is_hook(callback):
            raise TypeError(f"callbacks[{i}]={callback!r} cannot be called; use a function of a Tick")
        if is_hook(callback) and (every := getattr(callback, "every", None)) is not None:
            whole(f"callbacks[{i}].every", every)
    return callbacks


def is_hook(callback: Any) -> bool:
    """Whether a callback is a hook, and no function of a `Tick`."""
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
        """Looks for TensorBoard's writer; the event file is opened at the first tick.

        Args:
          folder: folder of the event file.

        Raises:
          ImportError: if the extra is not installed; the message says how to install it.
        """
        self._writer_type = _import_extra("tensorboardX", "tensorboard").SummaryWriter
        self._folder = os.fspath(folder)
        self._writer = None

    def __call__(self, tick: Tick) -> None:
        """Writes one tick."""
        if self._writer is None:  # what a killed run logged after its checkpoint is logged again
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
