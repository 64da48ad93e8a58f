"""Exports a trained policy as one file that acts without this package: a `jax.export` program, or an ONNX model."""

import dataclasses
import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._compat import ClosedJaxpr, drop_unused, jaxpr_as_fun
from msrl_jax._files import as_path, replacing
from msrl_jax.envs import MaskedObservation
from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.support.checks import check_loaded, whole
from msrl_jax.fragments.support.random_keys import is_key
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk.folder import check_target
from msrl_jax.run.evaluation.evaluate import Behavior
from msrl_jax.run.experiment.plain_data import to_json
from msrl_jax.run.result import Result

PLATFORMS = ("cpu", "cuda", "tpu")
one_at_a_time = threading.Lock()  # while jax2onnx converts, some functions of JAX are replaced


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy as a function of named arrays, `inputs -> outputs`, with its parameters as constants.

    Attributes:
      run: maps arrays by name to arrays by name; the function to export.
      inputs: shapes and dtypes of one observation, one carry and a key; in `run`, all but the key have a leading dimension `B`.
    """

    run: Callable[..., dict[str, jax.Array]]
    inputs: Mapping[str, jax.ShapeDtypeStruct]

    def batched(self, size: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the inputs for a number of observations, which may be a symbolic dimension."""
        items = self.inputs.items()
        return {
            name: shape if name == "key" else jax.ShapeDtypeStruct((size, *shape.shape), shape.dtype) for name, shape in items
        }


@entry
def export(
    result: Result, path: str | os.PathLike, *, sample: bool = False, member: int | None = None, batch: int | None = None
) -> Path:
    """Exports the policy to one file that acts without this package and does all that `Result.act` does: normalization, action
    masks, scaling, recurrent carry.

    The file maps raw observations to actions, both with a leading dimension `B`, by name: `obs` (`obs_PATH` for an
    observation of several arrays; `action_mask`) to `action`. A recurrent agent also takes its carry as `carry_0`, ...,
    which are zeros at the start of an episode, and returns the carry for the next step. The file also describes its run,
    inputs and outputs: as JSON in `Exported.fun_name`, or in the `doc_string` of an ONNX model.

    Args:
      result: the run of the agent.
      path: `FILE.jaxexport`, for `jax.export.deserialize`, on CPUs, GPUs and TPUs: JAX reads it for at least 6 months. Or
        `FILE.onnx`, by jax2onnx: `pip install 'msrl-jax[onnx]'`; no other thread may call JAX during the export.
      sample: whether to sample actions, with the data of a key, uint32 `[2]`, as the input `key`; otherwise the policy
        takes the most probable actions. Only for `.jaxexport`.
      member: index of the member; None selects the best one.
      batch: number of observations per call; None allows any number, which a custom network may not support.

    Returns:
      The path of the file.

    Raises:
      ValueError: if the suffix is unknown, the folder or member does not exist, or the format cannot express the policy.
    """
    check_loaded(result)
    number = result.member(member)
    about = {key: result.description.get(key) for key in ("algorithm", "env", "env_params", "versions")}
    steps = int(result.history["step"][-1]) if len(result.history["step"]) else 0
    about |= {"run": result.folder, "member": number, **result.settings[number], "steps": steps, "sample": sample}
    with one_at_a_time:
        policy = exported_policy(result.behavior, result.acting_state(number), sample)
        return write(policy, as_path("path", path), about, batch)


def exported_policy(behavior: Behavior, state: PyTree, sample: bool) -> Policy:
    """Makes the policy from one member's state."""
    leaves = [np.asarray(x) if not is_key(x) else x for x in behavior.take(state)]
    observed, carried = behavior.observation_type, jax.eval_shape(lambda: behavior.initial_carry(1))
    if any(np.any(np.asarray(x)) for x in jax.tree.leaves(behavior.initial_carry(1))):
        raise ValueError("export needs an agent whose initial carry is all zeros, so that callers can start an episode")
    observations, parts = _arrays_by_name(observed), enumerate(jax.tree.leaves(carried))
    carry_inputs = {f"carry_{i}": jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for i, x in parts}

    def run(**arrays: jax.Array) -> dict[str, jax.Array]:
        key = jax.random.wrap_key_data(arrays["key"], impl="threefry2x32") if sample else None
        obs = jax.tree.unflatten(jax.tree.structure(observed), [arrays[name] for name in observations])
        size = jax.tree.leaves(obs)[0].shape[0]
        carry_leaves = [arrays[n] if n in arrays else jnp.zeros((size, *x.shape), x.dtype) for n, x in carry_inputs.items()]
        # A barrier, so that operations on parameters alone are not folded at compile time, which would round differently.
        state = behavior.restore(jax.lax.optimization_barrier([jnp.asarray(x) for x in leaves]))
        action, carry = behavior.act_with_carry(state, obs, jax.tree.unflatten(jax.tree.structure(carried), carry_leaves), key)
        carry_pairs = zip(carry_inputs, carry_leaves, jax.tree.leaves(carry), strict=True)
        return {"action": action} | {f"next_{name}": x for name, old, x in carry_pairs if name in arrays and x is not old}

    key_input = {"key": jax.ShapeDtypeStruct((2,), np.uint32)} if sample else {}
    whole_policy = Policy(run, observations | carry_inputs | key_input)
    # The carry of a critic does not change.
    changes = jax.eval_shape(run, **whole_policy.batched(1))
    return Policy(run, observations | {n: x for n, x in carry_inputs.items() if f"next_{n}" in changes} | key_input)


