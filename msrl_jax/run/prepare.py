"""Makes an `Experiment` from the arguments of `train` and from the content of a run folder."""

import contextlib
import dataclasses
import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax import algorithms, data
from msrl_jax._files import as_path
from msrl_jax.configs.names import all_fields, tunable_fields, value_of
from msrl_jax.configs.replacing import import_options
from msrl_jax.envs import Environment
from msrl_jax.fragments.support.checks import check_seed, shown, whole
from msrl_jax.registry import code_names
from msrl_jax.registry.lookup import as_config
from msrl_jax.run import processes
from msrl_jax.run.disk import folder, store
from msrl_jax.run.experiment.pbt import read_pbt
from msrl_jax.run.experiment.plain_data import RunFolderError, difference
from msrl_jax.run.experiment.spec import Experiment

ARGUMENTS = tuple(
    f.name for f in dataclasses.fields(Experiment) if f.name not in ("algorithm", "env", "settings", "recorded_steps")
)
"""The arguments of `train` that an experiment has, besides the algorithm, its fields and the environment."""


def make_experiment(algo: Any = None, env: str | Environment | None = None, **asked: Any) -> Experiment:
    """Makes an experiment from arguments of `train`: `ARGUMENTS`, and fields of the config; does not make its environment and
    data. Returns an `Experiment` as it is."""
    if isinstance(algo, Experiment):
        for name, value in {**({} if env is None else {"env": env}), **asked}.items():
            fact = f"{name}={shown(value)}: an Experiment already holds it"
            raise ValueError(f"{fact}; change the Experiment, or leave {name} out")
        return algo
    own: dict[str, Any] = {name: asked.pop(name) for name in ARGUMENTS if name in asked}
    own |= {} if env is None else {"env": env}
    base = as_config("ppo" if algo is None else algo)
    import_options(type(base), asked)
    if own.get("pbt") is not None:
        own["pbt"] = pbt = read_pbt(own["pbt"])
        if (seeds := whole("seeds", own.get("seeds", 1))) > 1:
            raise ValueError(
                f"seeds={seeds}: the members of a population have the seeds from seed on; give pbt members={seeds}"
            )
        pbt.check(base, asked)
        asked = pbt.initial(check_seed(own.get("seed", 0), pbt.members)) | asked
    asked = {name: _plain(value) for name, value in asked.items()}
    settings = _settings(base, asked)
    first = {name: values[0] for name, values in settings.items() if values}
    constants = {name: x for name, x in asked.items() if name not in settings}
    return Experiment(algorithm=algorithms.make(base, constants | first), settings=settings, **own)


