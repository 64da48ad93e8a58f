"""Videos of trained agents: the states of episodes are recorded on the device, and rendered afterwards by the environment."""

import base64
import dataclasses
import html
import io
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._files import as_path, replacing
from msrl_jax.envs import Environment, has_agents, vectorize
from msrl_jax.envs.base import PyTree, close_simulators, env_name, is_on_host, iter_wrapped
from msrl_jax.envs.masks import unmasked
from msrl_jax.envs.param_sources import with_source
from msrl_jax.envs.params import GivenParams
from msrl_jax.envs.vector import next_states
from msrl_jax.fragments.graph.host_calls import host_errors
from msrl_jax.fragments.support.checks import check_loaded, check_seed, whole
from msrl_jax.fragments.support.random_keys import is_key, key_for
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run import processes
from msrl_jax.run.disk.folder import check_target
from msrl_jax.run.evaluation.evaluate import Behavior
from msrl_jax.run.experiment.members import state_of_member
from msrl_jax.run.loop.loop import Run
from msrl_jax.run.result import Result

_CHUNK = 64  # steps that a device records at once
_FPS = 30.0
FILMS = "videos"  # a subfolder of the run folder
SUFFIXES = (".gif", ".html", ".mp4")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Video:
    """Episodes as frames; a notebook displays them as a video.

    Attributes:
      episodes: the frames of each episode, from its first state to its last. shape=[T + 1, H, W, 3], dtype=uint8
      returns: the return of each episode, over all agents.
      fps: frames per second.
      title: the agent and the environment.
    """

    episodes: Sequence[np.ndarray]
    returns: Sequence[float]
    fps: float
    title: str

    @property
    def captions(self) -> list[str]:
        """Returns the caption of each episode."""
        numbers = zip(self.returns, self.episodes, strict=True)
        return [f"episode {i}: return {r:g}, {len(frames) - 1} steps" for i, (r, frames) in enumerate(numbers)]

    def __repr__(self) -> str:
        return f"Video({self.title}; {'; '.join(self.captions)})"

    def _repr_html_(self) -> str:
        picture = base64.b64encode(_gif_bytes(self)).decode()
        return f'<figure><img src="data:image/gif;base64,{picture}"><figcaption>{_caption_html(self)}</figcaption></figure>'

    def save(self, path: Path) -> Path:
        """Writes a file in the format of its suffix: `.gif`, `.mp4`, or `.html`, a self-contained page with a player.

        Raises:
          ValueError: if the suffix is unknown, the folder does not exist, or imageio-ffmpeg, which writes MP4, is missing.
        """
        check_file(path)
        with replacing(path) as partial:
            if path.suffix.lower() == ".mp4":
                _write_mp4(self, partial)
            else:
                partial.write_bytes(_gif_bytes(self) if path.suffix.lower() == ".gif" else _player_page(self).encode())
        return path


def check_file(path: Path) -> None:
    """Raises ValueError if no video can be written there; call it before making one."""
    check_target("video", path, SUFFIXES)
    if path.suffix.lower() == ".mp4":
        try:
            import imageio_ffmpeg  # noqa: F401
        except ImportError as error:
            raise ValueError(
                f"imageio-ffmpeg, which writes {path.name}, is not installed: pip install 'msrl-jax[video]'; or write a .gif"
            ) from error


def film(behavior: Behavior, state: PyTree, episodes: int, seed: int, max_steps: int, fps: float | None, title: str) -> Video:
    """Plays greedy episodes one after another, and renders them."""
    episodes, max_steps = whole("episodes", episodes), whole("max_steps", max_steps)
    fps = None if fps is None else _check_rate("fps", fps)
    leaves = behavior.take(state)
    if hasattr(behavior.env, "film"):
        played = [_film_episode(behavior, leaves, seed + i, max_steps) for i in range(episodes)]
        pictures, rates, returns = zip(*played, strict=True)
        return Video([_stack_pictures(behavior.env, episode) for episode in pictures], returns, fps or rates[0], title)
    draw, rate = _renderer_of(behavior.env)
    play = _make_recorder(behavior, max_steps)
    keys = [jax.random.fold_in(key_for("video", jax.random.key(seed)), i) for i in range(episodes)]
    recorded = [play(leaves, key) for key in keys]
    pictures = [_draw_states(behavior.env, draw, states) for states, _ in recorded]
    return Video(pictures, [total for _, total in recorded], fps or rate, title)


