"""Several agents learn with the defaults, over three seeds; JaxMARL's baselines with their own configs are the measure.

Returns are sums over the agents. Those of JaxMARL 0.2.0 after 1,000,000 steps of simple_spread, which its configs train for
10,000,000: IPPO -70 to -73, MAPPO with a GRU -46, VDN -47, QMIX -54.
"""

import numpy as np
import pytest

import msrl_jax as msrl

pytestmark = pytest.mark.slow

SPREAD, TAG = "jaxmarl:MPE_simple_spread_v3", "jaxmarl:MPE_simple_tag_v3"


def evaluation(algo, env, total_steps, **options):
    """Greedy episodes of three members."""
    played = msrl.train(algo, env, total_steps=total_steps, seeds=3, eval_episodes=512, progress=False, **options).evaluation
    assert played is not None
    return played


@pytest.mark.parametrize(("algo", "least"), [("ippo", -50), ("mappo", -47), ("vdn", -41), ("qmix", -41)])
def test_simple_spread(algo, least):
    assert np.min(evaluation(algo, SPREAD, 1_000_000).mean_return) > least


@pytest.mark.parametrize(
    ("adversary", "agent", "caught"),
    [("mappo", "random", (170, 300)), ("mappo", "ippo", (50, 150)), ("random", "ippo", (0, 20))],
)
def test_simple_tag(adversary, agent, caught):
    """The predators' return: 30 for each time that one catches the prey, which learns to get away, and is caught by chance."""
    teams = evaluation("teams", TAG, 1_000_000, teams={"adversary": adversary, "agent": agent}).team_returns
    returns = teams["adversary"].mean(-1)
    assert caught[0] < returns.min() and returns.max() < caught[1]


def test_three_marines_beat_three():
    """SMAX pays each of three marines 1 for a win, and up to 1 for damage."""
    options = {"core": "gru", "num_envs": 64, "unroll_length": 64, "learning_rate": 2e-3}
    played = evaluation("mappo", "jaxmarl:HeuristicEnemySMAX:scenario=3m", 400_000, **options)
    assert np.min(played.mean_return) > 4.5
