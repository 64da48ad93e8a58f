"""Parquet files, Minari data sets and RLDS episodes give the same data sets; errors name the problem."""

import dataclasses
import gc
import importlib
import json
import shutil
import tracemalloc
import warnings

import gymnasium
import h5py
import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msrl_jax import data, envs
from msrl_jax.cli import main
from msrl_jax.data.formats import read_parts
from tests.support.transitions import same


@pytest.fixture
def images():
    rng = np.random.default_rng(0)
    obs = rng.integers(0, 255, (6, 4, 3, 2)).astype(np.uint8)
    action = rng.normal(size=(5, 2)).astype(np.float16)
    return data.Dataset(obs[:-1], action, np.arange(5), np.zeros(5), np.zeros(5), obs[1:], about={"env": "Images", "seed": 1})


def test_parquet_gives_back_the_same(walk, images, tmp_path):
    for dataset in (walk, images):
        path = data.save(dataset, tmp_path / "some.parquet")
        same(data.load(path), dataset)
    columns = pq.read_table(path).to_pydict()
    assert list(columns) == ["obs", "action", "reward", "terminated", "truncated", "next_obs"]
    np.testing.assert_array_equal(columns["obs"], images.obs.reshape(5, -1))


def test_parquet_of_others_is_read(walk, tmp_path):
    """Lists of any length, a column that means nothing here, several groups of rows, no metadata of ours."""
    columns = {name: list(getattr(walk, name)) for name in data.dataset.FIELDS} | {"note": ["x"] * 12}
    pq.write_table(pa.table(columns), tmp_path / "other.parquet", row_group_size=5)
    same(data.load(tmp_path / "other.parquet"), dataclasses.replace(walk, about={}))
    nested = {name: getattr(walk, name) for name in data.dataset.FIELDS if "obs" not in name}
    nested |= {name: [[row.tolist()] for row in getattr(walk, name)] for name in ("obs", "next_obs")}
    pq.write_table(pa.table(nested), tmp_path / "nested.parquet")
    assert data.load(tmp_path / "nested.parquet").obs.shape == (12, 1, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("next_obs"), r"has no next_obs; a data set has obs, .* and the file action, obs, "),
        (lambda c: c["obs"].__setitem__(3, [1.0]), "column obs of .* has lists of 2 different lengths"),
        (lambda c: c["reward"].__setitem__(3, None), "column reward of .* has 1 empty cells"),
        (lambda c: c.__setitem__("action", ["left"] * 12), "action of a data set is .* is not numeric"),
    ],
)
def test_parquet_that_is_no_data_set_says_so(walk, change, message, tmp_path):
    columns = {name: getattr(walk, name).tolist() for name in data.dataset.FIELDS}
    change(columns)
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=message):
        data.load(tmp_path / "bad.parquet")


def episodes_of(dataset):
    start, length, _ = dataset.episodes
    for a, n in zip(start, length, strict=True):
        rows = slice(a, a + n)
        yield {
            "observations": np.concatenate([dataset.obs[rows], dataset.next_obs[a + n - 1 : a + n]]),
            "actions": dataset.action[rows],
            "rewards": dataset.reward[rows],
            "terminations": dataset.terminated[rows],
            "truncations": dataset.truncated[rows],
        }


def test_episodes_with_a_trailing_observation_become_rows(walk):
    same(data.from_episodes(episodes_of(walk), about=walk.about), walk)


