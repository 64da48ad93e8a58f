"""Recordings of several agents: a row is a step of one environment, and the run is the same as without."""

import dataclasses

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import data, envs
from msrl_jax.data.dataset import OPTIONAL
from tests.support.leaving import Leaving
from tests.support.transitions import same

LIMIT, LEAVE = 4, np.array([1, 3, 9])
ENV = Leaving(leave=(1, 3, 9), limit=LIMIT)
ON_POLICY = {"num_envs": 4, "unroll_length": 6, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (4,)}
OFF_POLICY = {
    "num_envs": 4,
    "unroll_length": 6,
    "hidden_sizes": (4,),
    "core": None,
    "mixing_size": 4,
    "hyper_size": 4,
    "trace_length": 2,
    "batch_size": 4,
    "num_updates": 1,
    "replay.capacity": 96,
    "replay.learning_starts": 24,
    "exploration.steps": 60,
}
CONFIGS = {
    "ippo": ON_POLICY,
    "mappo": ON_POLICY,
    "qmix": OFF_POLICY,
    "teams": {"num_envs": 4, "unroll_length": 6, "teams": {"one": "random", "others": "ippo:agents=t*,num_minibatches=2"}},
}


def train(algo, iterations=5, policy="GPUOnly", devices=1, env=ENV, **options):
    return msrl.train(
        algo,
        env,
        policy=policy,
        total_steps=iterations * 24,
        seed=3,
        chunk=2,
        eval_episodes=0,
        progress=False,
        devices=jax.devices()[:devices],
        **CONFIGS[algo],
        **options,
    )


