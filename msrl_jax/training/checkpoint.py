"""The state of a run on disk: an Orbax checkpoint whose entries are named by pytree path.

A typed PRNG key is stored as its key data. Shardings are not stored: `load_state` reads every checkpoint onto one device.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._checks import writing
from msrl_jax.fragments.placement import Device


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(leaf: Any) -> str:
    """The generator of a typed key or of its shape; `jax.random.key_impl` takes only arrays and tracers."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), leaf)
    return found[0]


def save_state(path: Path, state: Any) -> None:
    """Writes a pytree of arrays; a crash while writing leaves nothing at `path`.

    Args:
      path: a folder that does not exist yet.
      state: pytree of arrays and typed PRNG keys.
    """
    import orbax.checkpoint as ocp  # a slow import, and only runs that are saved need it

    entries = {}
    for keypath, leaf in jax.tree.leaves_with_path(state):
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if np.size(data):
            entries[jax.tree_util.keystr(keypath)] = data
    with writing(path), ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path.absolute(), entries)


def load_state(path: Path, like: Any, device: Device | None = None) -> Any:
    """Reads a checkpoint of `save_state`.

    Args:
      path: the checkpoint's folder.
      like: a pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes and dtypes of the saved pytree.
      device: the device for the arrays; the default device if None.

    Returns:
      The saved pytree.

    Raises:
      ValueError: if the entries of the checkpoint and of `like` differ; the message names the first difference.
    """
    import orbax.checkpoint as ocp

    sharding = jax.sharding.SingleDeviceSharding(device or jax.local_devices()[0])
    leaves, tree = jax.tree.flatten_with_path(like)
    wanted = {}
    for keypath, leaf in leaves:
        data = jax.eval_shape(jax.random.key_data, leaf) if _is_key(leaf) else leaf
        if np.size(data):
            wanted[jax.tree_util.keystr(keypath)] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=sharding)
    with ocp.StandardCheckpointer() as checkpointer:
        _check_entries(path, checkpointer.metadata(path.absolute()).item_metadata.tree, wanted)
        entries = checkpointer.restore(path.absolute(), wanted)

    def restored(keypath, leaf):
        data = entries.get(jax.tree_util.keystr(keypath))
        if data is None:
            return jnp.zeros(leaf.shape, leaf.dtype)
        return jax.random.wrap_key_data(data, impl=_key_impl(leaf)) if _is_key(leaf) else data

    return jax.tree.unflatten(tree, [restored(*item) for item in leaves])


def _check_entries(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in sorted(saved.keys() | wanted.keys()):
        if name not in saved or name not in wanted:
            where = "only in the checkpoint" if name in saved else "not in the checkpoint"
            raise ValueError(
                f"the checkpoint {path} does not fit: state{name} is {where}; was it written by another version, or "
                "from another environment or config?"
            )
        have, want = saved[name], wanted[name]
        if tuple(have.shape) != want.shape or have.dtype != want.dtype:
            raise ValueError(
                f"the checkpoint {path} does not fit: state{name} is {have.dtype}{list(have.shape)} there and "
                f"{want.dtype}{list(want.shape)} here; was it written from another environment or config?"
            )
