"""Data sets of observations of several parts: recorded, saved, loaded and checked like arrays, part by part."""

import dataclasses
import gc
import warnings

import gymnasium
import jax
import jax.numpy as jnp
import minari
import numpy as np
import pyarrow.parquet as pq
import pytest

import msrl_jax as msrl
from msrl_jax import data, envs
from msrl_jax.data.dataset import FIELDS, columns, nest_parts, parts_by_path
from msrl_jax.data.experience import RecordedEnvironment
from msrl_jax.data.formats import write_part
from msrl_jax.envs import spaces
from msrl_jax.replay import Transition

SPACE = envs.Dict(
    {
        "place": envs.Box(-1, 1, (3,)),
        "choice": envs.Discrete(3),
        "more": envs.Tuple((envs.Box(0, 255, (2, 2), jnp.uint8), envs.Discrete(2))),
    }
)
CHOICE = envs.Discrete(2)
PATHS = ["choice", "more/0", "more/1", "place"]
NAMES = [
    *(f"obs/{path}" for path in PATHS),
    "action",
    "reward",
    "terminated",
    "truncated",
    *(f"next_obs/{path}" for path in PATHS),
]


@dataclasses.dataclass(frozen=True)
class Scenes:
    """Random observations, each of which rewards the step that reaches it by the sum of its numbers."""

    observation_space: envs.Space = SPACE
    action_space: envs.Space = CHOICE
    name = "Scenes"

    def reset(self, key):
        return jnp.int32(0), self.observation_space.sample(key)

    def step(self, key, state, action):
        obs = self.observation_space.sample(key)
        return state + 1, obs, spaces.flatten(self.observation_space, obs).sum() + action, state % 4 == 3, state % 6 == 5


def same(a, b):
    assert list(a.columns) == list(b.columns) and a.fingerprint() == b.fingerprint() and a.about == b.about
    assert jax.tree.structure(a.obs) == jax.tree.structure(b.obs)


def true_steps(dataset):
    """Rewards are those of the next observations, and rows follow each other within episodes."""
    value = spaces.flatten(SPACE, dataset.next_obs).sum(-1) + dataset.action
    np.testing.assert_allclose(dataset.reward, value, rtol=1e-5)
    going_on = ~dataset.ended[:-1]
    for x, after in zip(jax.tree.leaves(dataset.obs), jax.tree.leaves(dataset.next_obs), strict=True):
        np.testing.assert_array_equal(after[:-1][going_on], x[1:][going_on])
    assert jax.tree.structure(dataset.obs) == jax.tree.structure(spaces.struct(SPACE))


