"""Off-policy algorithms swing the pendulum up with their defaults, within the steps they should need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms, envs
from msrl_jax.algorithms import counted

pytestmark = pytest.mark.slow


TQC = {"distribution": "qr", "num_atoms": 10, "num_updates": 8, "hidden_sizes": (64, 64)}
CROSSQ = {"batch_norm": True, "tau": 0.01, "optimizer": "adam:b1=0.5", "hidden_sizes": (64, 64)}


RUNS = {"sac": ("sac", {}), "td3": ("td3", {}), "tqc": ("sac", TQC), "crossq": ("sac", CROSSQ)}


@pytest.mark.parametrize(("name", "options"), RUNS.values(), ids=RUNS)
def test_the_pendulum_swings_up_on_all_of_five_seeds(name, options):
    """The mean return of the episodes that end in the last tenth of 50,000 steps, exploration included."""
    single = algorithms.build(algorithms.get(name)(**options), envs.make("Pendulum-v1"))
    length = 50_000 // single.steps_per_iteration
    agent = counted(single, length)
    train = jax.vmap(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=length)[1])
    keys = jnp.stack([jax.random.key(seed) for seed in range(5)])
    episodes = jax.jit(train)(keys)["episode_return"][:, -(length // 10) :]
    assert (np.asarray(episodes.mean(axis=1)) > -200).all()
