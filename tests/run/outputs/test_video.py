"""Videos show every state of an episode, from the first to the one in which it ended, as the environment draws it."""

import dataclasses
import gc
import json
import re
import subprocess
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

import msrl_jax as msrl
from msrl_jax.cli import main
from msrl_jax.envs import spaces
from msrl_jax.games.small_games import RockPaperScissors
from msrl_jax.run.outputs.video import film
from tests.support.acting import acting

pytestmark = pytest.mark.long


class Place(NamedTuple):
    at: jax.Array
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Road:
    """A road of ten places: 0 goes one on, 1 goes two on, and its end terminates. Its state has a key."""

    size: tuple[int, int] = (4, 10)
    observation_space = spaces.Box(0, 20, (1,))
    action_space = spaces.Discrete(2)
    render_fps = np.float32(5)

    def _observed(self, state):
        return jnp.float32(state.at)[None]

    def reset(self, key):
        state = Place(jnp.int32(0), key)
        return state, self._observed(state)

    def step(self, key, state, action):
        state = Place(state.at + 1 + action, key)
        return state, self._observed(state), jnp.float32(1 + action), state.at >= 9, jnp.asarray(False)

    def render(self, state):
        assert isinstance(state.at, np.ndarray) and jnp.issubdtype(state.key.dtype, jax.dtypes.prng_key)
        picture = np.zeros((*self.size, 3), np.uint8)
        picture[:, min(int(state.at), 9)] = 255
        return picture


def places(pictures):
    return pictures[:, 0, :, 0].argmax(-1).tolist()


@pytest.fixture(scope="module")
def road():
    return acting("ppo", Road())


def test_a_video_has_every_state_of_each_episode(road):
    behavior, state = road
    actions = jax.jit(behavior.act_with_carry)(state, np.arange(20, dtype=np.float32)[:, None], ())[0]
    expected = [0]
    while expected[-1] < 9:
        expected.append(min(9, expected[-1] + 1 + int(actions[expected[-1]])))
    video = film(behavior, state, 2, 0, 1000, None, "a road")
    assert [places(x) for x in video.episodes] == [expected, expected]
    assert video.fps == 5 and video.returns[0] == video.returns[1] >= 9
    cut = film(behavior, state, 1, 0, 3, jnp.float32(7.5), "a road")
    assert places(cut.episodes[0]) == expected[:4] and cut.fps == 7.5


def test_wrappers_and_drawn_parameters_keep_the_pictures(road):
    inner = msrl.envs.TimeLimit(msrl.envs.FlattenObservation(Road()), 3)
    behavior, state = acting("ppo", inner)
    assert len(film(behavior, state, 1, 0, 1000, None, "cut").episodes[0]) == 4
    behavior, state = acting("ppo", "CartPole-v1")
    far = behavior.with_env_params("length=uniform:3:4")
    short, long = (film(b, state, 1, 0, 1, None, "").episodes[0] for b in (behavior, far))
    assert short.shape == long.shape and (short != long).any(), "the pole has another length"


def test_files_hold_the_pictures(road, tmp_path):
    video = film(*road, 2, 0, 1000, 10, "<a road>")
    pictures = np.concatenate(list(video.episodes))
    with Image.open(video.save(tmp_path / "road.gif")) as gif:
        assert gif.n_frames == len(pictures)
        for number, expected in enumerate(pictures):
            gif.seek(number)
            assert gif.info["duration"] == (600 if number + 1 in np.cumsum([len(x) for x in video.episodes]) else 100)
            np.testing.assert_array_equal(np.asarray(gif.convert("RGB")), expected)
    page = video.save(tmp_path / "road.html").read_text()
    assert "<h1>&lt;a road&gt;</h1>" in page and not re.search(r"(src|href)=.?(http|//)", page)
    found = re.search(r"pictures = (\[.*?\]), captions = (\[.*?\]), each = 1000 / 10;", page)
    encoded, captions = map(json.loads, found.groups())
    assert len(encoded) == len(captions) == len(pictures) and captions[1].endswith("step 1")
    assert "data:image/gif;base64," in video._repr_html_()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["road.gif", "road.html"]


