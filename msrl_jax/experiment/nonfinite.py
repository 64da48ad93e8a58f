"""What must be finite in the state of a run, and the search for the first iteration in which it is not.

Watched are the parameters, the observations, and every other part of the state that the algorithm or a wrapper of the
environment computes and that is finite at the start. So an infinity that means something, such as the nan of an open TD error,
is not reported. Left out are data sets, replay buffers and the environment's own state: what is wrong there and matters comes
out as an observation, a reward, a loss or a parameter.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax.algorithms.agent import Agent, innermost, with_innermost
from msrl_jax.data.experience import RecordedState
from msrl_jax.envs.vector_wrappers import EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState
from msrl_jax.experiment.history import first_non_finite
from msrl_jax.experiment.run import Run
from msrl_jax.fragments.graph.build import build
from msrl_jax.fragments.passes.staleness import delay
from msrl_jax.fragments.plan.origin import Origin, find_origin
from msrl_jax.fragments.program import Delayed, Program
from msrl_jax.fragments.runtime.transfer import read
from msrl_jax.replay import FifoState, ReplayState

_ALWAYS = (".params", ".obs")  # parts of a state that are watched even if they are not finite at the start
_WRAPPERS = EpisodeStatisticsState, NormalizeObservationState, NormalizeRewardState


def _is_buffer(x: Any) -> bool:
    return isinstance(x, ReplayState | FifoState)


def _all(x: Any, on: bool) -> Any:
    return jax.tree.map(lambda _: on, x)


def _of_env(env_state: Any) -> Any:
    wrapped = isinstance(env_state, _WRAPPERS)
    chosen = _all(env_state, wrapped)
    goes_in = wrapped or isinstance(env_state, RecordedState)
    return chosen._replace(env_state=_of_env(env_state.env_state)) if goes_in else chosen


def _selected(agent: Agent, state: Any, *, buffers: bool) -> list[int]:
    """The positions of the leaves of a run's state that are watched; only floats are."""
    chosen = jax.tree.map(lambda x: _all(x, buffers or not _is_buffer(x)), state, is_leaf=_is_buffer)
    own = innermost(state)
    others = {name: _all(getattr(own, name), False) for name in agent.data}
    if hasattr(own, "env_state"):
        others["env_state"] = _of_env(own.env_state)
    chosen = with_innermost(chosen, innermost(chosen)._replace(**others))
    pairs = zip(jax.tree.leaves(chosen), jax.tree.leaves(state), strict=True)
    return [i for i, (on, x) in enumerate(pairs) if on and jnp.issubdtype(x.dtype, jnp.inexact)]


@functools.lru_cache(maxsize=16)
def _flags(to: NamedSharding | None) -> Callable[[list[jax.Array]], jax.Array]:
    """A program that tells which arrays of a mesh are not finite; of several processes, all can read what it gives."""
    return jax.jit(lambda leaves: jnp.stack([~jnp.isfinite(x).all() for x in leaves]), out_shardings=to)


def _is_at_hand(x: jax.Array) -> bool:
    """Whether NumPy can read an array without a copy, and knows its dtype."""
    # Several processes must look in the same way, because they read the results together.
    on_one = jax.process_count() == 1 and len(x.sharding.device_set) == 1
    return on_one and x.dtype in (np.float32, np.float64) and next(iter(x.sharding.device_set)).platform == "cpu"


def non_finite(leaves: Sequence[jax.Array], numbers: Sequence[int]) -> list[int]:
    """The positions, of those in `numbers`, of leaves on any meshes that are not finite; nothing is moved to the host."""
    found: list[int] = []
    meshes: dict[Any, list[int]] = {}
    for i in numbers:
        if not _is_at_hand(leaves[i]):
            meshes.setdefault(frozenset(leaves[i].sharding.device_set), []).append(i)
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
        everything = _selected(agent, state, buffers=True)
        odd = {i for i in non_finite([x for _, x in leaves], everything) if not self.paths[i].startswith(_ALWAYS)}
        self._chosen = [i for i in _selected(agent, state, buffers=False) if i not in odd]
        self._everything = [i for i in everything if i not in odd]  # with the floats in replay buffers

    def bad(self, state: Any) -> list[str]:
        """The pytree paths of the watched leaves of a state that are not finite."""
        return [self.paths[i] for i in non_finite(jax.tree.leaves(state), self._chosen)]

    def is_whole(self, state: Any) -> bool:
        """Whether the watched leaves and replay buffers are finite."""
        return not non_finite(jax.tree.leaves(state), self._everything)

    def search(self, run: Run, state: Any, iterations: int) -> tuple[int, Origin | int | None] | None:
        """Finds the first iteration of a run that is not finite, and where its nan or infinity comes from.

        A run is deterministic, so it goes again from a finite state, `iterations` before one that is not: they are halved until
        one is left, which is then evaluated outside of the compiled programs, equation by equation.

        Gives the number of finite iterations before that one; and the origin, or the position of a leaf of the state, or of a
        register behind them, that is not finite itself, or None if the iteration is finite outside of the compiled programs.
        None in place of both if the iterations are finite this time.
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
        env = dict(zip(region.carry, values, strict=True)) | {v: jax.device_put(x, device) for v, x in graph.constants.items()}
        wanted = [*(region.next_carry[i] for i in self._everything), *region.results]
        return find_origin([node.eqn for node in region.nodes], env, wanted)
