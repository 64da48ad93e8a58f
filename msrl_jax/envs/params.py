"""Environment parameters as data: drawn for every episode and changeable during a run, without recompilation.

An environment with `default_params` and `with_params` has parameters as data. `RandomizeParams` draws them and keeps them in
the state. The source they are drawn from, a `ParamSampler`, is in the state of a vector environment, one entry per copy.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import used_inputs
from msrl_jax.envs import param_distributions, spaces
from msrl_jax.envs.base import Environment, PyTree, Stepped, drop_weak_types, env_name, has_agents, output_shapes
from msrl_jax.envs.wrappers import EnvironmentWrapper
from msrl_jax.fragments.counters import Counter, counter
from msrl_jax.fragments.support.checks import shown, suggestion
from msrl_jax.fragments.support.random_keys import key_for
from msrl_jax.fragments.support.tracebacks import entry

Params: TypeAlias = Mapping[str, Any]  # by name

E = TypeVar("E")


@functools.partial(jax.tree_util.register_dataclass, data_fields=["level"], meta_fields=["sample"])
@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Episode parameters that depend on a level, which can be changed during a run.

    Attributes:
      sample: `(key, level) -> mapping` from names to values, written with `jax.numpy`.
      level: the initial level: a number, or a pytree of numbers, arrays and `ramp`s.
    """

    sample: Callable[[jax.Array, Any], Params]
    level: PyTree


GivenParams: TypeAlias = Params | Callable[[jax.Array], Params] | Curriculum | str
"""What `RandomizeParams` accepts: name -> value, also as text; a function of a key; or a `Curriculum`."""


class ParamSampler(NamedTuple):
    """The source that parameters are drawn from."""

    values: Any  # name -> a number, a `ParamDistribution` or a `ParamRamp`; or a `Curriculum`
    taken: Counter | tuple[()] = ()  # environment steps of all copies so far, if a ramp needs them


class RandomizedState(NamedTuple):
    """State of `RandomizeParams`: that of the environment, and the parameters of this episode by name."""

    env_state: PyTree
    params: dict[str, jax.Array]


@entry
@dataclasses.dataclass(frozen=True, eq=False)
class RandomizeParams(EnvironmentWrapper):
    """Draws parameters of an environment from the key of each reset, and keeps them for the episode.

    The spaces are those of `env` with its original parameters.

    Attributes:
      env: the environment, with parameters as data; it may be wrapped.
      params: name -> a number, an array, or one of `uniform`, `log_uniform`, `choice` and `ramp`, also as text; or a function
        `key -> mapping`; or a `Curriculum`; or everything as text, `"length=uniform:0.25:1,gravity=9.8"`. Other parameters
        keep their values.
      source: `params` after validation, with numbers as arrays of the parameters' dtypes.
    """

    env: Environment
    params: GivenParams
    source: ParamSampler = dataclasses.field(init=False, repr=False)

    def __post_init__(self):
        for inner in inside(self.env):
            if isinstance(inner, RandomizeParams):
                raise ValueError(f"the parameters of {self.name} are already drawn; pass all of them to one RandomizeParams")
            if hasattr(inner, "vectorize"):
                raise TypeError(f"{self.name} creates its own parallel copies, so its parameters cannot be data here")
        object.__setattr__(self, "source", _make_sampler(self.env, self.params))

    def _delegate(self, method: str) -> Callable[[RandomizedState], jax.Array]:
        getattr(self.env, method)
        return lambda state: getattr(with_params(self.env, state.params), method)(state.env_state)

    def reset(self, key: jax.Array) -> tuple[RandomizedState, PyTree]:
        """Draws parameters, and starts an episode with them."""
        params = _draw(self.env, self.source, key_for("parameters", key))
        env_state, obs = with_params(self.env, params).reset(key)
        return RandomizedState(env_state, params), obs

    def step(self, key: jax.Array, state: RandomizedState, action: PyTree) -> Stepped:
        """Advances the episode."""
        env_state, *stepped = with_params(self.env, state.params).step(key, state.env_state, action)
        return RandomizedState(env_state, state.params), *stepped  # type: ignore[return-value]


