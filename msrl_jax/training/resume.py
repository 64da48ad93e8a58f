"""Going on with a run: what its folder says, and what may change."""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax import algorithms, data
from msrl_jax.data.experience import at_rest, awake, without_experience
from msrl_jax.envs.params import GivenParams, describe
from msrl_jax.fragments.program import Delayed, Program
from msrl_jax.training import checkpoint, folder, processes
from msrl_jax.training.checkpoint import Checkpoint, CheckpointError
from msrl_jax.training.evaluate import Evaluation
from msrl_jax.training.folder import RunFolderError
from msrl_jax.training.pbt import read
from msrl_jax.training.run import Run
from msrl_jax.training.setup import Setup

_TRIES = 10
"""How often a checkpoint is read that a running process deletes at the same time."""

_FIELDS = ("algorithm", "env", "env_spec", "policy", "seed", "seeds", "total_steps", "config")


class ResumeWarning(UserWarning):
    """A run goes on, but not from its newest checkpoint, or not exactly as before."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A run in a folder.

    Attributes:
      path: the folder.
      description: the content of `config.json`.
      checkpoint: the newest checkpoint that is whole; None if the run was killed before its first one.
    """

    path: Path
    description: dict[str, Any]
    checkpoint: Checkpoint | None

    @property
    def iteration(self) -> int:
        """Iterations of the checkpoint."""
        return 0 if self.checkpoint is None else self.checkpoint.iteration