def by_hand(dataset):
    """Compares every row with what `Leaving` says of its time and actions, and rows with their successors."""
    time = dataset.obs[:, 0, 0].astype(int)
    absent = time[:, None] >= LEAVE
    agents = np.broadcast_to(np.arange(3), absent.shape)
    np.testing.assert_array_equal(dataset.obs, np.stack([np.broadcast_to(time[:, None], absent.shape), agents], -1))
    np.testing.assert_array_equal(dataset.next_obs, np.stack([np.broadcast_to(time[:, None] + 1, absent.shape), agents], -1))
    np.testing.assert_array_equal(dataset.valid, ~absent)
    np.testing.assert_array_equal(dataset.reward, np.where(absent, 0, dataset.action + 1))
    np.testing.assert_array_equal(dataset.terminated, time[:, None] + 1 >= LEAVE)
    np.testing.assert_array_equal(dataset.truncated & ~dataset.cut, time + 1 == LIMIT)
    legal = lambda time, gone: (np.arange(4) < 3) | (time[:, None, None] % 2 == 0) | gone[..., None]
    np.testing.assert_array_equal(dataset.action_mask, legal(time, absent))
    np.testing.assert_array_equal(dataset.next_action_mask, legal(time + 1, dataset.terminated))
    assert np.take_along_axis(dataset.action_mask, dataset.action[..., None], -1).all()
    start, length, returns = dataset.episodes
    assert (time[start] == 0).all() and length.max() == LIMIT
    assert (time[1:] == np.where(dataset.ended[:-1], 0, time[:-1] + 1)).all()
    np.testing.assert_array_equal(returns, [dataset.reward[a : a + n].sum(0) for a, n in zip(start, length, strict=True)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of MAPPO of 5 iterations in chunks of 2, 2 and 1, and what it recorded."""
    folder = tmp_path_factory.mktemp("recorded")
    return train("mappo", record=folder / "run.npz", out=folder / "run"), folder / "run.npz"


@pytest.fixture(scope="module")
def rows(recorded):
    return data.load(recorded[1])


def test_every_step_of_all_agents_is_recorded(rows):
    assert len(rows) == 5 * 24 and rows.has_agents and rows.about["agents"] == ["one", "two", "three"]
    by_hand(rows)
    whole = ~rows.cut[rows.episodes.start + rows.episodes.length - 1]
    assert rows.describe()["mean_return"] == rows.episodes.returns[whole].sum(1).mean()
    assert rows.describe()["cut_episodes"] == 4 and ", 3 agents: return " in repr(rows)
    training, validation = rows.split(0.25)
    assert len(training) + len(validation) == len(rows) and (validation.obs[validation.episodes.start, :, 0] == 0).all()
    data.check_spaces(rows, ENV)  # type: ignore[arg-type]


@pytest.mark.long
def test_a_trained_team_is_recorded(recorded, tmp_path):
    result = msrl.Result.load(recorded[1].parent / "run", env=ENV)  # type: ignore[arg-type]
    greedy = data.record(result, 41, tmp_path / "greedy.npz", epsilon=0, num_envs=4)
    by_hand(greedy)
    chosen = result.act(msrl.envs.MaskedObservation(greedy.obs, greedy.action_mask))
    np.testing.assert_array_equal(greedy.action, chosen)
    assert result.evaluate(4).mean_return == greedy.describe()["mean_return"]
    half = data.record(result, 3000, epsilon=0.5)
    by_hand(half)
    chosen = np.asarray(result.act(msrl.envs.MaskedObservation(half.obs, half.action_mask)))
    # Of the random actions, 1 of 3 or 1 of 4 is the greedy one. Every agent explores by itself.
    differs = (half.action != chosen) & half.valid
    odds = 0.5 * (1 - 1 / half.action_mask.sum(-1))
    spread = np.sqrt((odds * (1 - odds))[half.valid].sum())
    assert abs(differs.sum() - odds[half.valid].sum()) < 4 * spread
    both = half.valid[:, 1] & half.valid[:, 2]
    assert abs(np.corrcoef(differs[both, 1], differs[both, 2])[0, 1]) < 4 / np.sqrt(both.sum())


@pytest.mark.parametrize("suffix", ["npz", "parquet"])
def test_files_give_back_the_same(rows, suffix, tmp_path):
    loaded = data.load(data.save(rows, tmp_path / f"some.{suffix}"))
    same(loaded, rows)
    for name in OPTIONAL:
        np.testing.assert_array_equal(getattr(loaded, name), getattr(rows, name))
    assert loaded.fingerprint() == rows.fingerprint() and loaded.episodes.returns.shape[1] == 3


def test_gaps_and_ends_of_several_agents(rows):
    assert not rows.terminated.all(1).any()  # the third agent never leaves
    some = rows.select(np.array([0, 1, 3, 2]))  # the fourth row is the third step
    np.testing.assert_array_equal(some.cut, [False, True, False, True])
    np.testing.assert_array_equal(some.ended, [False, True, True, True])
    gone = dataclasses.replace(some, terminated=np.ones((4, 3), bool), truncated=np.zeros(4), cut=None)
    assert gone.ended.all() and not gone.cut.any() and not gone.truncated.any()
    twice = data.concatenate([rows, rows])
    np.testing.assert_array_equal(twice.valid, np.concatenate([rows.valid, rows.valid]))


def test_learning_from_data_of_several_agents_is_refused(rows, walk):
    facts = "reward of the data set is of 3 agents, and CartPole-v1 has one agent; use the environment that the data set"
    for algo in ("bc", "dqn"):
        with pytest.raises(ValueError, match=facts):
            msrl.train(algo, "CartPole-v1", data=rows)
    with pytest.raises(ValueError, match=r"are steps of 3 agents \(it has the field valid\), but a data set buffer needs"):
        data.buffer(rows, batch_size=4)
    with pytest.raises(ValueError, match="reward of the data set is of one agent, and Leaving has 3 agents"):
        data.check_spaces(walk, ENV)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="only one of the first data set and number 2 has valid"):
        data.concatenate([dataclasses.replace(rows, action_mask=None, next_action_mask=None), walk])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"valid": None}, r"reward of a data set is float32\[120, 3\].* shape \[120\], or valid too if there are several"),
        ({"valid": np.ones((120, 2))}, r"valid of a data set is bool\[120, 2\].* an entry per agent.*\[120, 3\]"),
        ({"terminated": np.ones(120)}, r"terminated of a data set is bool\[120\].* so pass terminated with shape \[120, 3\]"),
        ({"truncated": np.ones((120, 3))}, r"truncated of a data set is bool\[120, 3\].* pass truncated with shape \[120\]"),
        ({"action": np.ones(120)}, r"action of a data set is float64\[120\].* pass action with shape \[120, 3\]"),
        ({"valid": np.full((120, 3), 2)}, r"valid of a data set is .* with values other than 0 and 1"),
    ],
)
def test_arrays_that_do_not_fit_say_which(rows, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(rows, **{"action_mask": None, "next_action_mask": None} | change)


class Parted:
    """`Leaving` with observations of two parts."""

    agents, action_space = ENV.agents, ENV.action_space
    observation_space = envs.Dict({"time": envs.Box(0, np.inf, ()), "who": envs.Box(0, np.inf, ())})

    def reset(self, key):
        state, obs = ENV.reset(key)
        return state, self.split(obs)

    def step(self, key, state, action):
        state, obs, *outcome = ENV.step(key, state, action)
        return state, self.split(obs), *outcome

    def action_mask(self, state):
        return ENV.action_mask(state)

    @staticmethod
    def split(obs):
        return {"time": obs[:, 0], "who": obs[:, 1]}
