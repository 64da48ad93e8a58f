"""Data sets: episodes and gaps, files, checks against environments, and errors."""

import dataclasses

import jax
import numpy as np
import pytest

from msrl_jax import data, envs
from msrl_jax.data.dataset import FIELDS, from_lanes
from tests.support.transitions import same


def test_episodes_and_the_cut_at_the_end(walk):
    assert len(walk) == 12 and walk.truncated.nonzero()[0].tolist() == [9, 11]
    start, length, returns = walk.episodes
    assert start.tolist() == [0, 3, 4, 8, 10] and length.tolist() == [3, 1, 4, 2, 2]
    np.testing.assert_allclose(returns, [0.3, 0.3, 2.2, 1.7, 2.1], rtol=1e-6)
    assert "12 rows, 4 whole episodes of Walk: return 1.13 ± 0.844" in repr(walk)
    assert walk.describe() == {"rows": 12, "episodes": 4, "cut_episodes": 1, "mean_return": pytest.approx(1.125), "env": "Walk"}


def test_rows_that_do_not_follow_each_other_are_cut(walk):
    part = walk.select(np.array([4, 5, 7, 0, 1]))
    assert part.truncated.tolist() == [False, True, False, False, True]
    assert part.terminated.tolist() == [False, False, True, False, False]
    assert data.concatenate([walk.select(slice(0, 2)), walk.select(slice(2, 6))]).truncated.nonzero()[0].tolist() == [1, 5]


def test_a_split_is_by_whole_episodes(walk):
    training, validation = walk.split(0.4, seed=3)
    whose = [set(part.obs[:, 1]) for part in (training, validation)]
    assert len(whose[1]) == 2 and whose[0] | whose[1] == set(range(5)) and not whose[0] & whose[1]
    assert sorted(np.concatenate([training.obs[:, 0], validation.obs[:, 0]])) == list(range(12))
    assert training.truncated.sum() + validation.truncated.sum() == 2
    same(walk.split(0.4, seed=3)[1], validation)
    assert any(set(walk.split(0.4, seed=s)[1].obs[:, 1]) != whose[1] for s in range(5))
    with pytest.raises(ValueError, match=r"fraction=1\.5"):
        walk.split(1.5)
    with pytest.raises(ValueError, match="single episode"):
        walk.select(slice(0, 3)).split(0.5)


def test_masked_arrays_are_refused(walk):
    with pytest.raises(ValueError, match="reward of a data set is a masked array; remove the masked rows"):
        dataclasses.replace(walk, reward=np.ma.masked_array(walk.reward, mask=True))


def test_npz_gives_back_the_same(walk, tmp_path):
    path = data.save(walk, tmp_path / "some" / "walk.npz")
    same(data.load(str(path)), walk)
    assert [p.name for p in path.parent.iterdir()] == ["walk.npz"]
    assert data.load(walk) is walk


