"""A run with a replay buffer is long enough to learn, and says how many updates it makes for each environment step."""

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.agents.replay_ratio import replay_ratio
from msrl_jax.run.prepare import make_experiment
from msrl_jax.search.space import rung_steps
from tests.support.many_agents import Homes

SMALL = {
    "num_envs": 4,
    "unroll_length": 4,
    "num_updates": 2,
    "batch_size": 16,
    "replay.capacity": 1024,
    "replay.learning_starts": 100,
}


@pytest.mark.parametrize(
    ("algo", "env", "fields"),
    [
        ("dqn", "CartPole-v1", {}),
        ("r2d2", "CartPole-v1", {"trace_length": 4, "burn_in": 0, "replay.n_step": 1}),
        ("qmix", Homes(), {"trace_length": 4}),
        ("muzero", "CartPole-v1", {"model_steps": 2, "replay.n_step": 2}),
        ("alphazero", "pgx:tic_tac_toe", {}),
    ],
)
def test_a_run_without_an_update_is_refused_before_anything_compiles(algo, env, fields, caplog):
    """Iterations have 16 steps, so the seventh is the first to learn."""
    with jax.log_compiles(), pytest.raises(ValueError, match="total_steps of at least 112, or a smaller learning_starts"):
        msrl.train(algo, env, total_steps=111, progress=False, **SMALL, **fields)
    assert not [r for r in caplog.records if "Finished XLA compilation of jit(initial_state)" in r.getMessage()]


@pytest.mark.long
def test_the_shortest_run_that_is_not_refused_learns_and_goes_on(tmp_path, capfd):
    options = SMALL | {"replay.learning_starts": 112, "eval_episodes": 0, "chunk": 1, "devices": jax.devices()[:1]}
    result = msrl.train("dqn", "CartPole-v1", total_steps=112, out=tmp_path, progress="lines", **options)
    assert np.isnan(result.history["loss"][:-1]).all() and np.isfinite(result.history["loss"][-1])
    assert "replay ratio: 0.125 updates per environment step, of batch_size=16\n" in capfd.readouterr().err
    with pytest.warns(UserWarning, match="rescales the schedule"):
        longer = msrl.train(resume=tmp_path, total_steps=128, progress=False, devices=jax.devices()[:1])
    assert len(longer.history["loss"]) == 8 and np.isfinite(longer.history["loss"][-2:]).all()


def test_the_replay_ratio_of_other_sizes_than_the_defaults_is_said():
    def said(**fields):
        experiment = make_experiment("sac", "Pendulum-v1", **fields)
        return replay_ratio(experiment.agent, experiment.algorithm)

    assert said() == "replay ratio: 0.5 updates per environment step, of batch_size=256"
    assert said(num_envs=1).startswith("replay ratio: 8 updates per environment step, of batch_size=256 (0.5 with the default ")
    assert "num_updates=1 keeps" in said(num_envs=1)
    assert said(num_envs=1, num_updates=2) == "replay ratio: 1 updates per environment step, of batch_size=256"


def test_trials_of_a_sweep_are_compared_after_they_learned():
    assert rung_steps(9000, 3, None, trials=27, min_first=1000) == [1000, 3000, 9000]
    with pytest.raises(ValueError, match=r"first comparison is after 333 .* up to the first update"):
        rung_steps(9000, 3, 333, trials=27, min_first=1000)
    grid = {"method": "grid", "learning_rate": [1e-3, 1e-4], "halving": 3, "min_steps": 64, "total_steps": 512}
    with pytest.raises(ValueError, match=r"first comparison is after 64 .* at least the 100 steps of one iteration"):
        msrl.sweep("dqn", "CartPole-v1", progress=False, **grid, **SMALL)
