"""Environments of Jumanji (https://github.com/instadeepai/jumanji; Bonnet et al. 2023, arXiv 2306.09884)."""

import copy
import dataclasses
import functools
import math
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Environment, NamedEnvironment, PyTree, Stepped, output_shapes, to_32_bit
from msrl_jax.envs.masks import has_masks
from msrl_jax.envs.suites import common

_OWN = {
    "LevelBasedForaging": ("agents_view",),
    "RobotWarehouse": ("agents_view",),
    "SearchAndRescue": ("searcher_views", "positions"),
    "Cleaner": (),
    "Connector": (),
    "JobShop": (),
    "MMST": (),
    "MultiCVRP": (),
}
"""The multi-agent environments, and the fields of their observations that have one entry per agent."""


_NONE_YET = {"jumanji:TSP": ("position",)}
"""Observation fields that are -1 before the first action, although the suite declares them from 0."""


def make(name: str, **params: Any) -> Environment:
    """Makes an environment of Jumanji, such as "Snake-v1"; a `MultiAgentEnvironment` if it has several agents.

    Parameters are constructor arguments, such as `time_limit`.
    """
    registration = common.load("jumanji").registration
    full = common.full_name("jumanji", name, registration._REGISTRY)
    with common.quiet():
        kind = registration.load(registration._REGISTRY[name].entry_point)
    common.check_params(full, params, common.arguments_of(kind) - {"viewer"})
    try:
        env = common.build(full, lambda **values: registration.make(name, **values), params)
    except OSError as error:
        raise RuntimeError(f"{full} could not load its data ({error}); Jumanji downloads it, so connect to the web") from error
    own_fields = next((fields for start, fields in _OWN.items() if name.startswith(f"{start}-")), None)
    return JumanjiEnvironment(env, full) if own_fields is None else JumanjiTeam(env, full, own_fields)  # type: ignore[return-value]


class JumanjiState(NamedTuple):
    """A state of the suite, with what it reported.

    Attributes:
      env_state: the state of the suite.
      mask: the legal actions, `[n]` or, with several agents, `[A, n]` bool; `()` if all are legal.
      extras: the other values that the suite reports, by name.
    """

    env_state: PyTree
    mask: PyTree
    extras: dict[str, jax.Array]


class _Adapter(NamedEnvironment):
    """Base class for single-agent and multi-agent environments; `action_mask` exists only if the suite has legal actions.

    The metrics are the scalars that the suite reports in addition to rewards, such as `solved`: the last of an episode.
    """

    env: Any
    lead: tuple[int, ...] = ()  # leading dimensions before those of one agent

    def reset(self, key: jax.Array) -> tuple[JumanjiState, PyTree]:
        with common.quiet():
            state, first = to_32_bit(self.env.reset(key))
        return self._state(state, first), self._observe(first)

    def _advance(self, state: JumanjiState, action: jax.Array) -> tuple[JumanjiState, PyTree, Any]:
        """Returns a step and what the suite reports of it; random numbers come from the key in the state, as in the suite."""
        with common.quiet():
            env_state, timestep = to_32_bit(self.env.step(state.env_state, action.astype(self.env.action_spec.dtype)))
        return self._state(env_state, timestep), self._observe(timestep), timestep

    def _state(self, env_state: PyTree, timestep: Any) -> JumanjiState:
        extras = {name: jnp.asarray(x, jnp.float32) for name, x in common.scalars(timestep.extras or {}).items()}
        if not has_masks(self):
            return JumanjiState(env_state, (), extras)
        mask = timestep.observation.action_mask.reshape(*self.lead, -1)
        # If no action is legal, allow all: the suite then accepts and ignores any.
        return JumanjiState(env_state, mask | ~mask.any(-1, keepdims=True), extras)

    @property
    def metrics(self) -> dict[str, str]:
        """The reductions of the suite's reported scalars, by name."""
        return dict.fromkeys(self._extras, "last")

    @functools.cached_property
    def _extras(self) -> tuple[str, ...]:
        return tuple(common.scalars(output_shapes(self.env.reset)[1].extras or {}))

    render_fps = 5.0

    def render(self, state: JumanjiState) -> np.ndarray:
        """Returns an image rendered by the suite's viewer."""
        viewer = copy.copy(self.env._viewer)
        viewer._display = common.image_of  # as with render_mode="rgb_array"
        with common.quiet(), warnings.catch_warnings(action="ignore"):  # it opens no window
            return viewer.render(state.env_state)

    def report(self, state: JumanjiState) -> dict[str, jax.Array]:
        """Returns the last values that the suite reported."""
        return state.extras

    def _observe(self, timestep: Any) -> dict[str, PyTree]:
        fields = _fields(timestep.observation)
        return {name: part for name, part in fields.items() if not (has_masks(self) and name == "action_mask")}


