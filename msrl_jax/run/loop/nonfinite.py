"""What must be finite in a run, the search for the first step that is not, and the file that reproduces that step.

Watched are the parameters, the observations, and every other part of the state that the algorithm or a wrapper of the
environment computes and that is finite at the start. So an infinity that means something, such as the nan of an open TD error,
is not reported. Left out are data sets, replay buffers and the environment's own state: what is wrong there and matters comes
out as an observation, a reward, a loss or a parameter.
"""

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._checks import parse_json, replacing
from msrl_jax._compat import aval
from msrl_jax._tracebacks import entry
from msrl_jax.algorithms.agent import Agent, innermost, with_innermost
from msrl_jax.data.experience import RecordedState
from msrl_jax.envs import Environment, has_agents
from msrl_jax.envs.masks import FAULTS
from msrl_jax.envs.params import GivenParams
from msrl_jax.envs.vector_wrappers import EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState
from msrl_jax.fragments.graph.build import build
from msrl_jax.fragments.graph.trace import trace
from msrl_jax.fragments.passes.staleness import delay
from msrl_jax.fragments.plan.origin import Origin, evaluate_again, find_fragment, find_origin
from msrl_jax.fragments.program import Delayed, Program
from msrl_jax.fragments.runtime.transfer import read
from msrl_jax.replay import FifoState, ReplayState
from msrl_jax.run.evaluation.history import first_non_finite
from msrl_jax.run.experiment.plain_data import to_json
from msrl_jax.run.experiment.spec import Experiment
from msrl_jax.run.loop.loop import Run

_ALWAYS = (".params", ".obs")  # parts of a state that are watched even if they are not finite at the start
_WRAPPERS = EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState


def _all(x: Any, on: int) -> Any:
    return jax.tree.map(lambda _: on, x)


def _of_env(env_state: Any) -> Any:
    wrapped = isinstance(env_state, _WRAPPERS)
    chosen = _all(env_state, wrapped)
    goes_in = wrapped or isinstance(env_state, RecordedState)
    return chosen._replace(env_state=_of_env(env_state.env_state)) if goes_in else chosen


def _watched(agent: Agent, state: Any) -> dict[int, bool]:
    """The positions of the watched leaves of a run's state, which are floats, and whether they are in a replay buffer."""
    is_buffer = lambda x: isinstance(x, ReplayState | FifoState)  # noqa: E731
    chosen = jax.tree.map(lambda x: _all(x, 2 if is_buffer(x) else 1), state, is_leaf=is_buffer)
    own = innermost(state)
    others = {name: _all(getattr(own, name), 0) for name in agent.data}
    if hasattr(own, "env_state"):
        others["env_state"] = _of_env(own.env_state)
    chosen = with_innermost(chosen, innermost(chosen)._replace(**others))
    pairs = zip(jax.tree.leaves(chosen), jax.tree.leaves(state), strict=True)
    return {i: on == 2 for i, (on, x) in enumerate(pairs) if on and jnp.issubdtype(x.dtype, jnp.inexact)}


