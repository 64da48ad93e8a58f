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
from msrl_jax.envs.base import Environment, Named, PyTree, Stepped, emitted, narrow
from msrl_jax.envs.masks import has_masks
from msrl_jax.envs.suites import common

_OWN = {
    "LevelBasedForaging": ("agents_view",), "RobotWarehouse": ("agents_view",),
    "SearchAndRescue": ("searcher_views", "positions"), "Cleaner": (), "Connector": (), "JobShop": (), "MMST": (),
    "MultiCVRP": (),
}  # fmt: skip
"""The environments that several agents act in, and the fields of their observations that have one entry for each agent."""


_NONE_YET = {"jumanji:TSP": ("position",)}
"""Numbers in observations that are -1 before the first action, though the suite declares them from 0 on."""


def make(name: str, **params: Any) -> Environment:
    """An environment of Jumanji, such as "Snake-v1"; a `MultiAgentEnvironment` if several agents act in it.

    Parameters are arguments of its constructor, such as `time_limit`.
    """
    registration = common.load("jumanji").registration
    common.check_name("Jumanji", name, registration._REGISTRY)
    full = f"jumanji:{name}"
    with common.quiet():
        kind = registration.load(registration._REGISTRY[name].entry_point)
    common.check_params(full, params, common.arguments_of(kind) - {"viewer"})
    try:
        env = common.build(full, lambda **values: registration.make(name, **values), params)
    except OSError as error:
        raise RuntimeError(f"{full} could not load its data ({error}); Jumanji downloads it, so connect to the net") from error
    own = next((fields for start, fields in _OWN.items() if name.startswith(f"{start}-")), None)
    return JumanjiEnvironment(env, full) if own is None else JumanjiTeam(env, full, own)  # type: ignore[return-value]


class JumanjiState(NamedTuple):
    """A state of the suite, and what it reported.

    Attributes:
      env_state: the state of the suite.
      mask: the legal actions, `[n]` or, of several agents, `[A, n]` bool; `()` if all are legal.
      extras: what the suite reports beside, by name.
    """

    env_state: PyTree
    mask: PyTree
    extras: dict[str, jax.Array]


class _Adapter(Named):
    """What environments of one agent and of several share; they have `action_mask` only if the suite names legal actions.

    Their metrics are the scalars that the suite reports beside the rewards, such as `solved`: the last ones of the episode.
    """

    env: Any
    lead: tuple[int, ...] = ()  # the shape before what is one agent's

    def reset(self, key: jax.Array) -> tuple[JumanjiState, PyTree]:
        with common.quiet():
            state, first = narrow(self.env.reset(key))
        return self._state(state, first), self._observe(first)

    def _advance(self, state: JumanjiState, action: jax.Array) -> tuple[JumanjiState, PyTree, Any]:
        """A step, and what the suite says of it; what is random is drawn from the key in the state, as in the suite."""
        with common.quiet():
            env_state, after = narrow(self.env.step(state.env_state, action.astype(self.env.action_spec.dtype)))
        return self._state(env_state, after), self._observe(after), after

    def _state(self, env_state: PyTree, after: Any) -> JumanjiState:
        extras = {name: jnp.asarray(x, jnp.float32) for name, x in common.scalars(after.extras or {}).items()}
        if not has_masks(self):
            return JumanjiState(env_state, (), extras)
        mask = after.observation.action_mask.reshape(*self.lead, -1)
        # All where the suite names none, because it then takes any and heeds none.
        return JumanjiState(env_state, mask | ~mask.any(-1, keepdims=True), extras)

    @property
    def metrics(self) -> dict[str, str]:
        """The names of what the suite reports."""
        return dict.fromkeys(self._extras, "last")

    @functools.cached_property
    def _extras(self) -> tuple[str, ...]:
        return tuple(common.scalars(emitted(self.env.reset)[1].extras or {}))

    render_fps = 5.0

    def render(self, state: JumanjiState) -> np.ndarray:
        """A picture by the suite's viewer."""
        viewer = copy.copy(self.env._viewer)
        viewer._display = common.image_of  # what it is with render_mode="rgb_array"
        with common.quiet(), warnings.catch_warnings(action="ignore"):  # there is no window to show it in
            return viewer.render(state.env_state)

    def report(self, state: JumanjiState) -> dict[str, jax.Array]:
        """What the suite reported last."""
        return state.extras

    def _observe(self, after: Any) -> dict[str, PyTree]:
        fields = _fields(after.observation)
        return {name: part for name, part in fields.items() if not (has_masks(self) and name == "action_mask")}