class JumanjiEnvironment(_Adapter):
    """An environment of Jumanji with one agent, without automatic reset.

    Several discrete actions are combined into one, in row-major order. Observations are dicts of the suite's fields, without
    the legal actions. An episode end with the suite's discount of 0 is a termination; in many of its environments, the time
    limit is one.
    """

    def __init__(self, env: Any, name: str):
        self.env, self.name, self._sizes = env, name, _sizes(spec := env.action_spec)
        mask = getattr(output_shapes(env.reset)[1].observation, "action_mask", None)
        if mask is not None and mask.shape == self._sizes:
            self.action_mask = lambda state: state.mask
        space = _space(env.observation_spec, output_shapes(self.reset)[1])
        for field in _NONE_YET.get(name.rpartition("-")[0], ()):
            parts: Any = space.spaces  # type: ignore[union-attr]
            highest, dtype = parts[field].n - 1, parts[field].dtype
            space = spaces.Dict({**parts, field: spaces.Box(-1, highest, (), dtype)})
        self.observation_space = space
        self.action_space = spaces.Discrete(math.prod(self._sizes)) if self._sizes else _space(spec, spec)

    def step(self, key: jax.Array, state: JumanjiState, action: jax.Array) -> Stepped:
        """Advances the episode."""
        if len(self._sizes) > 1:
            action = jnp.stack(jnp.unravel_index(action, self._sizes))
        state, obs, timestep = self._advance(state, action)
        terminated = timestep.last() & (timestep.discount == 0)
        return state, obs, timestep.reward, terminated, timestep.last() & ~terminated


class JumanjiTeam(_Adapter):
    """A multi-agent environment of Jumanji, without automatic reset.

    Every agent observes the common fields, its own entries of the fields `own`, and its number. If the suite has one reward or
    one end for all agents, every agent gets it.
    """

    def __init__(self, env: Any, name: str, own_fields: tuple[str, ...]):
        self.env, self.name, self.own_fields, self.lead = env, name, own_fields, env.action_spec.shape[:1]
        spec, first = env.action_spec, output_shapes(env.reset)[1]
        self.agents = tuple(f"agent_{i}" for i in range(spec.shape[0]))
        mask = getattr(first.observation, "action_mask", None)
        if mask is not None:
            self.action_mask = lambda state: state.mask
        self.action_space = (
            spaces.map_arrays(_agent_space, _space(spec, spec)) if mask is None else spaces.Discrete(mask.shape[1])
        )
        declared = _space(env.observation_spec, super()._observe(first))
        assert isinstance(declared, spaces.Dict)
        parts = {
            name: spaces.map_arrays(_agent_space, part) if name in own_fields else part
            for name, part in declared.spaces.items()
        }
        self.observation_space = spaces.Dict({**parts, "agent": spaces.Discrete(len(self.agents))})

    def step(self, key: jax.Array, state: JumanjiState, action: jax.Array) -> Stepped:
        """Advances the episode."""
        state, obs, timestep = self._advance(state, action)
        reward, terminated = jnp.broadcast_to(timestep.reward, self.lead), jnp.broadcast_to(timestep.discount == 0, self.lead)
        return state, obs, reward, terminated, timestep.last() & ~terminated.all()

    def _observe(self, timestep: Any) -> dict[str, PyTree]:
        fields, count = super()._observe(timestep), len(self.agents)
        for_all = {name: part for name, part in fields.items() if name not in self.own_fields}
        for_all = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), for_all)
        return {**for_all, **{name: fields[name] for name in self.own_fields}, "agent": jnp.arange(count)}


def _sizes(spec: Any) -> tuple[int, ...]:
    """Returns the number of values of each discrete action; `()` for other actions."""
    return tuple(int(n) for n in np.ravel(spec.num_values)) if hasattr(spec, "num_values") else ()


def _fields(value: Any) -> Any:
    """Converts dataclasses and named tuples in a value to dicts."""
    if isinstance(value, Mapping):
        return {name: _fields(part) for name, part in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: _fields(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _fields(part) for name, part in value._asdict().items()}
    return value


def _space(spec: Any, x: Any) -> spaces.Space:
    """Returns the space of arrays `x`, or dicts of them, with the bounds of the suite's specification if the arrays are
    inside.
    """
    if isinstance(x, Mapping):
        parts = vars(spec).get("_specs", {}) if spec is not None else {}
        return spaces.Dict({name: _space(parts.get(name), part) for name, part in x.items()})
    if x.dtype == bool or not hasattr(spec, "minimum") or spec.shape != x.shape:
        return spaces.unbounded(x)
    if isinstance(getattr(spec, "num_values", None), int) and x.shape == ():
        return spaces.Discrete(spec.num_values, x.dtype)
    return spaces.Box(np.asarray(spec.minimum), np.asarray(spec.maximum), x.shape, x.dtype)


def _agent_space(space: spaces.Discrete | spaces.Box) -> spaces.Box:
    """Returns the space of one agent's entry, given the space of arrays with one entry per agent."""
    assert isinstance(space, spaces.Box)
    return spaces.Box(space.low[0], space.high[0], space.shape[1:], space.dtype)
