"""Custom recurrent cores: an object with `init`, `initial`, `step` and optionally `unroll`, or a Flax cell.

    init(key, inputs [B, I]) -> params
    initial(batch_size) -> carry, a pytree of floats [B, ...] that are 0
    step(params, inputs [B, I], carry) -> (outputs [B, F], carry)
    unroll(params, inputs [T, B, I], is_first [T, B] bool, carry) -> (outputs [T, B, F], carries after every step [T, B, ...])

`unroll` must clear the carry before the first step of every episode; without it, `step` is scanned. You can pass a cell of
`flax.linen`, such as `nn.GRUCell(64)`, directly. The `core` of a config is an option (see `networks.core`), one of these
objects, or the MODULE:NAME of one. All numbers are parameters, as in custom modules.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from msrl_jax.configs.fields import is_option
from msrl_jax.fragments.support import naming
from msrl_jax.networks.core import Core
from msrl_jax.networks.custom_network import CustomNetwork
from msrl_jax.networks.modules import check_gradients
from msrl_jax.networks.unrolls import Carry, reset_carry

_FORMS = "give an object with init, initial and step (see networks.custom_core), or a cell of flax.linen such as nn.GRUCell(64)"


def as_core(core: Any) -> Callable[[int], Core]:
    """Returns the function that makes a core for a size of inputs.

    Args:
      core: an option, one of the forms above, or the MODULE:NAME of one.

    Returns:
      A function that raises ValueError if the core fails; if its carry does not start as floats that are 0, or changes its
      structure, shapes or dtypes in a step; if its outputs are not floats `[B, F]`; or if a parameter has no gradient.

    Raises:
      TypeError: if it is none of the forms.
      ValueError: if MODULE:NAME cannot be imported.
    """
    layer = naming.imported("core", core, "a core", _is_core) if isinstance(core, str) else core
    if is_option(layer):
        return (layer() if isinstance(layer, type) else layer).make
    name = f"core={core!r}" if isinstance(core, str) else f"core={getattr(layer, '__qualname__', type(layer).__qualname__)}"
    if isinstance(layer, type):
        raise TypeError(f"{name} is a class; {_FORMS}")
    functions = _from_cell(layer) if isinstance(layer, nn.RNNCellBase) else layer
    if missing := [n for n in ("init", "initial", "step") if not callable(getattr(functions, n, None))]:
        raise TypeError(f"{name} has no {missing[0]}; {_FORMS}")
    return lambda input_size: _make_checked(functions, input_size, name)


def _is_core(value: object) -> bool:
    is_object = not isinstance(value, type) and (isinstance(value, nn.RNNCellBase) or hasattr(value, "init"))
    return is_object or (is_option(value) and hasattr(value, "make"))


def _from_cell(cell: nn.RNNCellBase) -> Any:
    def init(key: jax.Array, inputs: jax.Array) -> Any:
        return cell.init(key, cell.initialize_carry(key, inputs.shape), inputs)

    def step(params: Any, inputs: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
        stepped: Any = cell.apply(params, carry, inputs)
        return stepped[1], stepped[0]

    initial = lambda batch: cell.initialize_carry(jax.random.key(0), (batch, *(1,) * cell.num_feature_axes))
    return SimpleNamespace(init=init, initial=initial, step=step)


def _make_checked(layer: Any, input_size: int, name: str) -> Core:
    """Converts a custom layer to a `Core` for a given input size; checks it abstractly with a batch of 3."""
    inputs = jnp.zeros((3, input_size), jnp.float32)
    try:
        with jax.ensure_compile_time_eval():
            zeros = jax.tree.map(np.asarray, layer.initial(3))
        params = jax.eval_shape(layer.init, jax.random.key(0), inputs)
        outputs, new_carry = jax.eval_shape(layer.step, params, inputs, zeros)
    except Exception as error:
        cause = f"{type(error).__name__}: {str(error).strip()}"
        raise ValueError(f"{name} fails for inputs [3, {input_size}]: {cause}") from error
    leaves, structure = jax.tree.flatten(zeros)
    for path, leaf in jax.tree.leaves_with_path(zeros):
        place = f"{name}: the initial carry {jax.tree_util.keystr(path)}"
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.shape[:1] != (3,):
            raise ValueError(f"{place} for a batch of 3 is {leaf.dtype} {list(leaf.shape)}; use floats [3, ...]")
        if leaf.any():
            raise ValueError(f"{place} is not 0; an episode starts with zeros: keep what to start from in the parameters")
    types = lambda leaves: [(x.shape, x.dtype) for x in leaves]
    if jax.tree.structure(new_carry) != structure or types(jax.tree.leaves(new_carry)) != types(leaves):
        show = lambda tree: jax.tree.map(lambda x: f"{x.dtype} {list(x.shape)}", tree)
        raise ValueError(
            f"{name}: a step turns the carry {show(zeros)} into {show(new_carry)}; keep structure, shapes and dtypes"
        )
    if getattr(outputs, "shape", ())[:-1] != (3,) or not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise ValueError(f"{name} returns outputs {outputs} for a batch of 3; return one array of floats [3, F]")
    two_steps = CustomNetwork(layer.init, lambda params, x: layer.step(params, x, layer.step(params, x, zeros)[1])[0])
    check_gradients(name, two_steps, params, inputs)
    return _as_core(layer, structure, outputs.shape[-1])


def _as_core(layer: Any, structure: Any, num_outputs: int) -> Core:
    """Adapts a custom layer to batches with any number of dimensions, and to carries that are tuples."""

    def merge(x: jax.Array, dims: int) -> jax.Array:
        return x.reshape(math.prod(x.shape[:dims]), *x.shape[dims:])

    def initial_carry(batch_shape: tuple[int, ...]) -> Carry:
        leaves = jax.tree.leaves(layer.initial(math.prod(batch_shape)))
        return tuple(jnp.asarray(x).reshape(*batch_shape, *x.shape[1:]) for x in leaves)

    def step(params: Any, inputs: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        batch = inputs.shape[:-1]
        tree = structure.unflatten([merge(x, len(batch)) for x in carry])
        outputs, tree = layer.step(params, merge(inputs, len(batch)), tree)
        carry = tuple(x.reshape(*batch, *x.shape[1:]) for x in jax.tree.leaves(tree))
        return outputs.reshape(*batch, -1), carry

    def scan(params: Any, inputs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        def scan_step(carry: Carry, step_inputs: tuple[jax.Array, jax.Array]) -> tuple[Carry, tuple[jax.Array, Carry]]:
            x, is_first = step_inputs
            outputs, carry = step(params, x, reset_carry(is_first, carry))
            return carry, (outputs, carry)

        return jax.lax.scan(scan_step, carry, (inputs, is_first))[1]

    def unroll(params: Any, inputs: jax.Array, is_first: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
        outputs, carries = layer.unroll(params, inputs, is_first, structure.unflatten(carry))
        return outputs, tuple(jax.tree.leaves(carries))

    init = lambda key, input_size: layer.init(key, jnp.zeros((1, input_size), jnp.float32))
    return Core(init, initial_carry, step, unroll if callable(getattr(layer, "unroll", None)) else scan, num_outputs)