@entry
def video(
    result: Result,
    path: str | os.PathLike | None = None,
    *,
    episodes: int = 1,
    seed: int = 0,
    member: int | None = None,
    max_steps: int = 1000,
    fps: float | None = None,
    env_params: GivenParams | None = None,
) -> Video:
    """Plays greedy episodes and renders them: states are recorded on the device and rendered afterwards.

    A custom environment is rendered by its method `render(state)`, which returns an image, uint8 `[H, W, 3]`. Without this
    method, the video shows the images that the agent observes.

    Args:
      result: the run of the agent.
      path: a file that ends in `.gif`, `.mp4` or `.html`; None writes no file.
      episodes: number of episodes, one after another.
      seed: seed for the randomness of the environments.
      member: index of the member that plays; None selects the best one.
      max_steps: steps after which an episode is cut off.
      fps: frames per second; None uses the rate of the environment.
      env_params: as in `Result.evaluate`.

    Returns:
      The video; a notebook displays it as the value of a cell.

    Raises:
      ValueError: if a number is out of range, the environment cannot be rendered, or the file cannot be written.
    """
    check_loaded(result)
    file = None if path is None else as_path("path", path)
    if file is not None:
        check_file(file)
    behavior = result.behavior.with_env_params(env_params)
    title = f"{result.experiment.name} on {result.experiment.env_name}"
    recording = film(behavior, result.acting_state(member), episodes, check_seed(seed), max_steps, fps, title)
    if file is not None:
        recording.save(file)
    return recording


class Filming:
    """A hook that films the agent of the first member during training: `RUN/videos/STEPS.gif`, for `train(callbacks=[...])`.

    Args:
      every: steps between videos; the last one is made at the end of the run.
      episodes: number of episodes per video.
      max_steps: steps after which an episode is cut off.
    """

    def __init__(self, every: int, episodes: int = 1, max_steps: int = 1000):
        self.every, self.episodes = whole("every", every), whole("episodes", episodes)
        self.max_steps, self._from = whole("max_steps", max_steps), 0

    def before(self, run: Run) -> None:
        """Notes where the chunk begins; rejects a run without a folder, or whose environment cannot be rendered."""
        if run.path is None:
            raise ValueError("videos of a run are written to its folder; give it one, train(..., out=FOLDER)")
        if not hasattr(env := run.experiment.behavior.env, "film"):
            _renderer_of(env)
        self._from = run.step

    def after(self, run: Run) -> None:
        """Makes a video if one is due."""
        is_due = run.step // self.every > self._from // self.every
        if run.finding is not None or not (is_due or run.iteration == run.iterations):
            return
        behavior, state = run.experiment.behavior, run.acting_state()
        if run.experiment.has_members:
            state = state_of_member(behavior.agent, state, 0)
        title = f"{run.experiment.name} on {run.experiment.env_name} after {run.step:,} steps"
        recording = film(behavior, state, self.episodes, 0, self.max_steps, None, title)
        if processes.is_first():
            assert run.path is not None
            (run.path / FILMS).mkdir(exist_ok=True)
            recording.save(run.path / FILMS / f"{run.step}.gif")


def _film_episode(
    behavior: Behavior, leaves: list[jax.Array], seed: int, max_steps: int
) -> tuple[list[np.ndarray], float, float]:
    """Plays an episode of an environment that renders itself during the episode."""
    carry = behavior.initial_carry(1)
    choose = jax.jit(lambda leaves, obs, carry: behavior.act_with_carry(behavior.restore(leaves), obs, carry))

    def act(obs: PyTree) -> np.ndarray:
        nonlocal carry
        action, carry = choose(leaves, behavior.batched(obs)[0], carry)
        return np.asarray(action)[0]

    return behavior.env.film(act, seed, max_steps)  # type: ignore[attr-defined]