def test_episodes_of_rlds_have_a_last_step_that_means_nothing(walk):
    def rlds(episode):
        pad = lambda x: np.append(x, x[:1])
        terminal = np.append(np.zeros(len(episode["rewards"]), bool), episode["terminations"][-1])
        return {
            "observation": episode["observations"],
            "action": pad(episode["actions"]),
            "reward": pad(episode["rewards"]),
            "is_terminal": terminal,
            "is_first": terminal,
            "discount": terminal,
        }

    episodes = list(map(rlds, episodes_of(walk)))
    one_by_one = [[{name: x[i] for name, x in e.items()} for i in range(len(e["reward"]))] for e in episodes]
    for given in (episodes, [{"steps": e} for e in episodes], [{"steps": steps} for steps in one_by_one]):
        same(data.from_episodes(given, about=walk.about), walk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": np.ones(5)}, r"reward of episode 1 has shape \[5\], but there are 2 observations; .*\[1 or 2, ...\]"),
        ({"rewards": np.ones((1, 3))}, r"reward of episode 1 has shape \[1, 3\]; .* have one agent, .* valid"),
        ({"observations": np.ones((1, 2))}, "episode 1 has 1 observations"),
        ({"observations": {"a": np.ones(2)}}, "only some of the episodes 0 to 1 have next_obs"),
        ({"actions": {"a": np.ones(1)}}, "actions of episode 1 is a dict of arrays"),
        ({"actions": None}, "episode 1 has no action or actions; it has observations, rewards"),
        ({"observations": np.ones((2, 2))}, "float32.* in some episodes and float64.* in others"),
    ],
)
def test_episodes_that_do_not_fit_say_which(walk, change, message):
    episodes = list(episodes_of(walk))
    episodes[1] = {name: x for name, x in (episodes[1] | change).items() if x is not None}
    with pytest.raises(ValueError, match=message):
        data.from_episodes(episodes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no episode was given"),
        ({"observation": np.zeros((2, 1))}, "episode 0 is 'observation'; pass a list of episodes, each a dict of arrays"),
        ([{"steps": [1, 2]}], r"steps of episode 0 are \[1, 2\]; pass a dict of arrays, or a list of dicts"),
    ],
)
def test_what_is_no_list_of_episodes_says_so(given, message):
    with pytest.raises(ValueError, match=message):
        data.from_episodes(given)


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Three episodes of a gymnasium environment in a Minari data set, and its steps as they were taken."""
    root = tmp_path_factory.mktemp("minari")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("MINARI_DATASETS_PATH", str(root))
        env = minari.DataCollector(gymnasium.make("CartPole-v1", max_episode_steps=15))
        env.action_space.seed(0)
        rows = []
        for seed in range(3):
            obs, _ = env.reset(seed=seed)
            done = False
            while not done:
                action = 1 if seed == 2 else env.action_space.sample()
                next_obs, reward, terminated, truncated, _ = env.step(action)
                rows.append((obs, action, reward, terminated, truncated, next_obs))
                obs, done = next_obs, terminated or truncated
        env.create_dataset("cartpole/some-v0")
        env.close()
        del env
        gc.collect()  # here, where warnings of what it leaves open are ignored
    return root, [np.array(x) for x in zip(*rows, strict=True)]


@pytest.mark.parametrize("how", ["folder", "data folder", "id"])
def test_a_minari_data_set_is_read(how, collected, monkeypatch):
    root, rows = collected
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    folder = root / "cartpole" / "some-v0"
    dataset = data.load({"folder": folder, "data folder": folder / "data", "id": "cartpole/some-v0"}[how])
    for name, x in zip(data.dataset.FIELDS, rows, strict=True):
        np.testing.assert_array_equal(getattr(dataset, name), x, err_msg=name)
    assert len(dataset.episodes.start) == 3 and dataset.terminated.any()
    assert dataset.about["env"] == "CartPole-v1" and dataset.about["made_by"] == "Minari data set cartpole/some-v0"
    assert data.check_spaces(dataset, envs.make("CartPole-v1")).action.dtype == np.int32


@pytest.fixture
def copied(collected, tmp_path):
    """The folder of a copy of that data set, to be changed."""
    return shutil.copytree(collected[0] / "cartpole" / "some-v0" / "data", tmp_path / "data")


@pytest.mark.parametrize("how", ["storage", "link", "group", "virtual"])
def test_a_minari_data_set_does_not_read_other_files(how, copied, tmp_path):
    raw, other, name = str(tmp_path / "raw"), str(tmp_path / "other.hdf5"), "episode_2/rewards"
    with h5py.File(copied / "main_data.hdf5", "a") as file, h5py.File(other, "w") as secret:
        file.copy("episode_2", secret)
        rewards = file[name][:]
        (tmp_path / "raw").write_bytes(rewards.tobytes())
        layout = h5py.VirtualLayout(rewards.shape, rewards.dtype)
        layout[:] = h5py.VirtualSource(other, name, rewards.shape)
        del file[name if how != "group" else "episode_2"]
        if how == "storage":
            file.create_dataset(name, rewards.shape, rewards.dtype, external=[(raw, 0, rewards.nbytes)])
        elif how == "virtual":
            file.create_virtual_dataset(name, layout)
        elif how == "link":
            file[name] = h5py.ExternalLink(other, name)
        else:
            file["episode_2"] = h5py.ExternalLink(other, "episode_2")
    with pytest.raises(ValueError, match=r"episode_2(/rewards)? of .*main_data\.hdf5 is stored in another file; copy the data"):
        data.load(copied)


@pytest.mark.parametrize("space", ["observation_space", "action_space"])
def test_a_minari_data_set_runs_no_code(space, copied):
    """Without one of its spaces, Minari makes the environment of the data set, which here is a shell command."""
    run = copied.parent / "run"
    spec = {"id": "any-v0", "entry_point": "os:system", "kwargs": {"command": f"touch {run}"}, "additional_wrappers": []}
    about = json.loads((copied / "metadata.json").read_text()) | {"env_spec": json.dumps(spec)}
    del about[space]
    (copied / "metadata.json").write_text(json.dumps(about))
    with pytest.raises(ValueError, match=rf"metadata\.json has no {space}, so Minari would make .*data\.from_episodes"):
        data.load(copied)
    assert not run.exists()


@pytest.mark.parametrize(("source", "package"), [("x.parquet", "pyarrow"), ("some/where-v3", "minari")])
def test_a_missing_package_is_named_with_the_remedy(source, package, tmp_path, monkeypatch, capsys):
    def without(name, *args, **kwargs):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return real(name, *args, **kwargs)

    real = importlib.import_module
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.parquet").touch()
    monkeypatch.setattr("importlib.import_module", without)
    with pytest.raises(ImportError, match=rf"needs the package '{package}'; install it with: pip install 'msrl-jax\[data\]'"):
        data.load(source)
    assert main(["explain", "--algo", "dqn", "--data", source]) == 2
    assert f"'{package}'" in capsys.readouterr().err


def test_parts_of_a_recording_are_joined_field_by_field(tmp_path):
    """The memory of the data, and that of one field more."""
    rows, rng = (10, 16), np.random.default_rng(0)
    for number in range(20):
        obs, none = rng.random((*rows, 50), np.float32), np.zeros(rows, bool)
        fields = {"obs": obs, "action": obs[..., 0], "reward": obs[..., 1], "terminated": none, "truncated": none}
        np.savez(tmp_path / f"part-{number:06d}.npz", **fields, next_obs=obs)
    (tmp_path / "about.json").write_text("{}")
    tracemalloc.start()
    joined = read_parts(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(joined) == 20 * 160 and peak < 2 * sum(x.nbytes for x in joined.columns.values())