@functools.lru_cache(maxsize=16)
def _flags(to: NamedSharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """A program that tells which arrays of a mesh are not finite; of several processes, all can read what it gives."""
    return jax.jit(lambda leaves: jnp.stack([~jnp.isfinite(x).all() for x in leaves]), out_shardings=to)


def non_finite(leaves: Sequence[jax.Array], numbers: Sequence[int]) -> list[int]:
    """The positions, of those in `numbers`, of leaves on any meshes that are not finite; nothing is moved to the host."""
    found: list[int] = []
    meshes: dict[Any, list[int]] = {}
    for i in numbers:
        devices = list(leaves[i].sharding.device_set)
        # NumPy reads it without a copy. Several processes must look in the same way, because they read the results together.
        at_hand = jax.process_count() == 1 and len(devices) == 1 and devices[0].platform == "cpu"
        if not at_hand or leaves[i].dtype not in (np.float32, np.float64):
            meshes.setdefault(frozenset(devices), []).append(i)
        elif (x := np.asarray(leaves[i])).size:
            with np.errstate(invalid="ignore"):  # the extremes need no array of as many bools
                found += [] if np.isfinite(x.min()) and np.isfinite(x.max()) else [i]

    def check(group: list[int]) -> jax.Array:
        at = leaves[group[0]].sharding
        several = jax.process_count() > 1 and isinstance(at, NamedSharding)
        return _flags(NamedSharding(at.mesh, PartitionSpec()) if several else None)([leaves[i] for i in group])  # type: ignore

    flags = read([check(group) for group in meshes.values()])
    pairs = zip(meshes.values(), flags, strict=True)
    return sorted([*found, *(i for group, bad in pairs for i, is_bad in zip(group, bad, strict=True) if is_bad)])


class Watch:
    """The watched leaves of the states of a run, as those of a first state, which counts as good."""

    def __init__(self, agent: Agent, state: Any):
        leaves = jax.tree.leaves_with_path(state)
        # Pytree paths of all leaves, in the algorithm's own state: such as `.obs`.
        self.paths = [re.sub(r"^(\.inner\b)+", "", jax.tree_util.keystr(path)) for path, _ in leaves]
        watched = _watched(agent, state)
        odd = {i for i in non_finite([x for _, x in leaves], [*watched]) if not self.paths[i].startswith(_ALWAYS)}
        self._everything = [i for i in watched if i not in odd]  # with the floats in replay buffers
        self._chosen = [i for i in self._everything if not watched[i]]

    def bad(self, state: Any) -> list[str]:
        """The pytree paths of the watched leaves of a state that are not finite."""
        return [self.paths[i] for i in non_finite(jax.tree.leaves(state), self._chosen)]

    def is_whole(self, state: Any) -> bool:
        """Whether the watched leaves and replay buffers are finite."""
        return not non_finite(jax.tree.leaves(state), self._everything)

    def search(self, run: Run, state: Any, iterations: int) -> tuple[int, Origin | int | None] | None:
        """Finds the first iteration of a run that is not finite, and where its nan or infinity comes from.

        A run is deterministic, so it goes again from a finite state, `iterations` before one that is not: they are halved until
        one is left, which is then evaluated outside of the compiled programs, equation by equation. Gives the number of finite
        iterations before that one; and the origin, or the position of a leaf of the state, or of a register behind them, that
        is not finite itself, or None if the iteration is finite there. None in place of both if all are finite this time.
        """
        leaves = jax.tree.leaves(run.program.unwrap(state))
        while (good := self._last_good(run, state, iterations)) is not None:
            origin = self._origin(run.program, good[0])
            if not isinstance(origin, int) or origin >= len(leaves) or non_finite(leaves, [origin]):
                return good[1], origin
            # A part of the state that is not watched, such as the environment's own, is to blame: look for its first nan.
            self._everything.append(origin)
        return None

    def _last_good(self, run: Run, state: Any, iterations: int) -> tuple[Any, int] | None:
        """A finite state after which one iteration gives something that is not finite, and the iterations up to it."""
        low, high, certain = 0, iterations, False
        while high - low > 1 or not certain:
            middle = (low + high) // 2 if certain else high
            after, metrics = run.again(state, middle - low)
            if first_non_finite(metrics) or not self.is_whole(run.program.unwrap(after)):
                high, certain = middle, True
            elif middle == iterations:
                return None
            else:
                state, low = after, middle
        return state, low

    def _origin(self, program: Program, state: Any) -> Origin | int | None:
        """The origin in the iteration after a state: of the equations as the policy connects them, delays included."""
        count = len(program.traced.jaxpr.in_avals)
        labels = [program.graph.labels[v] for v in program.graph.region.carry[:count]]
        graph = build(program.traced.jaxpr, program.layout, labels, program.graph.axes[:count])
        if program.layout.staleness:
            delay(graph, program.layout.staleness, program.layout)
        region, device = graph.region, program.devices[0]
        registers = state.registers if isinstance(state, Delayed) else ()
        values = jax.device_put([*jax.tree.leaves(program.unwrap(state)), *registers], device)
        # One after another: JAX sorts the keys of a dict, and variables have no order.
        env = dict(zip(region.carry, values, strict=True))
        constants = {v: jax.device_put(x, device) for v, x in graph.constants.items()}
        wanted = [*(region.next_carry[i] for i in self._everything), *region.results]
        return find_origin([node.eqn for node in region.nodes], env, wanted, constants)


# --- the first step with a nan or infinity: in words, and as an npz archive without pickled objects, with the operands of the
# fragment that computed it and a description of the run, from which the fragment is built again

FILE = "non_finite.npz"  # in the folder of a run
_ABOUT, _OPERAND = "about", "operand_"
_REWARDS, _OBSERVATIONS = {"reward", "episode_return"}, {"obs", "final_obs"}


@dataclasses.dataclass(frozen=True)
class Failure:
    """The first step of a run with a nan or infinity.

    Attributes:
      iteration: the iteration, counted from 1.
      member: number of the member; None for a run of one seed.
      environment: number of the environment; None if an environment is not to blame.
      origin: the computation.
      agent: name of the agent, of an environment with several; None if it is not known.
    """

    iteration: int
    member: int | None
    environment: int | None
    origin: Origin
    agent: str | None = None

    @classmethod
    def of(cls, origin: Origin, iteration: int, has_members: bool, env: Any = None) -> "Failure":
        """The failure of a computation in an iteration of a run with or without members, with this vector environment."""
        member, *rest = origin.index if has_members and origin.index else (None, *origin.index)
        if not rest or origin.role != "env":
            return cls(iteration, member, None, origin)
        agent = _agent(env, origin.path, rest[1]) if has_agents(env) and len(rest) > 1 else None
        return cls(iteration, member, rest[0], origin, agent)

    def __str__(self) -> str:
        o = self.origin
        what = f"{o.value} in result {o.path}{list(o.index) or ''}"
        which = "the environment" if self.environment is None else f"environment {self.environment}"
        which += "" if self.agent is None else f", for agent {self.agent!r},"
        if o.fragment is None:
            who, what = "code outside of the fragments made", o.value
        elif o.role == "env":
            known = [fault for name, fault in FAULTS.items() if (o.source or "").endswith(f"({name})")]
            fields = _fields(o.path)
            part = "a reward of " if fields & _REWARDS else "an observation of " if fields & _OBSERVATIONS else ""
            did = known[0] if known else f"returned {part}{o.value}"
            who = f"{which} {did}: fragment {o.fragment!r} (role 'env') has"
        else:
            inside = f" in {o.within[-1]!r}" if o.within else ""
            who = f"fragment {o.fragment!r} (role {o.role!r}){inside} made"
        when = "".join(f", step {step + 1} of {length}" for step, length in o.steps)
        member = "" if self.member is None else f" of member {self.member}"
        also = f" (also in {', '.join(o.others[:3])}{' and others' if len(o.others) > 3 else ''})" if o.others else ""
        source = f" at {o.source}" if o.source else ""
        constant = "" if o.constant is None else f" and the constant {o.constant}"
        alone = "" if o.eager else ". Its operations are finite if they run one by one, without being compiled together"
        return (
            f"{who} {what}{also} in iteration {self.iteration}{member}{when}, from finite operands{constant}. "
            f"The operation is {o.primitive}{source}{alone}"
        )


def _fields(path: str) -> set[str]:
    """The names in a pytree path."""
    return {a or b for a, b in re.findall(r"\.(\w+)|\['(\w+)'\]", path)}


def _agent(env: Any, path: str, number: int) -> str | None:
    """The name of an agent by its number in an array `[E, A, ...]` of its team; None if a path leads to no such array."""
    if not _fields(path) & (_REWARDS | _OBSERVATIONS):
        return None
    members = next((env.teams[team] for team in env.teams if f"['{team}']" in path), range(len(env.agents)))
    return env.agents[members[number]]


def save(path: Path, failure: Failure, description: Mapping[str, Any], record: int | None) -> Path:
    """Writes a failure for `replay_step`."""
    origin = failure.origin
    kinds, arrays = zip(*map(_to_numpy, origin.operands), strict=True) if origin.operands else ((), ())
    fields = {name: x for name, x in vars(origin).items() if name != "operands"}
    about = {"run": description, "record": record, "iteration": failure.iteration, "origin": fields, "operands": kinds}
    entries = {f"{_OPERAND}{i}": x for i, x in enumerate(arrays)} | {_ABOUT: np.array(json.dumps(to_json(about)))}
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez(file, allow_pickle=False, **entries)
    return path


def _to_numpy(x: Any) -> tuple[dict[str, str], np.ndarray]:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return {"key": str(jax.random.key_impl(x))}, np.asarray(jax.random.key_data(x))
    array = np.asarray(x)
    # NumPy's files do not know the dtypes of machine learning, such as bfloat16.
    return {"dtype": str(array.dtype)}, array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _to_jax(kind: Mapping[str, str], x: np.ndarray) -> jax.Array:
    if "key" in kind:
        return jax.random.wrap_key_data(jnp.asarray(x), impl=kind["key"])
    return jnp.asarray(x.view(jnp.dtype(kind["dtype"])))


@entry
def replay_step(
    path: str | os.PathLike, *, env: Environment | None = None, env_params: GivenParams | None = None, data: Any = None,
    trust: bool = False, **objects: Any,
) -> Failure | None:
    """Evaluates the first step of a run with a nan or infinity again, outside of `jax.jit`, operation by operation.

    Args:
      path: the file `non_finite.npz` in the folder of the run, or `DivergedError.replay`.
      env: the environment, if the run was given an environment object.
      env_params: what its parameters are drawn from, if that is a function.
      data: the data, if the run learned from data.
      trust: whether the code that the file names may run, as in `Result.load`.
      **objects: fields of the config that were objects without a name: `network=`, `optimizer=`.

    Returns:
      The failure as it happens now; None if all results are finite here.

    Raises:
      ValueError: if the file cannot be read, or if it does not fit the environment, the data or this version.
    """
    path = Path(path)
    about, operands = _read(path)
    run, origin = about["run"], about["origin"]
    source = None if run["data"] is None else run["data"]["path"] if data is None else data
    if run["data"] is not None and source is None:
        raise ValueError(f"{path} is of a run that learned from data; give them again: replay_step(path, data=...)")
    again = {"env": env, "env_params": env_params, "data": source} | objects
    experiment = Experiment.from_json(run, **again, where=f"the run of {path}", trust=trust)
    if about["record"] is not None:
        experiment = experiment.record(about["record"])
    closed = trace(experiment.agent.iteration, jax.eval_shape(experiment.initial_state)).jaxpr
    eqn, eqns = find_fragment(closed, origin["fragment"], origin["number"])
    if eqn is None or [(aval(v).shape, aval(v).dtype) for v in eqn.invars] != [(x.shape, x.dtype) for x in operands]:
        raise ValueError(
            f"{path} does not fit: fragment {origin['fragment']!r} takes other operands here; was the file written by another "
            "version, or for another environment?"
        )
    found = evaluate_again(eqn, operands, eqns)
    if found is None:
        return None
    around = [tuple(step) for step in origin["steps"]]
    steps = (*around[: len(around) - len(found.steps)], *found.steps)
    found = dataclasses.replace(found, within=tuple(origin["within"]), steps=steps)
    return Failure.of(found, about["iteration"], experiment.has_members, experiment.behavior.agent.env)


def _read(path: Path) -> tuple[dict[str, Any], list[jax.Array]]:
    try:
        with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
            about = parse_json(str(file[_ABOUT]))
            arrays = [file[f"{_OPERAND}{i}"] for i in range(len(about["operands"]))]
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}; name the {FILE} in the folder of a run") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    except (ValueError, KeyError, EOFError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} is no file of a step that was not finite; name the {FILE} in the folder of a run") from error
    except Exception as error:  # zipfile and zlib raise types of their own
        raise ValueError(f"{path} is damaged: {error}") from error
    return about, [_to_jax(kind, x) for kind, x in zip(about["operands"], arrays, strict=True)]