def test_files_without_parts_have_one_array_for_each_field(walk, tmp_path):
    """As they have always had, so that older files are read, and newer ones by older versions."""
    arrays = {name: getattr(walk, name) for name in FIELDS} | {"cut": walk.cut}
    np.savez(tmp_path / "old.npz", **arrays, about=np.array('{"env": "Walk"}'))
    same(data.load(tmp_path / "old.npz"), walk)
    with np.load(data.save(walk, tmp_path / "new.npz")) as file:
        assert file.files == [*FIELDS, "cut", "about"]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "the file .*walk.npz does not exist"),
        (lambda path: path.write_bytes(b"PK\x03\x04 and no more"), "walk.npz is not an npz file of numbers, or it is damaged"),
        (lambda path: path.write_text("{}"), "walk.npz is not an npz file of numbers, or it is damaged"),
        (lambda path: np.savez(path, obs=np.ones(3), rewards=np.ones(3)), "no action, reward, .*; a data set has obs, "),
        (lambda path: np.savez(path, **dict.fromkeys(FIELDS, np.array([{}], object))), "not an npz file of numbers"),
    ],
)
def test_files_that_are_no_data_set_say_so(write, message, tmp_path):
    write(tmp_path / "walk.npz")
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "walk.npz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.ones(11)}, r"reward of a data set is float32\[11\], but obs is float32\[12, 2\].*shape \[12\]"),
        ({"next_obs": np.ones((12, 3), np.float32)}, r"next_obs of a data set is float32\[12, 3\]"),
        ({"next_obs": np.ones((12, 2))}, "next_obs of a data set is float64, but obs is float32"),
        ({"terminated": np.full(12, 2)}, "terminated .* other than 0 and 1"),
        ({"action": np.array(["left"] * 12)}, "action .* is not numeric"),
        ({name: np.ones((0, 2)) for name in FIELDS}, "at least one row"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(walk, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(walk, **change)


class Plane:
    """Only its spaces matter."""

    name = "Plane"
    observation_space = envs.Box(0, 200, (2,))
    action_space = envs.Discrete(2)


def test_spaces_that_fit_give_their_dtypes(walk):
    fitting = data.check_spaces(walk, Plane())
    assert fitting.action.dtype == np.int32 and fitting.obs.dtype == np.float32 and fitting.about == walk.about
    rounded = dataclasses.replace(walk, next_obs=walk.next_obs * np.float32(1 + 1e-6))
    data.check_spaces(rounded, Plane())


@pytest.mark.parametrize(
    ("spaces", "change", "message"),
    [
        ({"observation_space": envs.Box(0, 200, (3,))}, {}, r"obs of the data set has shape \[2\] .* of Plane .* shape \[3\]"),
        ({"observation_space": envs.Box(0, 50, (2,))}, {}, r"next_obs .* is outside the .*: it has 100 in row 2 and in 4 more"),
        ({"observation_space": envs.Box(0, 200, (2,), np.int32)}, {}, "obs of the data set is float32, but .* of int32"),
        ({"action_space": envs.Discrete(1)}, {}, "action .* is outside the .*Plane.* has 1 in row 1 and in 5 more"),
        ({"action_space": envs.Box(-1, 1, (1,))}, {}, r"action of the data set has shape \[\] .* shape \[1\]"),
        ({}, {"action": np.full(12, 0.5)}, "action of the data set is float64, but the action_space of Plane is Discrete"),
        ({}, {"obs": np.full((12, 2), np.inf, np.float32)}, "obs of the data set is not finite in float32 in row 0 and in 11 "),
        (
            {"observation_space": envs.Box(-np.inf, np.inf, (2,))},
            {name: np.where(np.arange(12)[:, None] == 3, 1e300, np.zeros((12, 2))) for name in ("obs", "next_obs")},
            "obs of the data set is not finite in float32 in row 3; remove",
        ),
    ],
)
def test_spaces_that_differ_say_how(walk, spaces, change, message):
    env = type("Other", (Plane,), spaces)()
    with pytest.raises(ValueError, match=message):
        data.check_spaces(dataclasses.replace(walk, **change), env)


def test_observations_may_leave_the_space_that_their_own_environment_declares(walk):
    env = type("Other", (Plane,), {"observation_space": envs.Box(0, 50, (2,))})()
    about = {"observation_space": str(env.observation_space)}
    data.check_spaces(dataclasses.replace(walk, about=about), env)
    with pytest.raises(ValueError, match=r"next_obs .* has 100 in row 2"):
        data.check_spaces(dataclasses.replace(walk, about={"observation_space": "Box(0, 60, (2,))"}), env)
    with pytest.raises(ValueError, match=r"action .* has 7 in row 0"):
        data.check_spaces(dataclasses.replace(walk, about=about, action=np.full(12, 7)), env)


@pytest.mark.parametrize("n", [1, 3])
def test_the_buffer_gives_the_n_step_transitions_of_every_row(walk, n):
    """Against a fold by hand of each lane of 5 rows; two rows are left out."""
    shards, discount = 2, 0.5
    buffer, state = data.buffer(walk, batch_size=8, length=n, discount=discount, shards=shards)
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(state))
    assert buffer.ready(state) and buffer.size(state) == shards * (6 - n + 1)
    samples = jax.device_get(jax.jit(jax.vmap(buffer.sample, (None, 0)))(state, jax.random.split(jax.random.key(0), 20)))
    seen = {}
    for draw in range(20):
        for i in range(8):
            seen[int(samples.experience.obs[draw, i, 0])] = [x[draw, i] for x in samples.experience]
    assert set(seen) == {lane * 6 + step for lane in range(2) for step in range(6 - n + 1)}
    for row, (obs, action, reward, weight, next_obs) in seen.items():
        total, factor, end = 0.0, 1.0, row
        for end in range(row, row + n):
            total, factor = total + factor * walk.reward[end], factor * discount
            if walk.terminated[end] or walk.truncated[end] or end % 6 == 5:
                break
        np.testing.assert_allclose(reward, total, rtol=1e-6)
        assert weight == (0 if walk.terminated[end] else factor) and action == walk.action[row]
        np.testing.assert_array_equal(next_obs, walk.next_obs[end])
        np.testing.assert_array_equal(obs, walk.obs[row])


def test_a_batch_comes_in_equal_parts_from_every_lane(walk):
    buffer, state = data.buffer(walk, batch_size=8, shards=4)
    env = buffer.sample(state, jax.random.key(1)).indices.env
    assert np.asarray(env).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_buffer_needs_enough_rows(walk):
    with pytest.raises(ValueError, match=r"12 rows, 6 in each of shards=2: fewer than batch_size=16 windows of 1 steps"):
        data.buffer(walk, batch_size=16, shards=2)
    with pytest.raises(ValueError, match="windows of 13 steps"):
        data.buffer(walk, batch_size=1, length=13)


def test_one_row_is_a_data_set():
    one = data.Dataset(np.zeros((1, 4), np.float32), [0], [2.0], [True], [False], np.ones((1, 4), np.float32))
    assert len(one) == 1 and one.episodes.returns.tolist() == [2.0] and "1 whole episode: return 2" in repr(one)


@pytest.mark.parametrize("name", ["rows.npz", "rows.parquet"])
def test_parts_of_episodes_are_not_reported_as_episodes(name, tmp_path):
    """Two environments of five steps: the first ends an episode of three by a limit, the second ends none."""
    rows = {
        "obs": np.arange(10.0).reshape(5, 2),
        "action": np.zeros((5, 2), int),
        "reward": np.ones((5, 2), np.float32),
        "terminated": np.zeros((5, 2), bool),
        "truncated": np.array([[0, 0], [0, 0], [1, 0], [0, 0], [0, 0]], bool),
        "next_obs": np.arange(2.0, 12.0).reshape(5, 2),
    }
    made = from_lanes(rows, {})
    for dataset in (made, data.load(data.save(made, tmp_path / name)), data.concatenate([made])):
        assert dataset.episodes.length.tolist() == [3, 2, 5] and dataset.cut.nonzero()[0].tolist() == [4, 9]
        assert dataset.truncated.tolist() == [False, False, True, False, True] + [False] * 4 + [True]
        assert {"episodes": 1, "cut_episodes": 2, "mean_return": 3.0}.items() <= dataset.describe().items()
        assert str(dataset) == "Dataset(10 rows, 1 whole episode: return 3.00 ± 0, and parts of 2 more)"
    parts = made.select(slice(5, 10))
    assert str(parts) == "Dataset(5 rows, 0 whole episodes, and parts of 1 more)"
    assert np.isnan(parts.describe()["mean_return"])
