"""Custom modules as networks: from flax.linen, flax.nnx, Equinox or Haiku, or a pair of functions.

A module maps a batch of observations `[B, ...]`, in the format of the environment but without masks, to features `[B, F]`; the
algorithm adds its heads. The `network` of a config is a name or one of

    a module of flax.linen       such as `MyTorso(width=64)`
    a pair                       `init(key, obs) -> params` and `apply(params, obs) -> features`, a tuple or two attributes
    a function of a key          that returns a module of flax.nnx; or one of Equinox, which is called on one observation.
                                 If it takes two arguments, the second is a batch of one observation, from which to infer sizes.
                                 The key may be a keyword argument, `key`, as in Equinox layers
    MODULE:NAME                  the name of one of these
    CustomNetworks(actor=..., critic=...) of these, with output layers; critics of continuous actions also take the actions

All numbers of a module are parameters. Modules with randomness in `apply` (dropout) or state (batch statistics) are rejected.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from msrl_jax._compat import used_inputs
from msrl_jax.configs.deferred import INITIALIZED_MODULE, has_arrays
from msrl_jax.fragments.support import naming
from msrl_jax.networks.custom_network import CustomNetwork, CustomNetworks

_FORMS = "give a module of flax.linen, a pair (init, apply), or a function of a key that returns one of flax.nnx or Equinox"
_OBJECTS = "a module, a pair, or a function or class that makes one"
_NO_STATE = "a module has parameters only: no random numbers, as of dropout, and no state, as of batch statistics"


def as_network(network: Any) -> CustomNetwork | CustomNetworks:
    """Converts a module to a pair of functions, which raise clear errors when they are first traced.

    Args:
      network: one of the forms above.

    Returns:
      The network, or the networks of a `CustomNetworks`. Its `init` raises ValueError if the module fails, if its features
      are not floats `[B, F]`, and if a parameter is not an array of floats or has no gradient; the message names it.

    Raises:
      TypeError: if it is none of the forms.
      ValueError: if MODULE:NAME cannot be imported.
    """
    is_text = isinstance(network, str)
    module = naming.imported("network", network, _OBJECTS, _is_network, is_made=True) if is_text else network
    if isinstance(module, CustomNetworks):
        return CustomNetworks(*(None if part is None else as_network(part) for part in module))
    name = f"network={network!r}" if is_text else f"network={_name(module)}"
    functions = _pair_of(module, name)

    def init(key: jax.Array, *obs: Any) -> Any:
        try:
            params = functions.init(key, *obs)
            three = jax.tree.map(lambda x: jnp.repeat(x[:1], 3, axis=0), obs)
            features = jax.eval_shape(functions.apply, params, *three)
        except Exception as error:
            if str(error).startswith(name):
                raise
            inputs = ", ".join(f"{x.dtype} {list(x.shape[1:])}" for x in jax.tree.leaves(obs))
            cause = f"{type(error).__name__}: {str(error).strip()}"
            raise ValueError(f"{name} fails for a batch of observations {inputs}: {cause} ({_NO_STATE})") from error
        if not isinstance(features, jax.ShapeDtypeStruct) or features.ndim != 2 or len(features) != 3:
            shapes = jax.tree.map(lambda x: x.shape, features)
            raise ValueError(f"{name} returns {shapes} for 3 observations; return one array of features [B, F]")
        if not jnp.issubdtype(features.dtype, jnp.floating):
            raise ValueError(f"{name} returns features of dtype {features.dtype}; return floats")
        check_gradients(name, functions, params, *three)
        return params

    return CustomNetwork(init, functions.apply)


def _is_network(value: object) -> bool:
    """Whether an object is one of the forms; a function of a key can only be checked further by a call."""
    is_maker = callable(value) and not callable(getattr(value, "apply", None))
    return not is_maker or naming.makes(value, lambda kind: kind.__module__.partition(".")[0] not in sys.stdlib_module_names)


def _name(value: object) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _pair_of(module: Any, name: str) -> CustomNetwork:
    if isinstance(module, type) and issubclass(module, nn.Module):
        raise TypeError(f"{name} is a class; give a module, such as {module.__name__}(...), or MODULE:NAME of one")
    if isinstance(module, nn.Module):
        return _linen(module, name)
    if isinstance(module, tuple) and any(isinstance(x, nn.Module) for x in module):
        raise TypeError(f"{name} holds modules; give CustomNetworks(actor=..., critic=...) instead")
    is_pair = isinstance(module, tuple) and not isinstance(module, CustomNetwork)
    pair: Any = module if is_pair else (getattr(module, "init", None), getattr(module, "apply", None))
    if len(pair) == 2 and all(map(callable, pair)):
        return _pair(pair[0], pair[1], name)
    if has_arrays(module):
        raise TypeError(f"{name} {INITIALIZED_MODULE}")
    if not callable(module):
        raise TypeError(f"{name} is not a module; {_FORMS}")
    return _from_maker(module, name)


def _linen(module: nn.Module, name: str) -> CustomNetwork:
    def init(key: jax.Array, *obs: Any) -> Any:
        variables = dict(module.init(key, *obs))
        params = variables.pop("params", {})
        if variables:
            raise ValueError(f"{name} has the collection {min(variables)!r}; {_NO_STATE}")
        return params

    return CustomNetwork(init, lambda params, *obs: module.apply({"params": params}, *obs))


def _pair(init: Callable[..., Any], apply: Callable[..., Any], name: str) -> CustomNetwork:
    if len(names := _required_arguments(apply)) > 2:
        raise TypeError(
            f"{name} has apply({', '.join(names)}), which is called with parameters and observations; {_NO_STATE}. Of Haiku, "
            "give hk.without_apply_rng(hk.transform(...))"
        )
    return CustomNetwork(init, apply)


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """Returns the names of the required positional arguments of a function."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind in positional]


