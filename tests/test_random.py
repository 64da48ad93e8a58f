"""Keys for purposes beside training."""

import jax
import numpy as np

from msrl_jax._random import key_for

PURPOSES = ("again", "best agents", "data", "evaluation", "goals", "parameters", "play", "video")


def test_no_key_for_a_purpose_is_one_that_training_may_split_off():
    key = jax.random.key(3)
    keys = [*jax.random.split(key, 10_000), *(jax.random.fold_in(key, i) for i in range(8))]
    keys = {tuple(jax.random.key_data(k).tolist()) for k in keys} | {tuple(jax.random.key_data(key).tolist())}
    others = {tuple(np.asarray(jax.random.key_data(key_for(purpose, key))).tolist()) for purpose in PURPOSES}
    assert len(others) == len(PURPOSES) and not others & keys
