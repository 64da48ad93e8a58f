"""Keys for purposes beside training."""

import jax
import numpy as np

from msrl_jax.fragments.support.random_keys import key_for

PURPOSES = ("again", "best agents", "data", "evaluation", "goals", "parameters", "play", "video")


def test_no_key_for_a_purpose_is_one_that_training_may_split_off():
    key = jax.random.key(3)
    keys = [jax.random.key_data(k).reshape(-1, 2) for k in (key, jax.random.fold_in(key, 1), jax.random.split(key, 2**17))]
    keys = np.ascontiguousarray(np.concatenate(keys)).view(np.uint64)
    others = np.stack([jax.random.key_data(key_for(purpose, key)) for purpose in PURPOSES]).view(np.uint64)
    assert len(np.unique(others)) == len(PURPOSES) and not np.isin(others, keys).any()
