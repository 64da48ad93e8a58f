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
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.pbt import read_pbt
from msrl_jax.run.experiment.plain_data import RunFolderError, difference

ARGUMENTS = tuple(
    f.name for f in dataclasses.fields(Experiment) if f.name not in ("algorithm", "env", "settings", "recorded_steps")
)
"""The arguments of `train` that an experiment has, besides the algorithm, its fields and the environment."""


def make_experiment(algo: Any = None, env: str | Environment | None = None, **arguments: Any) -> Experiment:
    """Makes an experiment from arguments of `train`: `ARGUMENTS`, and fields of the config; does not make its environment and
    data. Returns an `Experiment` as it is."""
    if isinstance(algo, Experiment):
        for name, value in {**({} if env is None else {"env": env}), **arguments}.items():
            fact = f"{name}={shown(value)}: an Experiment already holds it"
            raise ValueError(f"{fact}; change the Experiment, or leave {name} out")
        return algo
    experiment_arguments: dict[str, Any] = {name: arguments.pop(name) for name in ARGUMENTS if name in arguments}
    experiment_arguments |= {} if env is None else {"env": env}
    base = as_config("ppo" if algo is None else algo)
    import_options(type(base), arguments)
    if experiment_arguments.get("pbt") is not None:
        experiment_arguments["pbt"] = pbt = read_pbt(experiment_arguments["pbt"])
        if (seeds := whole("seeds", experiment_arguments.get("seeds", 1))) > 1:
            raise ValueError(
                f"seeds={seeds}: the members of a population have the seeds from seed on; give pbt members={seeds}"
            )
        pbt.check(base, arguments)
        arguments = pbt.initial(check_seed(experiment_arguments.get("seed", 0), pbt.members)) | arguments
    arguments = {name: _to_python(value) for name, value in arguments.items()}
    settings = _read_settings(base, arguments)
    first_values = {name: values[0] for name, values in settings.items() if values}
    constants = {name: value for name, value in arguments.items() if name not in settings}
    return Experiment(algorithm=algorithms.make(base, constants | first_values), settings=settings, **experiment_arguments)


def _read_settings(base: Any, arguments: Mapping[str, Any]) -> dict[str, tuple[float, ...]]:
    """Returns the fields with several values, in which members differ."""
    kind, fields, several = type(base), all_fields(type(base)), {}
    for name, values in arguments.items():
        if not is_several(values) or name not in fields:
            continue
        if not isinstance(fields[name].default, str | numbers.Number | None | type(dataclasses.MISSING)):
            continue  # a single value of this field may be a sequence
        if name not in tunable_fields(kind):
            tunable = ", ".join(tunable_fields(base)) or "none of its fields"
            raise ValueError(
                f"{kind.__name__}.{name}={shown(values)}: {name} changes the program (its shapes, loops or branches), so the "
                f"members of a run cannot differ in it; they can differ in {tunable}. Use msrl.sweep, or a run for each value"
            )
        several[name] = tuple(_read_number(f"{kind.__name__}.{name}[{i}]", value) for i, value in enumerate(values))
    return several


def is_several(value: object) -> bool:
    """Whether something is a sequence of values; a named tuple is one value, as is a tuple of functions."""
    is_one = isinstance(value, tuple) and (hasattr(value, "_fields") or any(map(callable, value)))
    return isinstance(value, list | tuple | range) and not is_one


def _to_python(value: Any) -> Any:
    """Converts arrays to Python numbers and lists."""
    return np.asarray(value).tolist() if isinstance(value, np.ndarray | jax.Array) else value


def _read_number(where: str, value: Any) -> float:
    value = _to_python(value)
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
    if new_fields := about["config"].keys() - saved.description["config"].keys():
        raise RunFolderError(
            f"the run in {saved.path} has no {min(new_fields)}, which is a field of {experiment.name} now; resume with the "
            "code that it began with, or start a new run in another folder"
        )
    if differs := difference(saved.description, about):
        raise _difference_error(saved, *differs)
    if saved.iteration > experiment.iterations > 0:
        steps = saved.iteration * experiment.steps_per_iteration
        raise ValueError(
            f"total_steps={experiment.total_steps}: the run in {saved.path} has done {steps} steps already; use a larger "
            "number to extend it"
        )