def randomized(env: Environment, params: GivenParams | None) -> Environment:
    """Returns the environment with `params` as data; `env` itself if there are none."""
    return RandomizeParams(env, params) if params else env


def params_text(params: GivenParams | None) -> dict[str, str] | str | None:
    """Parameters as text: by name, as `RandomizeParams` accepts them, or the name of a function, which it does not accept."""
    if not params:
        return None
    if isinstance(params, str):
        params = param_distributions.parse_many(params)
    if isinstance(params, Mapping):
        return {name: param_distributions.text(value) for name, value in params.items()}
    sample = params.sample if isinstance(params, Curriculum) else params
    kind = "Curriculum" if isinstance(params, Curriculum) else "function"
    return f"{kind} {getattr(sample, '__module__', '')}.{getattr(sample, '__qualname__', type(sample).__qualname__)}"


def inside(env: object) -> Iterator[Any]:
    """Yields an environment and those inside its wrappers, outermost first, but not one inside an adapter."""
    while env is not None:
        yield env
        env = None if _has_params(env) else getattr(env, "env", None)


def _has_params(env: object) -> bool:
    return hasattr(env, "default_params") and hasattr(env, "with_params")


def default_params(env: object) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters that can be data, of an environment or the one inside its wrappers; raises TypeError if it has
    none.
    """
    for inner in inside(env):
        if _has_params(inner) and isinstance(inner.default_params, Mapping):
            defaults = inner.default_params.items()
            return {name: jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x)) for name, x in defaults}
    raise TypeError(
        f"{env_name(env)} has no parameters as data. To add them to a custom environment, define a mapping default_params and "
        "a method with_params(params); otherwise set parameters when you make it, envs.make(name, parameter=value)"
    )


def with_params(env: Any, params: Params) -> Any:
    """Returns the environment with other, possibly traced, values for some parameters."""
    return env.with_params(params) if _has_params(env) else around(env, with_params(env.env, params))


def around(env: E, inner: Any) -> E:
    """Replaces the environment inside a wrapper."""
    if not dataclasses.is_dataclass(env) or "env" not in (f.name for f in dataclasses.fields(env)):
        raise TypeError(
            f"{type(env).__name__} wraps an environment with parameters as data, but is not a dataclass with a field env; "
            "make it one, or define default_params and with_params"
        )
    wrapper = copy.copy(env)  # dataclasses.replace would run the checks again
    object.__setattr__(wrapper, "env", inner)
    return wrapper  # type: ignore[return-value]


def _make_sampler(env: Any, params: Any) -> ParamSampler:
    name, types = env_name(env), default_params(env)
    if isinstance(params, str):
        params = param_distributions.parse_many(params)
    if isinstance(params, Mapping):
        if not params:
            raise ValueError(f"env_params of {name} is empty; name parameters, or omit it")
        values: Any = {}
        for key, value in params.items():
            _check_name(name, key, types)
            values[key] = param_distributions.cast(f"{name}: {key}", value, types[key])
        names = tuple(values)
    elif isinstance(params, Curriculum) or callable(params):
        function: Any = params
        values = function if isinstance(function, Curriculum) else Curriculum(lambda key, level: function(key), ())
        values = jax.tree.map(as_number, values)
        names = tuple(_sampled_types(name, values, types))
    else:
        remedy = "pass a mapping name -> value, a function of a key, or a Curriculum"
        raise TypeError(f"env_params={shown(params)} of {name}: {remedy}")
    _check_data(env, {key: types[key] for key in names})
    return ParamSampler(values, jax.tree.map(np.asarray, counter()) if param_distributions.ramps(values) else ())


def as_number(x: Any) -> np.ndarray:
    """Returns a number or an array of a level; raises ValueError for anything else."""
    x = np.asarray(x)
    if x.dtype.kind not in "biuf":
        raise ValueError(f"the level of a Curriculum holds {x}; use numbers, arrays of numbers and ramps, or pytrees of them")
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))


def _check_name(env: str, name: Any, types: Mapping[str, Any]) -> None:
    if name not in types:
        near = suggestion(name, types) if isinstance(name, str) else ""
        number_left = f" and {len(types) - 20} others (default_params)" if len(types) > 20 else ""
        raise ValueError(
            f"{env} has no parameter {name!r}{near} that can be data; it has {', '.join(list(types)[:20])}{number_left}"
        )


def _sampled_types(env: str, values: Curriculum, types: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the checked shapes and dtypes that a function returns."""
    steps = counter() if param_distributions.ramps(values) else ()

    def sample(key: jax.Array) -> dict[str, jax.Array]:
        params = values.sample(key, param_distributions.replace_ramps(values.level, steps))
        if not isinstance(params, Mapping) or not params:
            raise TypeError(f"the function of env_params of {env} returned {shown(params)}; return a mapping name -> value")
        return dict(jax.tree.map(jnp.asarray, params))

    params = output_shapes(sample)
    for name, x in params.items():
        _check_name(env, name, types)
        if x.shape != types[name].shape or not jnp.can_cast(x.dtype, types[name].dtype, "same_kind"):
            raise ValueError(
                f"the function of env_params returned {x.dtype}{list(x.shape)} for {name} of {env}, but the parameter is "
                f"{types[name].dtype}{list(types[name].shape)}"
            )
    return params