def _renderer_of(env: Any) -> tuple[Callable[[Any], Any], float]:
    """Returns the function that renders a recorded state (or an observation), and the number of frames per second."""
    if hasattr(env, "render") and not is_on_host(env):
        fps = next((x.render_fps for x in iter_wrapped(env) if hasattr(x, "render_fps")), _FPS)
        return env.render, _check_rate(f"render_fps of {env_name(env)}", fps)
    space = env.observation_space
    if getattr(space, "dtype", None) == np.uint8 and len(space.shape) == 3 and not has_agents(env):
        channels = 3 if space.shape[-1] % 3 == 0 else 1  # the newest of stacked frames
        return lambda obs: np.broadcast_to(np.asarray(obs)[..., -channels:], (*obs.shape[:2], 3)), _FPS
    raise ValueError(f"{env_name(env)} cannot be drawn; give it a method render(state), which returns an image, uint8[H, W, 3]")


def _make_recorder(behavior: Behavior, max_steps: int) -> Callable[[list[jax.Array], jax.Array], tuple[list[Any], float]]:
    """Makes a function that plays an episode and returns its data to render, from first to last state, and its return."""
    copies, several = vectorize(behavior.env, 1), has_agents(behavior.env)
    has_states = not is_on_host(behavior.env) and hasattr(behavior.env, "render")

    @jax.jit
    def begin(leaves: list[jax.Array], key: jax.Array) -> Any:
        state = behavior.restore(leaves)
        env_state, obs = with_source(copies, behavior.source(state)).reset(key)
        return (env_state, obs, behavior.initial_carry(1)), env_state.env_state if has_states else unmasked(obs)

    @jax.jit
    def chunk(leaves: list[jax.Array], running: PyTree) -> Any:
        state = behavior.restore(leaves)
        env = with_source(copies, behavior.source(state))

        def step(running: PyTree, _: None) -> Any:
            env_state, obs, carry = running
            action, carry = behavior.act_with_carry(state, obs, carry)
            next_env_state, t = env.step(env_state, action)
            frame = next_states(env, env_state, action) if has_states else unmasked(t.final_obs)
            reward = jnp.sum(t.reward[0]) if several else t.reward[0]
            return (next_env_state, t.obs, carry), (frame, reward, t.ended[0])

        return jax.lax.scan(step, running, length=min(_CHUNK, max_steps))

    def play(leaves: list[jax.Array], key: jax.Array) -> tuple[list[Any], float]:
        with host_errors():
            running, first_frame = begin(leaves, key)
            frames, total, is_over = [next(_each_state(jax.tree.map(lambda x: x[None], first_frame)))], 0.0, False
            while not is_over and len(frames) <= max_steps:
                running, (states, rewards, ends) = chunk(leaves, running)
                for row, reward, end in zip(_each_state(states), np.asarray(rewards), np.asarray(ends), strict=True):
                    if is_over or len(frames) > max_steps:
                        break
                    frames.append(row)
                    total, is_over = total + float(reward), bool(end)
        close_simulators(copies)
        return frames, total

    return play


def _each_state(stacked: PyTree) -> Iterator[Any]:
    """Yields the states of one environment from those of `T` steps, `[T, 1, ...]`, as NumPy arrays; keys stay keys."""
    leaves, tree = jax.tree.flatten(stacked)
    leaves = [x if is_key(x) else np.asarray(x) for x in leaves]
    for t in range(len(leaves[0]) if leaves else 0):
        yield jax.tree.unflatten(tree, [x[t, 0] if is_key(x) else np.asarray(x[t, 0]) for x in leaves])


def _check_rate(name: str, value: Any) -> float:
    number = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value  # NumPy or JAX scalar
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < np.inf:
        raise ValueError(f"{name}={value!r}: use a number of pictures per second above 0")
    return float(number)


def _draw_states(env: Environment, draw: Callable[[Any], Any], states: Sequence[Any]) -> np.ndarray:
    try:
        return _stack_pictures(env, [draw(state) for state in states])
    except Exception as error:
        error.add_note(f"raised while {env_name(env)} was drawn for a video")
        raise


