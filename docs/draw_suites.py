"""Draws `suites.gif`: an untrained agent in an environment of each suite.

`MUJOCO_GL=egl python docs/draw_suites.py`, with the extras `envs`, `marl`, `navix` and `video`, so on Python 3.12 or later.
"""

from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageDraw

from msrl_jax.run.outputs.video import film
from msrl_jax.run.prepare import make_experiment

SHOWN = {
    "CartPole-v1": "ppo",
    "Breakout-MinAtar": "ppo",
    "brax:halfcheetah": "ppo",
    "playground:CheetahRun": "ppo",
    "craftax:Craftax-Classic-Symbolic-v1": "ppo",
    "xminigrid:MiniGrid-FourRooms": "ppo",
    "jumanji:Snake-v1": "ppo",
    "gymnasium:Walker2d-v5": "ppo",
    "jaxmarl:MPE_simple_spread_v3": "ippo",
    "pgx:connect_four": "self_play",
    "envpool:Pong-v5": "ppo",
    "navix:Navix-DoorKey-8x8-v0": "ppo",
}
STEPS, SIZE, COLUMNS, TEXT = 30, 150, 6, 16


def pictures(env: str, algo: str) -> np.ndarray:
    """An episode as small squares `[STEPS, SIZE, SIZE, 3]`; its last picture stays if it is shorter."""
    experiment = make_experiment(algo, env, env_params=None)
    state = jax.jit(experiment.initial_state)()
    shown = film(experiment.behavior, state, 1, 0, STEPS, None, env).episodes[0][:STEPS]
    squares = []
    for picture in shown:
        image = Image.fromarray(picture)
        image.thumbnail((SIZE, SIZE))
        square = Image.new("RGB", (SIZE, SIZE), "white")
        square.paste(image, ((SIZE - image.width) // 2, (SIZE - image.height) // 2))
        squares.append(np.asarray(square))
    return np.stack(squares + squares[-1:] * (STEPS - len(squares)))


def main() -> None:
    """Draws all of them in one film."""
    found = {env: pictures(env, algo) for env, algo in SHOWN.items()}
    rows = -(-len(found) // COLUMNS)
    frames = []
    for t in range(STEPS):
        frame = Image.new("RGB", (COLUMNS * SIZE, rows * (SIZE + TEXT)), "white")
        for k, (env, squares) in enumerate(found.items()):
            x, y = k % COLUMNS * SIZE, k // COLUMNS * (SIZE + TEXT)
            frame.paste(Image.fromarray(squares[t]), (x, y))
            ImageDraw.Draw(frame).text((x + 4, y + SIZE + 2), env.removesuffix("-Symbolic-v1"), fill="black")
        frames.append(frame.quantize(64))
    path = Path(__file__).with_name("suites.gif")
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=100, loop=0, optimize=True)


if __name__ == "__main__":
    main()