def _note(text: str) -> None:
    warnings.warn(text, ResumeWarning, stacklevel=3)


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run that was started."""
    return (path / folder.CONFIG).exists() or bool(checkpoint.complete(path))


def read_description(path: Path) -> dict[str, Any]:
    """Reads the settings of a run.

    Args:
      path: the folder of the run.

    Returns:
      The content of `config.json`.

    Raises:
      RunFolderError: if the folder holds no run, or the file is damaged.
    """
    if not path.is_dir():
        raise RunFolderError(f"there is no folder {path}; name the folder of a run")
    return folder.read_json(path / folder.CONFIG, *_FIELDS)


def choose(path: Path, which: Any) -> Checkpoint:
    """Finds a checkpoint of a run.

    Args:
      path: the folder of the run.
      which: "newest", "best", or a number of iterations.

    Returns:
      The checkpoint, which is whole.

    Raises:
      RunFolderError: if there is none.
    """
    found = [c for c in checkpoint.complete(path) if c.is_readable]
    if which == "newest":
        chosen = checkpoint.newest(path, _note)
    elif which == "best":
        chosen = max((c for c in found if c.score is not None), key=lambda c: (c.score, c.iteration), default=None)
    else:
        chosen = next((c for c in found if c.iteration == which), None)
    if chosen is None:
        has = ", ".join(str(c.iteration) for c in reversed(found)) or "none"
        raise CheckpointError(
            f"{path} has no checkpoint {which!r}; those after iterations {has} are complete. An unfinished run "
            "writes its first one after a minute (checkpoint_every)"
        )
    if which != "newest":
        checkpoint.verify(chosen)
    return chosen


def open_run(path: Path) -> Saved:
    """Reads the settings of a run, and finds its newest whole checkpoint.

    Args:
      path: the folder of the run.

    Returns:
      The run.

    Raises:
      RunFolderError: if the folder holds no run, or a damaged one.
    """
    description, found = read_description(path), checkpoint.newest(path, _note)
    if found is None and (path / folder.SUMMARY).exists():
        raise CheckpointError(
            f"the run in {path} has ended, but its checkpoints are gone; restore {folder.CHECKPOINTS}, or start a new run in "
            "another folder"
        )
    if found is None and (path / folder.ROWS).exists():
        _note(f"the run in {path} has no checkpoint yet, and starts again from its seed")
    if found is not None:
        check_settings(path, description, found)
    return Saved(path, description, found)


def config_of(description: Mapping[str, Any], dataset: Any = None) -> Any:
    """Rebuilds the config of a run.

    Args:
      description: the content of `config.json`.
      dataset: the data set of the run; without it, the config has none.

    Returns:
      The config.

    Raises:
      RunFolderError: if this version has no such algorithm or fields.
    """
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in description["config"].items()}
    if fields.get("data") is not None or dataset is not None:
        fields["data"] = dataset
        if dataset is None:  # the rest of the config is checked without a data set
            fields.pop("data")
            fields.pop("data_fraction", None)
    try:
        return algorithms.get(description["algorithm"]).config(**fields)
    except (TypeError, ValueError) as error:
        raise RunFolderError(f"this version cannot read the config of the run: {error}") from error


def describe_env(env: Any) -> str | None:
    """An environment object as text with its parameters, if it has such a text (as dataclasses have)."""
    text = repr(env)
    return None if " at 0x" in text else text


def env_params_of(description: Mapping[str, Any], given: GivenParams | None, where: str) -> GivenParams | None:
    """What the parameters of a run's environment are drawn from.

    Args:
      description: the content of `config.json`.
      given: the same, if the user gave it.
      where: the run in messages.

    Returns:
      What the user gave, or else what the run began with.

    Raises:
      RunFolderError: if that was a function, and the user did not give it.
    """
    was = description.get("env_params")
    if given is None and isinstance(was, str):
        raise RunFolderError(f"{where} draws the parameters of its environment by a {was}; give it again: env_params=...")
    return was if given is None else given


def fingerprint(description: Mapping[str, Any]) -> str:
    """The SHA-256 of the settings that decide what a run computes, besides `total_steps` and the data set."""
    fields = {name: value for name, value in description["config"].items() if name not in ("total_steps", "data")}
    about = [description[name] for name in ("algorithm", "env", "env_spec", "seed", "seeds")]
    about += filter(None, [description.get(name) for name in ("env_params", "settings", "pbt")])
    text = json.dumps(folder.to_json([about, fields, description.get("rollbacks", [])]), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_settings(path: Path, description: Mapping[str, Any], saved: Checkpoint) -> None:
    """Raises RunFolderError if `config.json` is not what the run was saved with."""
    written, rollbacks = saved.progress.get("settings"), saved.progress.get("rollbacks")
    if written not in (None, fingerprint(description)) and rollbacks == len(description.get("rollbacks", ())):
        raise RunFolderError(f"{path / folder.CONFIG} is not what the run was saved with; restore the file, or start a new run")


def same_settings(saved: Saved, given: Mapping[str, Any], config: Any, overrides: Mapping[str, Any]) -> None:
    """Compares what the user gave with the settings of a run.

    Args:
      saved: the run.
      given: `algo`, `env`, `seed`, `seeds`, `env_params` and `pbt`; None is not given.
      config: a config, or None.
      overrides: config fields.

    Raises:
      RunFolderError: if something differs that decides what the run computes.
    """
    was = saved.description
    pairs = [
        ("algo", given["algo"], was["algorithm"]),
        ("seed", given["seed"], was["seed"]),
        ("seeds", given["seeds"], was["seeds"]),
    ]
    if given["env_params"] is not None:
        pairs.append(("env_params", describe(given["env_params"]), was.get("env_params")))
    if given["pbt"] is not None:
        pairs.append(("pbt", read(given["pbt"]).to_json(), was.get("pbt")))
    env = given["env"]
    if env is not None:
        named = env if isinstance(env, str) else getattr(env, "name", type(env).__name__)
        pairs.append(("env", named, was["env"]))
    fields = {} if config is None else {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    settings = was.get("settings") or {}
    for name, value in (fields | dict(overrides)).items():
        if name in ("total_steps", "data"):
            continue
        if name not in was["config"]:
            raise RunFolderError(
                f"the run in {saved.path} has no config field {name!r}; its fields are {', '.join(was['config'])}"
            )
        if name in settings and name not in overrides:  # a config has room for the first setting only
            continue
        kept = algorithms.get(was["algorithm"]).config.canonical(name, value)
        pairs.append((name, folder.to_json(kept), settings.get(name, was["config"][name])))
    arguments = ("algo", "env", "seed", "seeds")
    for name, value, before in pairs:
        if value != before and not (value is None and name in arguments):
            raise RunFolderError(
                f"the run in {saved.path} has {name}={before!r}, and cannot go on with {name}={value!r}; leave {name} out, or "
                "start a new run in another folder"
            )
    if env is not None and not isinstance(env, str) and (now := describe_env(env)) != was.get("env_object", now):
        raise RunFolderError(
            f"the run in {saved.path} has the environment {was['env_object']}, and cannot go on with {now}; give the "
            "same one, or start a new run in another folder"
        )
    if was["env_spec"] is None and env is None:
        raise RunFolderError(f"the run in {saved.path} has an environment object ({was['env']}); give it again: env=...")


def find_dataset(saved: Saved, given: Any) -> Any:
    """Finds the data set of a run again.

    Args:
      saved: the run.
      given: a path or a data set, if the user gave one.

    Returns:
      What the config takes; None if the run has no data set.

    Raises:
      RunFolderError: if it is not there any more, or is another one.
    """
    was = saved.description.get("data")
    if was is None:
        if given is not None:
            raise RunFolderError(f"the run in {saved.path} has no data set, and cannot take one; leave data out")
        return None
    source = was["path"] if given is None else given
    if source is None:
        raise RunFolderError(f"the data set of the run in {saved.path} was an object; give it again: data=...")
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


def load_agent(path: Path, which: Any, setup: Setup) -> tuple[Checkpoint, Any, tuple[jax.Array, ...]]:
    """Reads the state of a run onto one device, without its recorded steps and its data.

    Args:
      path: the folder of the run, to which another process may be writing.
      which: the checkpoint, as in `choose`.
      setup: the run.

    Returns:
      The checkpoint, the state, and the registers of stale parameters.
    """
    for _ in range(_TRIES):
        before = checkpoint.complete(path)
        try:
            saved = choose(path, which)
            setup = setup.record(1) if saved.progress["recorded"] is not None and setup.recorded is None else setup
            like = setup.behavior.agent.without_data(at_rest(jax.eval_shape(setup.initial_state)))
            state, registers = checkpoint.load(saved, like, [leaf for _, leaf in _registers(saved, like)])
            return saved, without_experience(state), registers
        except CheckpointError:
            if checkpoint.complete(path) == before:
                raise
    raise CheckpointError(f"the checkpoints of the run in {path} are replaced faster than they can be read; try again later")


def _registers(saved: Checkpoint, state: Any) -> list[tuple[str, Any]]:
    """The leaves of a state that the registers of a checkpoint hold, with their paths, in the order of the registers."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(state)}
    depths = saved.progress["registers"]
    if unknown := [name for name in depths if name not in leaves]:
        raise CheckpointError(
            f"the checkpoint {saved.path} holds registers of state{unknown[0]}, which this version does not have"
        )
    return [(name, leaves[name]) for name, depth in depths.items() for _ in range(depth)]