def _stack_pictures(env: Environment, pictures: Sequence[Any]) -> np.ndarray:
    arrays = [np.asarray(x) for x in pictures]
    shapes = {(x.shape, x.dtype.name) for x in arrays}
    (shape, dtype), *other_sizes = sorted(shapes)
    if len(shape) != 3 or shape[-1] != 3 or 0 in shape or dtype != "uint8":
        raise ValueError(f"{env_name(env)}.render returned {dtype}{list(shape)}; return an image, uint8[H, W, 3]")
    if other_sizes:
        raise ValueError(f"{env_name(env)}.render returned images {list(shape)} and {list(other_sizes[0][0])}; return one size")
    return np.stack(arrays)


def _caption_html(video: Video) -> str:
    return html.escape(f"{video.title}. {'; '.join(video.captions)}")


def _gif_bytes(video: Video) -> bytes:
    from PIL import Image

    pictures = [Image.fromarray(x) for x in np.concatenate(list(video.episodes))]
    last_frames = np.cumsum([len(x) for x in video.episodes]) - 1
    duration = max(10, round(100 / video.fps) * 10)  # milliseconds; the format counts hundredths of a second
    durations = [duration + 500 * (i in last_frames) for i in range(len(pictures))]
    stream = io.BytesIO()
    pictures[0].save(stream, "GIF", save_all=True, append_images=pictures[1:], duration=durations, loop=0)
    return stream.getvalue()


def _write_mp4(video: Video, path: Path) -> None:
    import imageio_ffmpeg

    pictures = np.concatenate(list(video.episodes))
    odd = [(0, n % 2) for n in pictures.shape[1:3]]  # the format requires even sizes
    pictures = np.pad(pictures, [(0, 0), *odd, (0, 0)], mode="edge")
    height, width = pictures.shape[1:3]
    input_options = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(video.fps), "-i", "-"]
    command = [
        imageio_ffmpeg.get_ffmpeg_exe(),
        "-v",
        "error",
        "-y",
        *input_options,
        "-pix_fmt",
        "yuv420p",
        "-f",
        "mp4",
        str(path),
    ]
    process = subprocess.run(command, input=pictures.tobytes(), capture_output=True, check=False)
    if process.returncode:
        raise OSError(f"ffmpeg could not write the video: {process.stderr.decode(errors='replace').strip()}")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>:root {{ color-scheme: light dark }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 1.5rem auto; padding: 0 1rem; max-width: 48rem }}
img, input {{ width: 100%; max-width: {width}px; image-rendering: pixelated }}</style></head>
<body><h1>{title}</h1><img id="picture" alt="{title}"><br><input id="at" type="range" min="0" max="{last}" value="0"
aria-label="picture"><p><button id="play">pause</button> <span id="caption"></span></p><script>
const pictures = {pictures}, captions = {captions}, each = 1000 / {fps};
const [picture, at, play, caption] = ["picture", "at", "play", "caption"].map(id => document.getElementById(id));
let running = true;
const show = () => {{ picture.src = "data:image/png;base64," + pictures[at.value]; caption.textContent = captions[at.value]; }};
at.oninput = () => {{ running = false; play.textContent = "play"; show(); }};
play.onclick = () => {{ running = !running; play.textContent = running ? "pause" : "play"; }};
setInterval(() => {{ if (running) {{ at.value = (+at.value + 1) % pictures.length; show(); }} }}, each);
show();
</script></body></html>
"""


def _player_page(video: Video) -> str:
    from PIL import Image

    encoded, captions = [], []
    for caption, episode in zip(video.captions, video.episodes, strict=True):
        for number, picture in enumerate(episode):
            stream = io.BytesIO()
            Image.fromarray(picture).save(stream, "PNG")
            encoded.append(base64.b64encode(stream.getvalue()).decode())
            captions.append(f"{caption}; step {number}")
    width = max(360, video.episodes[0].shape[2])
    return _PAGE.format(
        title=html.escape(video.title),
        pictures=json.dumps(encoded),
        captions=json.dumps(captions),
        fps=f"{video.fps:g}",
        last=len(encoded) - 1,
        width=width,
    )
