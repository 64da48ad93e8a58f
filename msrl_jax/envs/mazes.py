"""A point mass that has to reach a goal in a maze: a minimal task whose goals are hard to find by chance.

Lengths are in cells. A position is `(x, y)`: columns to the right and rows downwards from the center of the maze.
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
"""The mazes by name; `#` is a wall."""

_GAP = 0.01  # between the point and a wall that it touches
_SCALE = 32  # pixels per cell


class MazeState(NamedTuple):
    """State of `PointMaze`.

    Attributes:
      place: position of the point. `[2]` float32
      goal: position to reach. `[2]` float32
      steps: number of steps in the episode so far. `[]` int32
    """

    place: jax.Array
    goal: jax.Array
    steps: jax.Array


@dataclass(frozen=True)
class PointMaze:
    """A point that moves in a maze; a `GoalEnvironment` whose goals are positions.

    An episode starts at a random position with a random goal. An action is a velocity, `[2]` in [-1, 1]; walls block the
    component across them. The reward is -1 per step, and 0 for the step that reaches the goal, which terminates the episode.
    The return is therefore minus the number of steps before the goal, and waiting never pays. `max_steps` truncates. The
    metric `success` tells whether the goal was reached.

    Both `observation` and `achieved_goal` are the position.

    Attributes:
      maze: a name of `MAZES`, `"open"`, `"u"` or `"spiral"`.
      max_steps: maximum number of steps of an episode.
      speed: maximum number of cells per step along each axis, above 0 and below 1.
      tolerance: distance in cells within which the goal is reached.
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
            raise ValueError(f"PointMaze: speed={self.speed!r}; use a number above 0 and below 1, or it could cross walls")
        if not self.tolerance > 0:
            raise ValueError(f"PointMaze: tolerance={self.tolerance!r}; use a number above 0")

    @functools.cached_property
    def walls(self) -> np.ndarray:
        """The walls. `[rows, columns]` bool"""
        return np.array([[c == "#" for c in line.strip()] for line in MAZES[self.maze].split()])

    @property
    def _center(self) -> np.ndarray:
        return np.array(self.walls.shape[::-1], np.float32) / 2

    @property
    def observation_space(self) -> spaces.Dict:
        """Three positions."""
        place = spaces.Box(-self._center, self._center, (2,))
        return spaces.Dict({"observation": place, "achieved_goal": place, "desired_goal": place})

    def reset(self, key: jax.Array) -> tuple[MazeState, dict[str, jax.Array]]:
        """Draws the position and the goal uniformly from the free cells."""
        free = np.argwhere(~self.walls)[:, ::-1].astype(np.float32) - self._center
        cell_key, offset_key = jax.random.split(key)
        cells = jnp.asarray(free)[jax.random.randint(cell_key, (2,), 0, len(free), jnp.int32)]
        place, goal = cells + jax.random.uniform(offset_key, (2, 2), minval=_GAP, maxval=1 - _GAP, dtype=jnp.float32)
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
        """0 and termination within `tolerance`, otherwise -1; see `GoalEnvironment`."""
        reached = jnp.sum((achieved - desired) ** 2) <= self.tolerance**2
        return jnp.where(reached, 0.0, -1.0), reached

    def report(self, state: MazeState) -> dict[str, jax.Array]:
        """Returns the metrics."""
        return {"success": self.goal_reward(state.place, state.goal)[1]}

    def render(self, state: MazeState) -> np.ndarray:
        """Returns the maze from above: the point in blue, the goal in green, drawn smaller if need be. `[H, W, 3]` uint8"""
        image = np.where(self.walls[..., None], 70, 240).astype(np.uint8).repeat(3, -1)
        image = image.repeat(_SCALE, 0).repeat(_SCALE, 1)
        y, x = (np.indices(image.shape[:2]) + 0.5) / _SCALE
        for place, radius, color in ((state.goal, max(self.tolerance, 0.15), (90, 170, 90)), (state.place, 0.2, (40, 80, 200))):
            column, row = np.asarray(place) + self._center
            image[(x - column) ** 2 + (y - row) ** 2 <= radius**2] = color
        return image

    def _slide(self, place: jax.Array, axis: int, move: jax.Array) -> jax.Array:
        """Moves along an axis, at most up to a wall."""
        target = place.at[axis].add(move) + self._center
        cell = jnp.floor(target).astype(jnp.int32)
        edge = jnp.where(move > 0, cell[axis] - _GAP, cell[axis] + 1 + _GAP)
        stops = jnp.asarray(self.walls)[cell[1], cell[0]]
        return place.at[axis].set(jnp.where(stops, edge, target[axis]) - self._center[axis])

    def _observe(self, state: MazeState) -> dict[str, Any]:
        return {"observation": state.place, "achieved_goal": state.place, "desired_goal": state.goal}
