"""RL^2 and RL^3: their environments, what is reached by who knows the task, and what is claimed of them."""

import jax
import numpy as np
import pytest

from examples import rl3 as example

pytestmark = pytest.mark.long

STEPS, SEEDS, EPISODES = 500_000, 5, 512


def test_both_see_the_same_but_for_the_values_of_the_model():
    for tasks in (example.mdps(), example.mdps(10, 5, 128), example.bandits()):
        rl2, rl3 = (example.wrapped(tasks, is_rl3) for is_rl3 in (False, True))
        num_states, num_actions = tasks.env.observation_space.n, tasks.env.action_space.n
        assert rl2.observation_space.shape == (num_states + num_actions + 3,)
        assert rl3.observation_space.shape == (num_states + 3 * num_actions + 4,)
        assert rl3.env == rl2


def test_a_known_task_earns_what_backward_induction_says():
    tasks = example.mdps()
    tables = jax.vmap(tasks.learned)(jax.random.split(jax.random.key(0), 40))
    values = []
    for p, r in zip(*(np.asarray(tables[name], np.float64) for name in ("transitions", "rewards")), strict=True):
        v = np.zeros(5)
        for _ in range(8):
            v = (r + p @ v).max(1)
        values.append(v[0] / 8)
    assert example.best(tasks, tasks.learned, 40) == pytest.approx(np.mean(values), rel=1e-5)
    bandits = example.bandits()
    assert example.best(bandits, bandits.learned) == pytest.approx(5 / 6, abs=0.02)


@pytest.mark.slow
def test_rl3_earns_more_than_rl2_late_in_mdps_and_in_others():
    tasks = example.mdps()
    rl2, rl3 = (example.rewards(tasks, is_rl3, SEEDS, STEPS, EPISODES) for is_rl3 in (False, True))
    assert set(rl2) == {"as in training", *tasks.others}
    for name in rl2:
        assert rl3[name][:, 3].min() > rl2[name][:, 3].max(), name
    limit = example.best(tasks, tasks.learned)
    assert (rl3["as in training"][:, 3] < limit).all() and rl2["as in training"][:, 3].mean() > 1.05  # random: 1


@pytest.mark.slow
def test_a_bandit_of_rl2_is_learned_about_as_well_as_one_of_rl3():
    tasks = example.bandits()
    rl2, rl3 = (example.rewards(tasks, is_rl3, SEEDS, STEPS, EPISODES)["as in training"] for is_rl3 in (False, True))
    assert abs(rl3.mean() - rl2.mean()) < 0.05 and rl3[:, 3].mean() > 0.65  # random: 0.5
