"""Helpers of suite adapters: quiet imports, checks of names and parameters.

An adapter has a function `make(name, **params)`. It raises ValueError for an unknown name, for an unknown parameter, and for a
value that the environment rejects.
"""

import contextlib
import dataclasses
import importlib
import inspect
import io
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from msrl_jax.envs.suites.catalog import SUITES
from msrl_jax.fragments.support.checks import shown, suggestion


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences suites, which print and use deprecated features of other packages; users can change neither."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", ".*precision lowered by casting", UserWarning)  # bounds of spaces
        warnings.filterwarnings("ignore", "Brax System", UserWarning)  # advises all users to switch to another suite
        yield


class _Deferred(ModuleType):
    """A module that runs when a missing name is first looked up. One of `LazyLoader` also runs at its second import."""

    def __getattr__(self, name: str) -> Any:
        if name in ("__path__", "__file__", "__cached__"):  # Python looks for these before it sets them
            raise AttributeError(name)
        spec: Any = self.__spec__
        self.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader = self.__loader__ = spec.loader.loader
        spec.loader.exec_module(self)
        return getattr(self, name)


class _Deferring:
    """A loader of deferred modules."""

    def __init__(self, loader: Any):
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Deferred(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does not run the module yet."""


@contextlib.contextmanager
def loaded_at_first_use(*modules: str) -> Iterator[None]:
    """Defers the modules if they are first imported inside this context: they run when one of their names is first used."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, *_: Any) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path) if name in modules else None
            if spec is not None and spec.loader is not None:
                spec.loader = _Deferring(spec.loader)  # type: ignore[assignment]
            return spec

    sys.meta_path.insert(0, Finder)
    try:
        yield
    finally:
        sys.meta_path.remove(Finder)


def load(module: str) -> Any:
    """Imports a module of a suite."""
    with quiet():
        return importlib.import_module(module)


def check_name(title: str, name: str, names: Iterable[str], kind: str = "environment") -> None:
    """Raises ValueError unless a suite has an environment, or another `kind` of item, with that name."""
    if name not in (names := sorted(names)):
        has = ", ".join(names) if len(names) <= 100 else f"{len(names):,} others, such as {names[0]}"
        raise ValueError(f"{title} has no {kind} {name!r}{suggestion(name, names)}; it has {has}")


def full_name(prefix: str, name: str, names: Iterable[str]) -> str:
    """`PREFIX:NAME`; raises ValueError unless the suite has an environment with that name."""
    check_name(SUITES[prefix].title, name, names)
    return f"{prefix}:{name}"


def check_params(full: str, params: Iterable[str], parameters: Iterable[str]) -> None:
    """Raises ValueError on a parameter that an environment does not have."""
    parameters = sorted(parameters)
    if unknown := [p for p in params if p not in parameters]:
        has = f"it has {', '.join(parameters)}" if parameters else "it has none"
        raise ValueError(f"{full} has no parameter {unknown[0]!r}{suggestion(unknown[0], parameters)}; {has}")


def arguments_of(kind: type) -> set[str]:
    """Returns the names of the arguments of a class and of its base classes, except `*args` and `**kwargs`."""
    bases = [base for base in kind.__mro__ if base is not object and "__init__" in vars(base)]
    signatures = [inspect.signature(vars(base)["__init__"]) for base in bases]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for signature in signatures for p in signature.parameters.values() if p.kind in kinds} - {"self"}


def build(full: str, make: Callable[..., Any], params: Mapping[str, Any]) -> Any:
    """Calls a constructor; converts its errors to ValueError."""
    try:
        with quiet():
            return make(**params)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{full} cannot be made with {dict(params)}: {error}") from error


def replace(full: str, defaults: Any, values: Mapping[str, Any]) -> Any:
    """Replaces values in a dataclass of parameters; raises ValueError unless they have the types of the defaults."""
    return dataclasses.replace(defaults, **{key: fit(f"{full}: {key}", x, getattr(defaults, key)) for key, x in values.items()})


def fit(place: str, value: Any, default: Any) -> Any:
    """Converts a value to the type of the default; raises ValueError if that changes the value, or makes a number infinite."""
    scalar = isinstance(default, bool | int | float)
    if not scalar and not hasattr(default, "dtype"):
        return value  # None, names and tuples: the environment checks them
    try:
        converted = type(default)(value) if scalar else jnp.asarray(value, default.dtype)
        fits = bool(np.all(np.asarray(converted) == np.asarray(value)))
        if scalar:
            fits = fits and (isinstance(default, bool) or not isinstance(value, bool))
            fits = fits and (math.isfinite(converted) or converted == default)
    except (TypeError, ValueError, OverflowError):
        fits, converted = False, None
    if not fits:
        kind = type(default).__name__ if scalar else f"array {default.dtype}{list(default.shape)}"
        raise ValueError(f"{place}={shown(value)} does not fit; its default is {default} ({kind})")
    return converted


_PIXELS = 480  # the longer side of a figure


def image_of(figure: Any) -> np.ndarray:
    """Renders a Matplotlib figure. `[H, W, 3]` uint8"""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(_PIXELS / max(figure.get_size_inches()))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]


def no_windows() -> None:
    """Makes pygame, which draws for Gymnasium, open neither a window nor a sound device, unless the user chose drivers."""
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


class Camera:
    """Renders MuJoCo states: positions, velocities, and mocap bodies."""

    def __init__(self, model: Any, name: str):
        import mujoco

        self._mujoco, self._model = mujoco, model
        self._data = mujoco.MjData(model)  # type: ignore[attr-defined]
        try:
            self._renderer = mujoco.Renderer(model, height=240, width=320)
        except Exception as error:
            raise RuntimeError(
                f"MuJoCo cannot draw {name} ({error}); without a display, start Python with MUJOCO_GL=egl or MUJOCO_GL=osmesa"
            ) from error

    def __call__(  # noqa: D102
        self, qpos: Any, qvel: Any, mocap_pos: Any = None, mocap_quat: Any = None
    ) -> np.ndarray:
        self._data.qpos, self._data.qvel = qpos, qvel
        if mocap_pos is not None:
            self._data.mocap_pos, self._data.mocap_quat = mocap_pos, mocap_quat
        self._mujoco.mj_forward(self._model, self._data)
        self._renderer.update_scene(self._data, camera=0 if self._model.ncam else -1)
        return self._renderer.render()


def scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scalar numbers among the values, with valid metric names: `reward/upright` becomes `reward_upright`."""
    return {re.sub(r"\W", "_", name): x for name, x in values.items() if jnp.ndim(x) == 0}
