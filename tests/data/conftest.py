import numpy as np
import pytest

from msrl_jax.data import Dataset


@pytest.fixture(scope="session")
def walk():
    """Five episodes of 3, 1, 4, 2 and 2 rows, the last one cut short; `obs[:, 0]` counts rows, `obs[:, 1]` episodes."""
    lengths = [3, 1, 4, 2, 2]
    episode = np.repeat(np.arange(5), lengths)
    rows, last = np.arange(12), np.cumsum(lengths) - 1
    obs = np.stack([rows, episode], 1).astype(np.float32)
    next_obs = np.concatenate([obs[1:], [[12, 5]]]).astype(np.float32)
    next_obs[last] = [[100 + i, i] for i in range(5)]
    ends = np.isin(rows, last)
    return Dataset(
        obs, rows % 2, np.arange(12) / 10, ends & (episode < 3), np.isin(rows, last[3:4]), next_obs, about={"env": "Walk"}
    )
