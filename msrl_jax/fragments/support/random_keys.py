"""Random keys for purposes other than training."""

import jax


def key_for(purpose: str, key: jax.Array) -> jax.Array:
    """Derives a key for a purpose, such as `"evaluation"`.

    `jax.random.split(key)[i]` is `jax.random.fold_in(key, i)`, so folding in a small number gives a key that training may also
    use. The first four letters are a large number.
    """
    return jax.random.fold_in(key, int.from_bytes(purpose[:4].encode(), "big"))