def saved_experiment(
    saved: store.Saved,
    algo: Any,
    env: str | Environment | None,
    arguments: Mapping[str, Any],
    overrides: Mapping[str, Any],
    *,
    trust: bool,
) -> Experiment:
    """Returns the experiment of a saved run with other arguments: `arguments` are `ARGUMENTS`, `overrides` config fields."""
    description, where = saved.description, f"the run in {saved.path}"
    is_config = not (algo is None or isinstance(algo, str | type))
    config_values = (vars(algo) if is_config else {}) | dict(overrides)
    dataset = _find_dataset(saved, config_values.get("data"))
    nameless = {name for name, value in description["config"].items() if isinstance(value, Mapping)}
    objects = {
        name: config_values[name]
        for name in nameless | code_names.code_of(description["config"]).keys()
        if name in config_values
    }
    passed = {"env": env, "env_params": arguments.get("env_params"), "data": dataset} | objects
    original = Experiment.from_json(description, **passed, where=where, trust=trust)
    config: Any = original.algorithm
    kind: Any = type(algo) if is_config else type(config) if algo is None else algorithms.get(algo)
    if kind is not type(config):
        raise _difference_error(saved, "algo", description["algorithm"], kind.name)
    saved_values = {name: value_of(config, name) for name in overrides.keys() & all_fields(config)} | dict(original.settings)
    fields = {
        name: saved_values[name] if _is_rounded(value, saved_values.get(name)) else value for name, value in overrides.items()
    }
    fields |= {} if dataset is None else {"data": dataset}
    experiment_arguments = {name: getattr(original, name) for name in ARGUMENTS} | dict(arguments)
    return make_experiment(
        algo if is_config else config,
        original.env if env is None else env,
        **experiment_arguments,
        **dict(original.settings) | fields,
    )


def _is_rounded(value: Any, saved_value: Any) -> bool:
    """Returns whether arrays or NumPy numbers equal saved numbers in their own dtype, such as `np.float32(3e-4)` for 0.0003."""
    if not isinstance(value, np.ndarray | np.generic | jax.Array) or not isinstance(saved_value, float | tuple):
        return False
    return value.shape == np.shape(saved_value) and bool((np.asarray(saved_value).astype(value.dtype) == value).all())


def _difference_error(saved: store.Saved, name: str, saved_value: Any, new_value: Any) -> RunFolderError:
    saved_text, new_text, remedy = f"{name}={saved_value!r}", f"{name}={new_value!r}", f"leave {name} out"
    if isinstance(saved_value, Mapping):
        remedy = f"give the same {name}"
    if name == "env_object":
        saved_text, new_text, remedy = f"the environment {saved_value}", str(new_value), "give the same one"
    return RunFolderError(
        f"the run in {saved.path} has {saved_text}, and cannot resume with {new_text}; {remedy}, or start a new run in "
        "another folder"
    )


def _find_dataset(saved: store.Saved, new_source: Any) -> Any:
    """Returns the source from which a config loads the run's data set again; None if the run has none."""
    description = saved.description.get("data")
    if description is None:
        if new_source is not None:
            raise RunFolderError(f"the run in {saved.path} was trained without a data set; leave data out")
        return None
    source = description["path"] if new_source is None else new_source
    if source is None:
        raise RunFolderError(f"the data set of the run in {saved.path} was an object; pass it again: data=...")
    try:
        dataset = data.load(source)
    except (ValueError, OSError) as error:
        raise RunFolderError(
            f"the data set of the run in {saved.path} cannot be read: {error}. Give it again: data=..."
        ) from error
    if dataset.fingerprint() != description["sha256"]:
        raise RunFolderError(
            f"{source if isinstance(source, str) else 'the given data set'} is not the data set of the run in {saved.path}: "
            f"its content differs. Give the one with the SHA-256 {description['sha256'][:12]}...: data=..."
        )
    return source
