"""A point in a maze of walls, which has to reach a goal: the smallest task in which goals are hard to find by chance.

Lengths are in cells. A place is `(x, y)`: columns to the right and rows downwards from the center of the maze.
"""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import Stepped
from msrl_jax.fragments.support.checks import suggestion, whole

MAZES = {
    "open": """
        #######
        #.....#
        #.....#
        #.....#
        #.....#
        #.....#
        #######
    """,
    "u": """
        #######
        #.....#
        #####.#
        #####.#
        #####.#
        #.....#
        #######
    """,
    "spiral": """
        #########
        #.......#
        #######.#
        #.....#.#
        #.###.#.#
        #.#...#.#
        #.#####.#
        #.......#
        #########
    """,
}
"""The shapes by name; `#` is a wall."""

_GAP = 0.01  # between the point and a wall that it touches
_SCALE = 32  # pixels of a cell


class MazeState(NamedTuple):
    """State of `PointMaze`.

    Attributes:
      place: of the point. `[2]` float32
      goal: the place to reach. `[2]` float32
      steps: of the episode so far. `[]` int32
    """

    place: jax.Array
    goal: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class PointMaze:
    """A point that moves in a maze; a `GoalEnvironment`, whose goal is a place.

    An episode begins at a random place with a random goal. An action is a velocity, `[2]` in [-1, 1]; walls stop its part
    across them. A step pays -1, and 0 if it reaches the goal, which terminates the episode; so the return is minus the number
    of steps before the goal, and a policy that never gets there earns no more by waiting. `max_steps` truncates. The metric
    `success` tells whether the goal was reached.

    The `observation` is the place, and so is the `achieved_goal`.

    Attributes:
      maze: a name of `MAZES`, `"open"`, `"u"` or `"spiral"`.
      max_steps: length of an episode in steps.
      speed: cells per step along each axis at most, above 0 and below 1.
      tolerance: distance in cells at which the goal is reached.
    """

    maze: str = "u"
    max_steps: int = 100
    speed: float = 0.5
    tolerance: float = 0.5
    metrics: ClassVar = {"success": "last"}
    render_fps = 10
    action_space = spaces.Box(-1, 1, (2,))

    def __post_init__(self):
        if self.maze not in MAZES:
            raise ValueError(f"PointMaze: maze={self.maze!r}{suggestion(str(self.maze), MAZES)}; use one of {', '.join(MAZES)}")
        whole("PointMaze: max_steps", self.max_steps)
        if not 0 < self.speed < 1:
            raise ValueError(f"PointMaze: speed={self.speed!r}; use a number above 0 and below 1, lest it leap walls")
        if not self.tolerance > 0:
            raise ValueError(f"PointMaze: tolerance={self.tolerance!r}; use a number above 0")

    @functools.cached_property
    def walls(self) -> np.ndarray:
        """Where walls are. `[rows, columns]` bool"""
        return np.array([[c == "#" for c in line.strip()] for line in MAZES[self.maze].split()])

    @property
    def _center(self) -> np.ndarray:
        return np.array(self.walls.shape[::-1], np.float32) / 2

    @property
    def observation_space(self) -> spaces.Dict:
        """Three places."""
        place = spaces.Box(-self._center, self._center, (2,))
        return spaces.Dict({"observation": place, "achieved_goal": place, "desired_goal": place})

    def reset(self, key: jax.Array) -> tuple[MazeState, dict[str, jax.Array]]:
        """Draws the place and the goal uniformly among those without a wall."""
        free = np.argwhere(~self.walls)[:, ::-1].astype(np.float32) - self._center
        which, within = jax.random.split(key)
        cells = jnp.asarray(free)[jax.random.randint(which, (2,), 0, len(free), jnp.int32)]
        place, goal = cells + jax.random.uniform(within, (2, 2), minval=_GAP, maxval=1 - _GAP, dtype=jnp.float32)
        state = MazeState(place, goal, jnp.int32(0))
        return state, self._observe(state)

    def step(self, key: jax.Array, state: MazeState, action: jax.Array) -> Stepped:
        """Moves along one axis, then along the other."""
        place = state.place
        for axis, move in enumerate(self.speed * jnp.clip(action, -1, 1)):
            place = self._slide(place, axis, move)
        state = MazeState(place, state.goal, state.steps + 1)
        reward, reached = self.goal_reward(place, state.goal)
        return state, self._observe(state), reward, reached, (state.steps >= self.max_steps) & ~reached

    def goal_reward(self, achieved: jax.Array, desired: jax.Array) -> tuple[jax.Array, jax.Array]:
        """0 and the end at a distance of at most `tolerance`, else -1; see `GoalEnvironment`."""
        reached = jnp.sum((achieved - desired) ** 2) <= self.tolerance**2
        return jnp.where(reached, 0.0, -1.0), reached

    def report(self, state: MazeState) -> dict[str, jax.Array]:
        """The metrics."""
        return {"success": self.goal_reward(state.place, state.goal)[1]}

    def render(self, state: MazeState) -> np.ndarray:
        """The maze from above: the point in blue, and in green the goal, which may be smaller. `[H, W, 3]` uint8"""
        image = np.where(self.walls[..., None], 70, 240).astype(np.uint8).repeat(3, -1)
        image = image.repeat(_SCALE, 0).repeat(_SCALE, 1)
        y, x = (np.indices(image.shape[:2]) + 0.5) / _SCALE
        for place, radius, color in ((state.goal, max(self.tolerance, 0.15), (90, 170, 90)), (state.place, 0.2, (40, 80, 200))):
            column, row = np.asarray(place) + self._center
            image[(x - column) ** 2 + (y - row) ** 2 <= radius**2] = color
        return image

    def _slide(self, place: jax.Array, axis: int, move: jax.Array) -> jax.Array:
        """Moves along an axis, up to a wall at most."""
        target = place.at[axis].add(move) + self._center
        cell = jnp.floor(target).astype(jnp.int32)
        edge = jnp.where(move > 0, cell[axis] - _GAP, cell[axis] + 1 + _GAP)
        stops = jnp.asarray(self.walls)[cell[1], cell[0]]
        return place.at[axis].set(jnp.where(stops, edge, target[axis]) - self._center[axis])

    def _observe(self, state: MazeState) -> dict[str, Any]:
        return {"observation": state.place, "achieved_goal": state.place, "desired_goal": state.goal}
