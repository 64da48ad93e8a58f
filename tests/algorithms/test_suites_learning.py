"""Learning in environments of suites; thresholds are far above random play and below what every seed reached."""

import pytest

import msrl_jax as msrl

pytestmark = pytest.mark.slow

MUJOCO = {
    "num_envs": 16, "unroll_length": 128, "num_epochs": 10, "num_minibatches": 32, "learning_rate": 3e-4,
    "anneal_learning_rate": True, "normalize_observations": True, "normalize_rewards": True,
}  # fmt: skip


def test_ppo_runs_with_gymnasiums_half_cheetah():
    result = msrl.train(
        "ppo", "gymnasium:HalfCheetah-v5", policy="MultiLearner:num_devices=1", total_steps=1_000_000, progress=False, **MUJOCO
    )
    assert result.evaluate(8).mean_return > 1500


def test_ppo_survives_longer_in_craftax():
    result = msrl.train("ppo", "craftax:Craftax-Classic-Symbolic-v1", num_envs=64, total_steps=500_000, progress=False)
    returns = result.history["episode_return"]
    assert returns[0] < 1.5 and returns[-1] > 3.5
