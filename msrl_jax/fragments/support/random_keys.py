"""Random keys: what is one, and keys for purposes other than training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_key(x: Any) -> bool:
    """Returns whether something is an array of typed keys, or the type of such an array."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def key_for(purpose: str, key: jax.Array) -> jax.Array:
    """Derives a key for a purpose, such as `"evaluation"`.

    `jax.random.split(key)[i]` is `jax.random.fold_in(key, i)`, so folding in a small number gives a key that training may also
    use. The first four letters are a large number.
    """
    return jax.random.fold_in(key, jax.device_put(np.uint32(int.from_bytes(purpose[:4].encode(), "big"))))


def fold_keys(state: Any, number: int) -> Any:
    """Folds a number into every typed key of a state, which changes all randomness."""

    def fold(x: Any) -> Any:
        if not is_key(x):
            return x
        return jax.vmap(lambda key: jax.random.fold_in(key_for("again", key), number))(x.reshape(-1)).reshape(x.shape)

    return jax.tree.map(fold, state)