def test_an_mp4_has_all_pictures(road, tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    video = film(*acting("ppo", Road(size=(33, 47))), 1, 0, 1000, 10, "odd sizes")
    file = video.save(tmp_path / "road.mp4")
    decode = [ffmpeg.get_ffmpeg_exe(), "-v", "error", "-i", str(file), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    decoded = subprocess.run(decode, capture_output=True, check=True, timeout=60).stdout
    pictures = np.frombuffer(decoded, np.uint8).reshape(-1, 34, 48, 3)
    assert len(pictures) == len(video.episodes[0])
    assert pictures[:, 0, :, 0].argmax(-1).tolist() == pytest.approx(places(video.episodes[0]), abs=1)
    assert [p.name for p in tmp_path.iterdir()] == ["road.mp4"]


class Blank(Road):
    def render(self, state):
        return np.zeros((0, 0, 3), np.uint8)


class Standing(Road):
    render_fps = 0


class Raising(Road):
    def render(self, state):
        raise KeyError("sprite")


def test_an_error_of_render_says_where_it_came_from():
    with pytest.raises(KeyError, match="sprite") as raised:
        film(*acting("ppo", Raising()), 1, 0, 10, None, "")
    assert raised.value.__notes__ == ["raised while Raising was drawn for a video"]


class Wrong(Road):
    def render(self, state):
        return np.zeros((4, 10), np.uint8)


class Growing(Road):
    def render(self, state):
        return np.zeros((4, 1 + int(state.at), 3), np.uint8)


def test_what_cannot_be_shown_is_said():
    for env, message in (
        (Wrong(), r"Wrong\.render returned uint8\[4, 10\]; return an image, uint8\[H, W, 3\]"),
        (Blank(), r"Blank\.render returned uint8\[0, 0, 3\]; return an image"),
        (Standing(), r"render_fps of Standing=0: use a number of pictures per second above 0"),
        (Growing(), r"Growing\.render returned images \[4, 1, 3\] and \[4, \d+, 3\]; return one size"),
        (msrl.envs.make("DeepSea-bsuite"), "gymnax cannot draw DeepSea-bsuite; it draws Acrobot-v1, "),
        (RockPaperScissors(), "RockPaperScissors cannot be drawn; give it a method render"),
    ):
        with pytest.raises(ValueError, match=message):
            film(*acting("self_play" if hasattr(env, "agents") else "ppo", env), 1, 0, 10, None, "")


@pytest.mark.parametrize(
    ("name", "env", "size"),
    [
        ("ppo", "CartPole-v1", (400, 600)),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ppo", "Breakout-MinAtar", (400, 480)),
                ("ppo", "Catch-bsuite", (400, 480)),
                ("dqn", "FourRooms-misc", (400, 480)),
                ("ppo", "Acrobot-v1", (500, 500)),
                ("ppo", "xminigrid:MiniGrid-DoorKey-5x5", (160, 160)),
                ("ppo", "jumanji:Snake-v1", (480, 480)),
                ("ppo", "craftax:Craftax-Classic-Symbolic-v1", (144, 144)),
                ("ippo", "jaxmarl:MPE_simple_spread_v3", (480, 480)),
                ("ppo", "navix:Navix-DoorKey-5x5-v0", (40, 40)),
            )
        ),
    ],
)
def test_suites_draw_themselves(name, env, size):
    if env.startswith("navix:"):
        pytest.importorskip("navix", reason="NAVIX needs Python 3.12")
    first, second = film(*acting(name, env), 2, 0, 10, None, env).episodes
    assert first.shape[1:] == (*size, 3) and len(first) <= 11 and first.std() > 1
    # A new agent may walk against a wall all the time; then its episodes differ in where they begin.
    assert (first[0] != first[-1]).any() or (first[0] != second[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("env", ["brax:halfcheetah", "playground:CartpoleBalance", "gymnasium:Hopper-v5"])
@pytest.mark.filterwarnings("ignore:Exception ignored in.*GLContext:pytest.PytestUnraisableExceptionWarning")
def test_mujoco_draws(env):
    cannot, pictures = None, None
    try:
        pictures = film(*acting("ppo", env), 1, 0, 10, None, env).episodes[0]
    except RuntimeError as error:
        if "MUJOCO_GL" not in str(error):
            raise
        cannot = str(error)
    if cannot is not None:
        gc.collect()  # MuJoCo's context, which was made in part and cannot be deleted: here rather than during another test
        pytest.skip(cannot)
    assert pictures.shape[-1] == 3 and (pictures[0] != pictures[-1]).any() and pictures.std() > 1


@pytest.mark.slow
def test_images_that_the_agent_sees_are_shown():
    """Of an environment that nothing draws: the newest of its frames."""

    @dataclasses.dataclass(frozen=True)
    class Screen:
        observation_space, action_space = spaces.Box(0, 255, (6, 5, 4), np.uint8), spaces.Discrete(2)

        def _obs(self, at):
            return jnp.broadcast_to(jnp.arange(4, dtype=jnp.uint8) + at.astype(jnp.uint8), (6, 5, 4))

        def reset(self, key):
            return jnp.int32(0), self._obs(jnp.int32(0))

        def step(self, key, state, action):
            return state + 10, self._obs(state + 10), jnp.float32(0), state >= 20, jnp.asarray(False)

    pictures = film(*acting("ppo", Screen(), network="mlp"), 1, 0, 10, None, "screen").episodes[0]
    assert pictures.shape == (4, 6, 5, 3) and pictures[:, 0, 0, 0].tolist() == [3, 13, 23, 33]
    assert (pictures == pictures[:, :1, :1, :1]).all()


def test_a_run_is_shown_and_films_itself(tmp_path, capsys):
    options = {"num_envs": 8, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (8,)}
    films = msrl.run.Filming(256, max_steps=5)
    with pytest.raises(ValueError, match=r"videos of a run are written to its folder; give it one, train"):
        films.before(SimpleNamespace(path=None))  # type: ignore[arg-type]
    out = tmp_path / "run"
    msrl.train(
        "ppo",
        "Catch-bsuite",
        total_steps=640,
        out=out,
        callbacks=[films],
        seeds=2,
        eval_episodes=0,
        progress=False,
        policy="GPUOnly:num_devices=1",
        **options,
    )
    assert sorted(int(p.stem) for p in (out / "videos").glob("*.gif")) == [256, 512, 640]
    films = msrl.run.Filming(512, max_steps=5)
    msrl.train(resume=out, total_steps=1024, callbacks=[films], progress=False)
    assert sorted(int(p.stem) for p in (out / "videos").glob("*.gif")) == [256, 512, 640, 1024], "old films stay"
    file = tmp_path / "show.GIF"
    assert main(["video", str(out), "--out", str(file), "--episodes", "2", "--max-steps", "4", "--member", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["lengths"] == [4, 4] and file.exists()
    (tmp_path / "folder.gif").mkdir()
    for arguments, message in (
        (["--out", "show.avi"], "must end in .gif or .html or .mp4"),
        (["--out", str(tmp_path / "no" / "show.gif")], "does not exist; create it first"),
        (["--out", str(tmp_path)], "must end in"),
        (["--out", str(tmp_path / "folder.gif")], "is a folder; name a file"),
        (["--episodes", "0"], "episodes=0: use an integer of at least 1"),
        (["--fps", "-1"], "fps=-1: use a number of pictures per second above 0"),
        (["--member", "2"], "member=2: this run has members 0 to 1"),
    ):
        assert main(["video", str(out), *arguments]) == 2
        assert message in capsys.readouterr().err
