"""Callbacks, called once per chunk of iterations: their argument `Tick`, and loggers."""

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np


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
        """The state of the run. The next chunk reuses its memory, so copy what you keep (`jax.device_get`)."""
        return self.get_state()


def short_unit(unit: str) -> str:
    """A unit of steps in one word: `"steps"` for `"environment steps"`."""
    return unit.removeprefix("environment ")


Callback: TypeAlias = Callable[[Tick], object]
"""Called once per chunk; the run ends if it returns True (of Python, NumPy or JAX)."""


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """Checks the callbacks of a run.

    Args:
      callbacks: a sequence of functions.

    Returns:
      The functions.

    Raises:
      TypeError: if it is no sequence, or one of them cannot be called.
    """
    if not isinstance(callbacks, Iterable):
        given = f"[{callbacks!r}]" if callable(callbacks) else "[...], functions of a Tick, or leave it out"
        raise TypeError(f"callbacks={callbacks!r} is no sequence; write callbacks={given}")
    callbacks = tuple(callbacks)
    for i, callback in enumerate(callbacks):
        if not callable(callback):
            raise TypeError(f"callbacks[{i}]={callback!r} cannot be called; use a function of a Tick")
    return callbacks


def scalars(metrics: Mapping[str, float | np.ndarray]) -> dict[str, float]:
    """Flattens a row to floats: an array `[M]` gives its mean under its name, and one entry `name/i` per member."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        flat[name] = float(np.mean(value))
        if np.ndim(value):
            flat |= {f"{name}/{i}": float(x) for i, x in enumerate(np.asarray(value))}
    return flat


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