def _arrays_by_name(observed: PyTree) -> dict[str, Any]:
    """Returns the arrays of an observation by name: `obs`, `obs_PATH` for a pytree, and `action_mask`."""
    if isinstance(observed, MaskedObservation):
        return _arrays_by_name(observed.obs) | {"action_mask": observed.action_mask}
    paths = jax.tree_util.tree_leaves_with_path(observed)
    return {"_".join(["obs", *filter(None, [jax.tree_util.keystr(path, simple=True, separator="_")])]): x for path, x in paths}


def write(policy: Policy, path: Path, about: Mapping[str, Any], batch: int | None) -> Path:
    """Writes a policy to a file, in the format of its suffix; see `export`."""
    check_target("file", path, tuple(_FORMATS))
    suffix = path.suffix.lower()
    if suffix == ".onnx" and "key" in policy.inputs:
        raise ValueError("ONNX cannot sample with a key; export a sampling policy as .jaxexport")
    size: Any = jax.export.symbolic_shape("B")[0] if batch is None else whole("batch", batch)
    inputs = policy.batched(size)
    try:
        outputs = jax.eval_shape(policy.run, **inputs)
    except Exception as error:
        if batch is not None:
            raise
        raise ValueError(
            f"the policy cannot be traced for an arbitrary batch size ({_first_line(error)}); give one, such as batch=1"
        ) from error
    text = json.dumps(to_json({**about, "inputs": _describe_arrays(inputs), "outputs": _describe_arrays(outputs)}))
    content = _FORMATS[suffix](policy, inputs, list(outputs), text)
    with replacing(path) as partial:
        partial.write_bytes(content)
    return path


def _to_jaxexport(policy: Policy, inputs: Mapping[str, jax.ShapeDtypeStruct], outputs: list[str], about: str) -> bytes:
    def run(**arrays: jax.Array) -> dict[str, jax.Array]:
        return policy.run(**arrays)

    run.__name__ = about  # the only place for text in this format
    return bytes(jax.export.export(jax.jit(run), platforms=PLATFORMS)(**inputs).serialize())


def _to_onnx(policy: Policy, inputs: Mapping[str, jax.ShapeDtypeStruct], outputs: list[str], about: str) -> bytes:
    closed = jax.make_jaxpr(lambda *xs: list(policy.run(**dict(zip(inputs, xs, strict=True))).values()))(*inputs.values())
    # Inputs that no action needs, such as keys of the state, have no ONNX counterpart.
    pruned = jaxpr_as_fun(ClosedJaxpr(drop_unused(closed.jaxpr), closed.consts))
    original_cumsum = jnp.cumsum
    try:
        import jax2onnx  # type: ignore[import-not-found]
        import onnx  # type: ignore[import-not-found]

        logging.getLogger("onnx_ir").setLevel(logging.ERROR)  # ignore shapes of inner values that it cannot infer
        model = jax2onnx.to_onnx(
            lambda *xs: tuple(pruned(*xs)),
            list(inputs.values()),
            model_name="policy",
            input_names=list(inputs),
            output_names=outputs,
        )
        onnx.checker.check_model(model, full_check=True)
    except ImportError as error:
        raise ValueError("jax2onnx, which writes ONNX files, is not installed: pip install 'msrl-jax[onnx]'") from error
    except Exception as error:
        hint = "" if all(isinstance(n, int) for x in inputs.values() for n in x.shape) else "give batch=1, say, or "
        fact = f"jax2onnx cannot express this policy ({_first_line(error)})"
        raise ValueError(f"{fact}; {hint}export it as .jaxexport") from error
    finally:
        jnp.cumsum = original_cumsum  # jax2onnx replaces it for the whole process
    model.doc_string = about
    return model.SerializeToString()


_FORMATS = {".jaxexport": _to_jaxexport, ".onnx": _to_onnx}


def _describe_arrays(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, str]:
    return {name: f"{x.dtype}[{', '.join(map(str, x.shape))}]" for name, x in arrays.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