def train(policy="GPUOnly:num_devices=1", **options):
    settings = {"num_envs": 4, "unroll_length": 8, "hidden_sizes": (4,), "num_minibatches": 2, "num_epochs": 1}
    return msrl.train(
        "ppo",
        Scenes(),
        policy=policy,
        total_steps=5 * 32,
        chunk=2,
        seed=3,
        eval_episodes=0,
        progress=False,
        **settings,
        **options,
    )


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run, and what it recorded."""
    path = tmp_path_factory.mktemp("recorded") / "run.npz"
    return train(record=path), data.load(path)


def test_every_part_of_every_step_of_a_run_is_recorded(recorded):
    dataset = recorded[1]
    assert len(dataset) == 5 * 32 and list(dataset.columns) == NAMES
    assert [x.dtype for x in jax.tree.leaves(dataset.obs)] == [np.int32, np.uint8, np.int32, np.float32]
    true_steps(dataset)
    assert dataset.episodes.length.max() == 4 and "160 rows" in repr(dataset)


@pytest.mark.parametrize("name", ["rows.npz", "rows.parquet"])
def test_a_policy_is_recorded_and_files_give_back_the_same(name, recorded, tmp_path):
    played = data.record(recorded[0], 70, tmp_path / name, epsilon=0.5, num_envs=4)
    true_steps(played)
    same(data.load(tmp_path / name), played)
    if name.endswith("parquet"):
        assert pq.read_table(tmp_path / name).column_names == NAMES
    else:
        with np.load(tmp_path / name) as file:
            assert set(file.files) == {*NAMES, "cut", "about"}
    checked = data.check_spaces(played, Scenes())
    np.testing.assert_array_equal(checked.obs["more"][0], played.obs["more"][0])


def test_parts_of_a_killed_run_are_read(recorded, tmp_path):
    dataset = recorded[1]
    (folder := tmp_path / "run.npz.parts").mkdir()
    (folder / "about.json").write_text("{}")
    rows = Transition(*(jax.tree.map(lambda x: x[:40, None], getattr(dataset, name)) for name in FIELDS))
    assert list(columns(rows)) == NAMES
    write_part(folder, 0, rows)
    assert data.load(folder).fingerprint() == dataset.select(slice(40)).fingerprint()


def test_rows_are_selected_joined_and_split_part_by_part(recorded):
    dataset = recorded[1]
    again = data.concatenate([dataset.select(slice(0, 70)), dataset.select(slice(70, 160))])
    np.testing.assert_array_equal(again.obs["more"][0], dataset.obs["more"][0])
    training, validation = dataset.split(0.25)
    assert len(training) + len(validation) == 160
    true_steps(validation)
    # A gap in any part is one.
    odd = {**dataset.next_obs, "choice": (dataset.next_obs["choice"] + 1) % 3}
    assert dataclasses.replace(dataset, next_obs=odd).ended.all()
    vectors = dataclasses.replace(dataset, obs=dataset.obs["place"], next_obs=dataset.next_obs["place"])
    with pytest.raises(ValueError, match=r"only one of the first .* number 2 has .*, obs, obs/choice, .*; give both"):
        data.concatenate([dataset, vectors])


def test_names_lead_back_to_the_value():
    value = {"b": (1, {"x": 2}), "a": {"y": (3,)}}
    assert parts_by_path(value, "obs") == {"obs/a/y/0": 3, "obs/b/0": 1, "obs/b/1/x": 2}
    assert nest_parts(parts_by_path(value, "obs"), "obs") == value
    many = tuple(range(12))
    assert nest_parts(parts_by_path(many, "obs"), "obs") == many


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"next_obs": {"place": 0}}, "has next_obs/place with obs/choice, .*the same parts"),
        ({"obs": (), "next_obs": ()}, "obs is an empty tuple"),
        ({"obs": {"a/b": 0}, "next_obs": {"a/b": 0}}, r"obs has a part with the name 'a/b'.* without '/' that is not a number"),
        ({"obs": {"0": 0}, "next_obs": {"0": 0}}, "obs has a part with the name '0'"),
        ({"action": {"a": np.zeros(160)}}, "action of a data set is object"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message, recorded):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(recorded[1], **change)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (envs.Box(-1, 1, (3,)), r"has obs/choice, .*, but the observation_space of Scenes is Box\(.*, with obs; use the"),
        (envs.Dict({**SPACE.spaces, "new": envs.Discrete(2)}), "with obs/choice, obs/more/0, obs/more/1, obs/new, obs/place;"),
        (envs.Dict({**SPACE.spaces, "choice": CHOICE}), r"obs/choice .* is outside the observation_space/choice of Scenes"),
        (envs.Dict({**SPACE.spaces, "place": envs.Box(-1, 1, (4,))}), r"obs/place .* shape \[3\] .* observation_space/place"),
    ],
    ids=["vector", "part missing", "bounds", "shape"],
)
def test_spaces_that_differ_say_how(space, message, recorded):
    with pytest.raises(ValueError, match=message):
        data.check_spaces(recorded[1], Scenes(space))


def test_a_file_that_lacks_a_part_says_which(recorded, tmp_path):
    arrays = {name.replace("obs/more/0", "obs/more/2"): x for name, x in recorded[1].columns.items()}
    np.savez(tmp_path / "odd.npz", **arrays)
    with pytest.raises(ValueError, match=r"odd.npz: obs/more has the parts 1, 2 of a tuple, but not obs/more/0; add it"):
        data.load(tmp_path / "odd.npz")


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (Scenes(envs.Dict({"a/b": CHOICE})), ValueError, "Scenes cannot be recorded: obs has a part with the name 'a/b'"),
        (Scenes(action_space=envs.Tuple((CHOICE,))), TypeError, "data sets need actions that are arrays, .*Scenes is Tuple"),
    ],
    ids=["name", "actions"],
)
def test_what_cannot_be_recorded_is_refused(env, error, message):
    with pytest.raises(error, match=message):
        RecordedEnvironment(env, 3)


class Room(gymnasium.Env):
    """Observations of two parts, one of which has two."""

    observation_space = gymnasium.spaces.Dict(
        {
            "place": gymnasium.spaces.Box(-9, 9, (2,)),
            "pair": gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(3), gymnasium.spaces.Box(0, 9, (1,), np.int32))),
        }
    )
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def see(self):
        return {"place": np.float32([self.time, -self.time]), "pair": (self.time % 3, np.int32([self.time]))}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return self.see(), {}

    def step(self, action):
        self.time += 1
        return self.see(), float(action.sum()), self.time == 4, False, {}


@pytest.fixture(scope="module")
def minari_folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("minari")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("MINARI_DATASETS_PATH", str(root))
        env = minari.DataCollector(Room())
        for seed in range(2):
            env.reset(seed=seed)
            for time in range(4):
                env.step(np.array([time % 2, time % 3]))
        env.create_dataset("room/some-v0")
        env.close()
        del env
        gc.collect()  # here, where warnings of what it leaves open are ignored
    return root / "room" / "some-v0"


def test_a_minari_data_set_of_several_parts_is_read(minari_folder):
    dataset, time = data.load(minari_folder), np.tile(np.arange(4), 2)
    np.testing.assert_array_equal(dataset.obs["place"], np.stack([time, -time], 1))
    np.testing.assert_array_equal(dataset.next_obs["pair"][0], (time + 1) % 3)
    np.testing.assert_array_equal(dataset.next_obs["pair"][1], time[:, None] + 1)
    np.testing.assert_array_equal(dataset.action, np.stack([time % 2, time % 3], 1))
    np.testing.assert_array_equal(dataset.terminated, time == 3)
    room = envs.Dict({"place": envs.Box(-9, 9, (2,)), "pair": envs.Tuple((envs.Discrete(3), envs.Box(0, 9, (1,), np.int32)))})
    assert data.check_spaces(dataset, Scenes(room, envs.MultiDiscrete([2, 3]))).action.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observations": {"a": np.ones(3), "b": np.ones(2)}}, "parts of the observations of episode 1 have different"),
        ({"observations": {"a": np.ones(3)}}, "only some of the episodes 0 to 1 have next_obs/b"),
        ({"actions": {"a": np.ones(2)}}, "actions of episode 1 is a dict of arrays"),
    ],
    ids=["lengths", "parts", "actions"],
)
def test_episodes_of_several_parts_have_to_agree(change, message):
    one = {"actions": np.ones(2), "rewards": np.ones(2), "terminations": np.array([False, True])}
    one["observations"] = {"a": np.ones(3), "b": np.zeros((3, 2))}
    assert list(data.from_episodes([one, one]).obs) == ["a", "b"]
    with pytest.raises(ValueError, match=message):
        data.from_episodes([one, one | change])