def _settings(base: Any, given: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Returns the fields with several values, in which members differ."""
    kind, fields, several = type(base), all_fields(type(base)), {}
    for name, values in given.items():
        if not is_several(values) or name not in fields:
            continue
        if not isinstance(fields[name].default, str | numbers.Number | None | type(dataclasses.MISSING)):
            continue  # a single value of this field may be a sequence
        if name not in tunable_fields(kind):
            others = ", ".join(tunable_fields(base)) or "none of its fields"
            raise ValueError(
                f"{kind.__name__}.{name}={shown(values)}: {name} changes the program (its shapes, loops or branches), so the "
                f"members of a run cannot differ in it; they can differ in {others}. Use msrl.sweep, or a run for each value"
            )
        several[name] = tuple(_number(f"{kind.__name__}.{name}[{i}]", x) for i, x in enumerate(values))
    return several


def is_several(value: Any) -> bool:
    """Whether something is a sequence of values; a named tuple is one value, as is a tuple of functions."""
    is_one = isinstance(value, tuple) and (hasattr(value, "_fields") or any(map(callable, value)))
    return isinstance(value, list | tuple | range) and not is_one


def _plain(value: Any) -> Any:
    """Converts arrays to Python numbers and lists."""
    return np.asarray(value).tolist() if isinstance(value, np.ndarray | jax.Array) else value


def _number(where: str, value: Any) -> float:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real | np.generic):
        raise ValueError(f"{where}={shown(value)}: use a number for each member")
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # the config checks what float32 holds
        raise ValueError(f"{where}={shown(value)}: use a number that float32 holds, at most 3.4e38") from None


@contextlib.contextmanager
def open_folder(out: Any, resume: Any) -> Iterator[tuple[Path | None, store.Saved | None]]:
    """Locks the folder of a run; yields its absolute path, and the saved run if it is to be resumed."""
    path, goes_on = None if out is None else as_path("out", out).absolute(), True
    if isinstance(resume, bool):
        if resume and path is None:
            raise ValueError("resume=True needs the folder of the run; give it as out=..., or as resume=")
        goes_on = resume and path is not None and store.holds_run(path)
    elif path not in (None, resumed := as_path("resume", resume).absolute()):
        fact = f"out={str(path)!r} and resume={str(resumed)!r} are two folders, but a run resumes in its own"
        raise ValueError(f"{fact}; give one")
    else:
        path = resumed
    if path is None:
        yield None, None
        return
    store.read_description(path) if goes_on else folder.check_free(path)
    with folder.locked(path) if processes.is_first() else contextlib.nullcontext():
        yield path, store.open_run(path) if goes_on else None


def check_resumes(experiment: Experiment, saved: store.Saved) -> None:
    """Raises ValueError unless an experiment resumes a run: its length and guard may differ, nothing else that it computes."""
    about = experiment.to_json()
    if new := about["config"].keys() - saved.description["config"].keys():
        raise RunFolderError(
            f"the run in {saved.path} has no {min(new)}, which is a field of {experiment.name} now; resume with the code that "
            "it began with, or start a new run in another folder"
        )
    if differs := difference(saved.description, about):
        raise _differs(saved, *differs)
    if saved.iteration > experiment.iterations > 0:
        done = saved.iteration * experiment.steps_per_iteration
        raise ValueError(
            f"total_steps={experiment.total_steps}: the run in {saved.path} has done {done} steps already; use a larger "
            "number to extend it"
        )


def saved_experiment(
    saved: store.Saved,
    algo: Any,
    env: str | Environment | None,
    asked: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    trust: bool,
) -> Experiment:
    """Returns the experiment of a saved run with other arguments: `asked` are `ARGUMENTS`, `overrides` fields of the config."""
    was, where = saved.description, f"the run in {saved.path}"
    is_config = not (algo is None or isinstance(algo, str | type))
    given = (vars(algo) if is_config else {}) | dict(overrides)
    dataset = _find_dataset(saved, given.get("data"))
    nameless = {name for name, held in was["config"].items() if isinstance(held, Mapping)}
    objects = {name: given[name] for name in nameless | code_names.code_of(was["config"]).keys() if name in given}
    again = {"env": env, "env_params": asked.get("env_params"), "data": dataset} | objects
    before = Experiment.from_json(was, **again, where=where, trust=trust)
    config: Any = before.algorithm
    kind: Any = type(algo) if is_config else type(config) if algo is None else algorithms.get(algo)
    if kind is not type(config):
        raise _differs(saved, "algo", was["algorithm"], kind.name)
    known = {name: value_of(config, name) for name in overrides.keys() & all_fields(config)} | dict(before.settings)
    fields = {name: known[name] if _is_rounded(x, known.get(name)) else x for name, x in overrides.items()}
    fields |= {} if dataset is None else {"data": dataset}
    own = {name: getattr(before, name) for name in ARGUMENTS} | dict(asked)
    return make_experiment(
        algo if is_config else config, before.env if env is None else env, **own, **dict(before.settings) | fields
    )


def _is_rounded(given: Any, saved: Any) -> bool:
    """Returns whether arrays or NumPy numbers equal saved numbers in their own dtype, such as `np.float32(3e-4)` for 0.0003."""
    if not isinstance(given, np.ndarray | np.generic | jax.Array) or not isinstance(saved, float | tuple):
        return False
    return given.shape == np.shape(saved) and bool((np.asarray(saved).astype(given.dtype) == given).all())


def _differs(saved: store.Saved, name: str, before: Any, now: Any) -> RunFolderError:
    was, given, remedy = f"{name}={before!r}", f"{name}={now!r}", f"leave {name} out"
    if isinstance(before, Mapping):
        remedy = f"give the same {name}"
    if name == "env_object":
        was, given, remedy = f"the environment {before}", str(now), "give the same one"
    return RunFolderError(
        f"the run in {saved.path} has {was}, and cannot resume with {given}; {remedy}, or start a new run in another folder"
    )


def _find_dataset(saved: store.Saved, given: Any) -> Any:
    """Returns the source from which a config loads the run's data set again; None if the run has none."""
    was = saved.description.get("data")
    if was is None:
        if given is not None:
            raise RunFolderError(f"the run in {saved.path} was trained without a data set; leave data out")
        return None
    source = was["path"] if given is None else given
    if source is None:
        raise RunFolderError(f"the data set of the run in {saved.path} was an object; pass it again: data=...")
    try:
        found = data.load(source)
    except (ValueError, OSError) as error:
        raise RunFolderError(
            f"the data set of the run in {saved.path} cannot be read: {error}. Give it again: data=..."
        ) from error
    if found.fingerprint() != was["sha256"]:
        raise RunFolderError(
            f"{source if isinstance(source, str) else 'the given data set'} is not the data set of the run in {saved.path}: "
            f"its content differs. Give the one with the SHA-256 {was['sha256'][:12]}...: data=..."
        )
    return source