def _draw(env: Any, source: ParamSampler, key: jax.Array) -> dict[str, jax.Array]:
    types, values = default_params(env), source.values
    if isinstance(values, Curriculum):
        params = drop_weak_types(dict(values.sample(key, param_distributions.replace_ramps(values.level, source.taken))))
        return {name: x.astype(types[name].dtype) for name, x in params.items()}
    keys = dict(zip(sorted(values), jax.random.split(key, len(values)), strict=True))
    return {
        name: param_distributions.draw_param(value, keys[name], types[name], source.taken) for name, value in values.items()
    }


def _check_data(env: Any, types: Mapping[str, Any]) -> None:
    """Raises ValueError if a parameter has no effect, or cannot be data since shapes or Python control flow depend on it."""
    agents = (len(env.agents),) if has_agents(env) else ()
    action = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*agents, *x.shape), x.dtype), spaces.struct(env.action_space))
    key = output_shapes(lambda key: key)

    def play(params: Params, key: jax.Array, action: PyTree) -> PyTree:
        env_with_params = with_params(env, params)
        state, obs = drop_weak_types(env_with_params.reset(key))
        methods = "action_mask", "global_state", "privileged_state", "report"
        outputs = [getattr(env_with_params, method)(state) for method in methods if hasattr(env_with_params, method)]
        return (state, obs), drop_weak_types(env_with_params.step(key, state, action)), outputs

    with_params(env, {})
    try:
        jaxpr = jax.make_jaxpr(play)(types, key, action).jaxpr
    except Exception:
        jax.eval_shape(play, {}, key, action)  # raises for an environment that fails with any parameters
        for name, kind in types.items():  # find the parameter
            try:
                jax.eval_shape(play, {name: kind}, key, action)
            except Exception as error:  # environments may raise anything
                raise ValueError(
                    f"{name} of {env_name(env)} cannot be data, because shapes or Python control flow depend on it "
                    f"({type(error).__name__}); set it when you make the environment, envs.make(..., {name}=value)"
                ) from error
        raise
    for name, is_used in zip(sorted(types), used_inputs(jaxpr), strict=False):
        if not is_used:
            raise ValueError(f"{name} of {env_name(env)} has no effect on reset and step; remove it from env_params")
