"""Off-policy algorithms swing the pendulum up with their defaults, within the steps they should need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import algorithms, envs
from msrl_jax.algorithms import counted

pytestmark = pytest.mark.slow


TQC = {"returns": "tqc:10", "num_updates": 8, "hidden_sizes": (64, 64)}


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [("sac", {}, 20_000), ("td3", {"hidden_sizes": (64, 64)}, 50_000), ("sac", TQC, 50_000)], ids=["sac", "td3", "tqc"],
)  # fmt: skip
def test_the_pendulum_swings_up_on_all_of_five_seeds(name, options, steps):
    """The mean return of the episodes that end in the last tenth, exploration included; SAC makes the most updates a step."""
    single = algorithms.build(algorithms.make(name, options), envs.make("Pendulum-v1"))
    length = steps // single.steps_per_iteration
    agent = counted(single, length)
    train = jax.vmap(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=length)[1])
    keys = jnp.stack([jax.random.key(seed) for seed in range(5)])
    episodes = jax.jit(train)(keys)["episode_return"][:, -(length // 10) :]
    assert (np.asarray(episodes.mean(axis=1)) > -200).all()


def test_with_batch_normalization_it_swings_up_within_20000_steps():
    """The same after 20,000 steps, with the settings of the page on algorithms, one seed after another."""
    config = algorithms.SAC(batch_norm=True, tau=0.01, optimizer="adam:b1=0.5", hidden_sizes=(64, 64))
    single = algorithms.build(config, envs.make("Pendulum-v1"))
    length = 20_000 // single.steps_per_iteration
    agent = counted(single, length)
    train = jax.jit(lambda key: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), None, length=length)[1])
    for seed in range(5):
        episodes = train(jax.random.key(seed))["episode_return"][-(length // 10) :]
        assert episodes.mean() > -200