class JumanjiEnvironment(_Adapter):
    """An environment of Jumanji with one agent, without automatic reset.

    Several discrete actions become one, whose number counts their combinations in row-major order. Observations are dicts of
    the suite's fields; legal actions are no part of them. An end with the suite's discount of 0 is a termination; in many of
    its environments the end of the time is one.
    """

    def __init__(self, env: Any, name: str):
        self.env, self.name, self._sizes = env, name, _sizes(spec := env.action_spec)
        mask = getattr(emitted(env.reset)[1].observation, "action_mask", None)
        if mask is not None and mask.shape == self._sizes:
            self.action_mask = lambda state: state.mask
        space = _space(env.observation_spec, emitted(self.reset)[1])
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
        state, obs, after = self._advance(state, action)
        terminated = after.last() & (after.discount == 0)
        return state, obs, after.reward, terminated, after.last() & ~terminated


class JumanjiTeam(_Adapter):
    """An environment of Jumanji in which several agents act, without automatic reset.

    Every agent sees what is common to all, its own entries of the fields `own`, and its number. A reward or an end that the
    suite gives to all together, every agent gets.
    """

    def __init__(self, env: Any, name: str, own: tuple[str, ...]):
        self.env, self.name, self.own, self.lead = env, name, own, env.action_spec.shape[:1]
        spec, first = env.action_spec, emitted(env.reset)[1]
        self.agents = tuple(f"agent_{i}" for i in range(spec.shape[0]))
        mask = getattr(first.observation, "action_mask", None)
        if mask is not None:
            self.action_mask = lambda state: state.mask
        self.action_space = _of_one(_space(spec, spec)) if mask is None else spaces.Discrete(mask.shape[1])
        declared = _space(env.observation_spec, super()._observe(first))
        assert isinstance(declared, spaces.Dict)
        parts = {name: _of_one(part) if name in own else part for name, part in declared.spaces.items()}
        self.observation_space = spaces.Dict({**parts, "agent": spaces.Discrete(len(self.agents))})

    def step(self, key: jax.Array, state: JumanjiState, action: jax.Array) -> Stepped:
        """Advances the episode."""
        state, obs, after = self._advance(state, action)
        reward, terminated = jnp.broadcast_to(after.reward, self.lead), jnp.broadcast_to(after.discount == 0, self.lead)
        return state, obs, reward, terminated, after.last() & ~terminated.all()

    def _observe(self, after: Any) -> dict[str, PyTree]:
        fields, count = super()._observe(after), len(self.agents)
        for_all = {name: part for name, part in fields.items() if name not in self.own}
        for_all = jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), for_all)
        return {**for_all, **{name: fields[name] for name in self.own}, "agent": jnp.arange(count)}


def _sizes(spec: Any) -> tuple[int, ...]:
    """The numbers of values of discrete actions, one for each; `()` of other actions."""
    return tuple(int(n) for n in np.ravel(spec.num_values)) if hasattr(spec, "num_values") else ()


def _fields(value: Any) -> Any:
    """A value with its dataclasses and named tuples as dicts."""
    if isinstance(value, Mapping):
        return {name: _fields(part) for name, part in value.items()}
    if dataclasses.is_dataclass(value):
        return {field.name: _fields(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _fields(part) for name, part in value._asdict().items()}
    return value


def _space(spec: Any, x: Any) -> spaces.Space:
    """The space of arrays `x`, or dicts of them, with the bounds that the suite's specification declares, if they fit."""
    if isinstance(x, Mapping):
        parts = vars(spec).get("_specs", {}) if spec is not None else {}
        return spaces.Dict({name: _space(parts.get(name), part) for name, part in x.items()})
    if x.dtype == bool or not hasattr(spec, "minimum") or spec.shape != x.shape:
        return spaces.unbounded(x)
    if isinstance(getattr(spec, "num_values", None), int) and x.shape == ():
        return spaces.Discrete(spec.num_values, x.dtype)
    return spaces.Box(np.asarray(spec.minimum), np.asarray(spec.maximum), x.shape, x.dtype)


def _of_one(space: spaces.Space) -> spaces.Space:
    """The space of one entry of a space whose arrays have one for each agent."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _of_one(part) for name, part in space.spaces.items()})
    assert isinstance(space, spaces.Box)
    return spaces.Box(space.low[0], space.high[0], space.shape[1:], space.dtype)
