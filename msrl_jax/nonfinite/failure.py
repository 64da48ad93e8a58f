"""The first step of a run with a non-finite value: as text, and as an npz archive without pickled objects.

The archive contains the operands of the fragment that computed it, and a description of the run, from which the fragment is
rebuilt.
"""

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import aval
from msrl_jax._files import parse_json, replacing
from msrl_jax.envs import Environment, has_agents
from msrl_jax.envs.masks import FAULTS
from msrl_jax.envs.params import GivenParams
from msrl_jax.fragments.graph.trace import trace
from msrl_jax.fragments.support.random_keys import is_key
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.nonfinite.origin import Origin, evaluate_again, find_fragment
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.experiment.plain_data import to_json

FILE = "non_finite.npz"  # in the folder of a run
_ABOUT, _OPERAND = "about", "operand_"
_REWARDS, _OBSERVATIONS = {"reward", "episode_return"}, {"obs", "final_obs"}


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first step of a run with a non-finite value.

    Attributes:
      iteration: the iteration, counted from 1.
      member: number of the population member; None for a run with one seed.
      environment: number of the environment; None if the cause is not in an environment.
      origin: the computation.
      agent: name of the agent, in an environment with several; None if unknown.
    """

    iteration: int
    member: int | None
    environment: int | None
    origin: Origin
    agent: str | None = None

    @classmethod
    def from_origin(cls, origin: Origin, iteration: int, has_members: bool, env: Any = None) -> "Failure":
        """Returns the failure of a computation in an iteration of a run with or without members, with this vector
        environment.
        """
        member, *indices = origin.index if has_members and origin.index else (None, *origin.index)
        if not indices or origin.role != "env":
            return cls(iteration, member, None, origin)
        agent = _agent_name(env, origin.path, indices[1]) if has_agents(env) and len(indices) > 1 else None
        return cls(iteration, member, indices[0], origin, agent)

    def __str__(self) -> str:
        o = self.origin
        result = f"{o.value} in result {o.path}{list(o.index) or ''}"
        environment = "the environment" if self.environment is None else f"environment {self.environment}"
        environment += "" if self.agent is None else f", for agent {self.agent!r},"
        if o.fragment is None:
            cause, result = "code outside the fragments made", o.value
        elif o.role == "env":
            faults = [fault for name, fault in FAULTS.items() if (o.source or "").endswith(f"({name})")]
            fields = _field_names(o.path)
            part = "a reward of " if fields & _REWARDS else "an observation of " if fields & _OBSERVATIONS else ""
            effect = faults[0] if faults else f"returned {part}{o.value}"
            cause = f"{environment} {effect}: fragment {o.fragment!r} (role 'env') has"
        else:
            inner_name = f" in {o.within[-1]!r}" if o.within else ""
            cause = f"fragment {o.fragment!r} (role {o.role!r}){inner_name} made"
        steps = "".join(f", step {step + 1} of {length}" for step, length in o.steps)
        member = "" if self.member is None else f" of member {self.member}"
        others_text = f" (also in {', '.join(o.others[:3])}{' and others' if len(o.others) > 3 else ''})" if o.others else ""
        source = f" at {o.source}" if o.source else ""
        constant = "" if o.constant is None else f" and the constant {o.constant}"
        eager_text = "" if o.eager else ". Its operations are finite when they run one by one, without being compiled together"
        return (
            f"{cause} {result}{others_text} in iteration {self.iteration}{member}{steps}, from finite operands{constant}. "
            f"The operation is {o.primitive}{source}{eager_text}"
        )


def _field_names(path: str) -> set[str]:
    """Returns the names in a pytree path."""
    return {a or b for a, b in re.findall(r"\.(\w+)|\['(\w+)'\]", path)}


def _agent_name(env: Any, path: str, number: int) -> str | None:
    """Returns the name of an agent, given its index in an array `[E, A, ...]` of its team; None if the path is not such an
    array.
    """
    if not _field_names(path) & (_REWARDS | _OBSERVATIONS):
        return None
    members = next((env.teams[team] for team in env.teams if f"['{team}']" in path), range(len(env.agents)))
    return env.agents[members[number]]


def save_failure(path: Path, failure: Failure, description: Mapping[str, Any], record: int | None) -> Path:
    """Writes a failure for `replay_step`."""
    origin = failure.origin
    kinds, arrays = zip(*map(_to_numpy, origin.operands), strict=True) if origin.operands else ((), ())
    fields = {name: value for name, value in vars(origin).items() if name != "operands"}
    about = {"run": description, "record": record, "iteration": failure.iteration, "origin": fields, "operands": kinds}
    entries = {f"{_OPERAND}{i}": value for i, value in enumerate(arrays)} | {_ABOUT: np.array(json.dumps(to_json(about)))}
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **entries)
    return path


def _to_numpy(value: Any) -> tuple[dict[str, str], np.ndarray]:
    if is_key(value):
        return {"key": str(jax.random.key_impl(value))}, np.asarray(jax.random.key_data(value))
    array = np.asarray(value)
    # NumPy files do not support machine learning dtypes, such as bfloat16.
    return {"dtype": str(array.dtype)}, array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _to_jax(kind: Mapping[str, str], array: np.ndarray) -> jax.Array:
    if "key" in kind:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=kind["key"])
    return jnp.asarray(array.view(jnp.dtype(kind["dtype"])))


@entry
def replay_step(
    path: str | os.PathLike,
    *,
    env: Environment | None = None,
    env_params: GivenParams | None = None,
    data: Any = None,
    trust: bool = False,
    **objects: Any,
) -> Failure | None:
    """Repeats the first step of a run with a non-finite value, outside `jax.jit`, operation by operation.

    Args:
      path: the file `non_finite.npz` in the folder of the run, or `DivergedError.replay`.
      env: the environment, if it was passed to the run as an object.
      env_params: the source of its parameters, if it is a function.
      data: the data set, if the run learned from data.
      trust: whether to run code that the file names, as in `Result.load`.
      **objects: config fields that were objects without a name: `network=`, `optimizer=`.

    Returns:
      The failure found now; None if all results are finite here.

    Raises:
      ValueError: if the file cannot be read, or if it does not fit the environment, the data or this version.
    """
    path = Path(path)
    about, operands = _read(path)
    description, origin = about["run"], about["origin"]
    source = None if description["data"] is None else description["data"]["path"] if data is None else data
    if description["data"] is not None and source is None:
        raise ValueError(f"{path} is of a run that learned from data; pass the data again: replay_step(path, data=...)")
    passed = {"env": env, "env_params": env_params, "data": source} | objects
    experiment = Experiment.from_json(description, **passed, where=f"the run of {path}", trust=trust)
    if about["record"] is not None:
        experiment = experiment.record(about["record"])
    closed = trace(experiment.agent.iteration, jax.eval_shape(experiment.initial_state)).jaxpr
    eqn, eqns = find_fragment(closed, origin["fragment"], origin["number"])
    if eqn is None or [(aval(v).shape, aval(v).dtype) for v in eqn.invars] != [(x.shape, x.dtype) for x in operands]:
        raise ValueError(
            f"{path} does not match: fragment {origin['fragment']!r} has other operands here; was the file written by another "
            "version, or for another environment?"
        )
    new_origin = evaluate_again(eqn, operands, eqns)
    if new_origin is None:
        return None
    outer_steps = [tuple(step) for step in origin["steps"]]
    steps = (*outer_steps[: len(outer_steps) - len(new_origin.steps)], *new_origin.steps)
    new_origin = dataclasses.replace(new_origin, within=tuple(origin["within"]), steps=steps)
    return Failure.from_origin(new_origin, about["iteration"], experiment.has_members, experiment.behavior.agent.env)


def _read(path: Path) -> tuple[dict[str, Any], list[jax.Array]]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = parse_json(str(file[_ABOUT]))
            arrays = [file[f"{_OPERAND}{i}"] for i in range(len(about["operands"]))]
    except FileNotFoundError:
        raise ValueError(f"the file {path} does not exist; use the {FILE} in the folder of a run") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} does not describe a non-finite step; use the {FILE} in the folder of a run") from error
    except Exception as error:  # zipfile and zlib raise their own types
        raise ValueError(f"{path} is damaged: {error}") from error
    return about, [_to_jax(kind, array) for kind, array in zip(about["operands"], arrays, strict=True)]