def _from_maker(make: Callable[..., Any], name: str) -> CustomNetwork:
    """Makes a network from a function of a key that returns a module; only the parameters may depend on the key."""
    by_name = "key" in [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    num_inputs = len(_required_arguments(make)) - (not by_name)

    def parts(key: jax.Array, *obs: Any) -> tuple[Any, Callable[..., Any]]:
        from flax import nnx

        example = jax.tree.map(lambda x: x[:1], obs[:num_inputs])
        module: Any = make(*example, key=key) if by_name else make(key, *example)
        if isinstance(module, nnx.Module):
            return _nnx(module, name)
        if not callable(module):
            raise TypeError(f"{name} returns {_name(module)} for a key, which cannot be called; {_FORMS}")
        return _callable_pytree(module)

    def apply(params: Any, *obs: Any) -> Any:
        applies: list[Callable[..., Any]] = []

        def trace(key: jax.Array, *obs: Any) -> Any:
            values, apply = parts(key, *obs)
            applies.append(apply)
            return values

        jax.eval_shape(trace, jax.random.key(0), *obs)
        return applies[0](params, *obs)

    return CustomNetwork(lambda key, *obs: parts(key, *obs)[0], apply)


def _nnx(module: Any, name: str) -> tuple[Any, Callable[..., Any]]:
    from flax import nnx

    graph, params, variables = nnx.split(module, nnx.Param, ...)
    for path, _ in jax.tree.leaves_with_path(nnx.to_pure_dict(variables)):
        raise ValueError(f"{name} has the variable {jax.tree_util.keystr(path)}, which is not an nnx.Param; {_NO_STATE}")

    def apply(values: Any, *obs: Any) -> Any:
        return nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, values)))(*obs)

    return nnx.to_pure_dict(params), apply


def _callable_pytree(module: Any) -> tuple[Any, Callable[..., Any]]:
    """Splits an Equinox module into parameters, its arrays by path, and the rest, such as activations, which is constant."""
    paths_and_leaves, structure = jax.tree.flatten_with_path(module)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in paths_and_leaves}
    params = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, jax.Array)}
    constants = {path: leaf for path, leaf in leaves.items() if path not in params}

    def apply(values: Any, *obs: Any) -> Any:
        return jax.vmap(structure.unflatten((values | constants)[path] for path in leaves))(*obs)

    return params, apply


def check_gradients(name: str, network: CustomNetwork, params: Any, *obs: Any) -> None:
    """Raises ValueError if a parameter is not an array of floats, or has no gradient."""
    remedy = "keep what is not trained out of the parameters"
    for path, leaf in jax.tree.leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise ValueError(f"{name} has the parameter {jax.tree_util.keystr(path)}, which is not a float array; {remedy}")
        if jnp.result_type(leaf).itemsize < 4:
            raise ValueError(
                f"{name} has the parameter {jax.tree_util.keystr(path)} of dtype {jnp.result_type(leaf)}, too coarse for the "
                "steps of an optimizer; keep parameters in float32 (param_dtype), and compute with less (dtype)"
            )

    def gradients(params: Any, obs: Any, cotangent: jax.Array) -> Any:
        return jax.vjp(lambda params: network.apply(params, *obs), params)[1](cotangent)[0]

    features = jax.eval_shape(network.apply, params, *obs)
    jaxpr = jax.make_jaxpr(gradients)(params, obs, features).jaxpr
    for (path, _), gradient in zip(jax.tree.leaves_with_path(params), jaxpr.outvars, strict=True):
        if not used_inputs(jaxpr.replace(outvars=[gradient]))[-1]:
            parameter = jax.tree_util.keystr(path)
            raise ValueError(f"{name} has the parameter {parameter}, on which no feature depends; remove it, or {remedy}")