def restore_state(saved: Checkpoint, setup: Setup, program: Program) -> Any:
    """Reads the state of a run onto the devices of a program.

    Args:
      saved: the checkpoint.
      setup: the run.
      program: the program, of any policy on any devices.

    Returns:
      The state, as `Program.run` takes it.
    """
    agent = setup.behavior.agent
    full = jax.eval_shape(setup.initial_state)
    places, register_places = program.shardings
    like = agent.without_data(at_rest(full))
    flat = jax.tree.leaves(agent.without_data(at_rest(places)))
    at = dict(zip((jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(like)), flat, strict=True))
    held = _registers(saved, like)
    depths = saved.progress["registers"]
    same = depths == program.registers
    if not same:
        _note(
            f"the parameters of the actors were {_depth(depths)} iterations old, and are now {_depth(program.registers)}: the "
            "run goes on from its newest parameters"
        )
    to = [*flat, *(register_places if same else [at[name] for name, _ in held])]
    if processes.count() > 1:  # each process reads the checkpoint, and the program takes the parts of its devices
        to = None
    state, registers = checkpoint.load(saved, like, [leaf for _, leaf in held], to)
    state = agent.with_data(awake(state, agent.without_data(full)))
    return Delayed(state, registers) if same and registers else state


def _depth(registers: Mapping[str, int]) -> int:
    return max(registers.values(), default=0)


def read_evaluation(episodes: Mapping[str, Any] | None) -> Evaluation | None:
    """Rebuilds an evaluation from plain data."""
    if episodes is None:
        return None
    dtypes = {"returns": np.float32, "lengths": np.int32, "finished": np.bool_}
    if episodes.get("agent_returns") is not None:
        dtypes["agent_returns"] = np.float32
    teams = {team: np.asarray(returns, np.float32) for team, returns in episodes.get("team_returns", {}).items()}
    return Evaluation(**{name: np.asarray(episodes[name], dtype) for name, dtype in dtypes.items()}, team_returns=teams)


def continue_from(saved: Saved, run: Run) -> None:
    """Takes over the host's part of a run's state, and removes what is newer than its checkpoint.

    Args:
      saved: the run.
      run: the run in progress, whose state is that of the checkpoint.
    """
    progress = {} if saved.checkpoint is None else saved.checkpoint.progress
    count = progress.get("rows", 0)
    with processes.together("reading the history"):
        run.rows = folder.read_rows(saved.path, count)
    with processes.together("removing what is newer than the checkpoint"):
        if processes.is_first():
            for name in (folder.SUMMARY, folder.EVALUATION):
                (saved.path / name).unlink(missing_ok=True)
            folder.rewind_rows(saved.path, count)
    if saved.checkpoint is None:
        return
    run.iteration = saved.checkpoint.iteration
    run.evaluation = read_evaluation(progress["evaluation"])
    run.started -= progress["wall_seconds"]
    run.compiled_before = progress["compile_seconds"]
    for name in run.seconds:
        run.seconds[name] += progress[name]


def warn_of_schedules(saved: Saved, config: Any, total_steps: int, done: int) -> None:
    """Says what happens to schedules over `total_steps` if these change."""
    was = saved.description["total_steps"]
    if was == total_steps:
        return
    falls = getattr(config, "anneal_learning_rate", False)  # of a field, or of any of several teams
    rises = getattr(config, "beta", None) is not None
    if not (falls or rises):
        return
    what = " and ".join(["the learning rate"] * bool(falls) + ["beta of the replay"] * bool(rises))
    rate = getattr(config, "learning_rate", None)
    now = (
        f": it goes on from {rate * (1 - done / total_steps):.3g}, after {max(0.0, rate * (1 - done / was)):.3g}"
        if falls and rate is not None
        else ""
    )
    _note(
        f"total_steps changes from {was:,} to {total_steps:,}, over which {what} changes: the schedule now spans the new "
        f"number{now}. A run of {total_steps:,} steps from the start would differ"
    )
