"""The point in a maze: no step crosses a wall, and all else is as it says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.envs.mazes import MAZES, MazeState, PointMaze


def moved(walls, place, action, speed, gap=0.01):
    """A step in plain Python, from the corner of the maze: along x, then along y, and to the next wall at most."""
    place = [float(x) for x in place]
    for axis in (0, 1):
        target = list(place)
        target[axis] += speed * min(max(float(action[axis]), -1.0), 1.0)
        cell = [int(np.floor(x)) for x in target]
        if walls[cell[1]][cell[0]]:
            target[axis] = cell[axis] - gap if action[axis] > 0 else cell[axis] + 1 + gap
        place = target
    return place


@pytest.mark.parametrize("maze", [maze for maze in MAZES if maze != "open"])
def test_steps_are_those_of_plain_python_and_cross_no_wall(maze):
    env, steps, copies = PointMaze(maze, tolerance=0.2), 200, 16
    center = np.array(env.walls.shape[::-1]) / 2

    @jax.jit
    def play(key):
        def step(state, key):
            # Pushed for a while into one direction each: into corners too.
            action = 1.5 * jax.random.normal(jax.random.fold_in(jax.random.key(7), state.steps[0] // 8), (copies, 2))
            after, obs, *outcome = jax.vmap(env.step, (None, 0, 0))(key, state, action)
            return after, (state, action, after, obs, outcome)

        state, _ = jax.vmap(env.reset)(jax.random.split(key, copies))
        return jax.lax.scan(step, state, jax.random.split(key, steps))[1]

    state, action, after, obs, (reward, terminated, truncated) = jax.tree.map(np.asarray, play(jax.random.key(0)))
    touched = 0
    for i in np.ndindex(steps, copies):
        want = moved(env.walls, state.place[i] + center, action[i], env.speed)
        np.testing.assert_allclose(after.place[i] + center, want, atol=1e-4)
        touched += any(abs(x % 1 - gap) < 1e-4 for x in want for gap in (0.01, 0.99))
    column, row = np.floor(after.place + center).astype(int).transpose(2, 0, 1)
    assert not env.walls[row, column].any() and touched > 100
    distance = np.linalg.norm(after.place - state.goal, axis=-1)
    reached, clear = distance <= env.tolerance, np.abs(distance - env.tolerance) > 1e-4
    np.testing.assert_array_equal(terminated[clear], reached[clear])
    np.testing.assert_array_equal(reward, np.where(terminated, 0, -1))
    np.testing.assert_array_equal(truncated, (after.steps >= env.max_steps) & ~terminated)
    for key, place in {"observation": after.place, "achieved_goal": after.place, "desired_goal": state.goal}.items():
        np.testing.assert_array_equal(obs[key], place)


@pytest.mark.parametrize("maze", MAZES)
def test_every_free_cell_is_a_start_and_a_goal_and_can_be_reached(maze):
    env = PointMaze(maze)
    state, _ = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 4000))
    for places in (state.place, state.goal):
        x, y = np.floor(np.asarray(places) + np.array(env.walls.shape[::-1]) / 2).astype(int).T
        counts = np.zeros(env.walls.shape, int)
        np.add.at(counts, (y, x), 1)
        np.testing.assert_array_equal(counts > 0, ~env.walls)
        assert counts[~env.walls].min() > 0.5 * 4000 / (~env.walls).sum()
    reached = np.zeros_like(env.walls)
    reached[tuple(np.argwhere(~env.walls)[0])] = True
    for _ in range(env.walls.size):
        near = np.logical_or.reduce([np.roll(reached, shift, axis) for shift in (-1, 1) for axis in (0, 1)])
        reached |= near & ~env.walls
    np.testing.assert_array_equal(reached, ~env.walls)


@pytest.mark.long
def test_it_is_registered_and_conforms_and_reports_success():
    assert "PointMaze" in envs.names()
    env = envs.make("PointMaze:maze=u,max_steps=20,tolerance=1.0")
    report = envs.check(env, steps=60)
    assert report.ok and not report.notes and report.episodes > 0
    venv = envs.EpisodeStatistics(envs.vectorize(env, 64))

    @jax.jit
    def play(key):
        def step(state, key):
            state, t = venv.step(state, jax.random.uniform(key, (64, 2), minval=-1))
            return state, (t.terminated, t.ended)

        state, ends = jax.lax.scan(step, venv.reset(key)[0], jax.random.split(key, 60))
        return venv.pop_episodes(state)[1], ends

    means, (terminated, ended) = play(jax.random.key(0))
    assert means["episode_success"].total == terminated.sum() > 0 and means["episode_success"].count == ended.sum()


def test_its_picture_shows_walls_the_goal_and_the_point():
    env = PointMaze("open")
    image = env.render(jax.tree.map(np.asarray, MazeState(jnp.array([-2.0, 1.0]), jnp.array([1.5, -1.0]), jnp.int32(0))))
    assert image.shape == (7 * 32, 7 * 32, 3) and image.dtype == np.uint8
    at = lambda x, y: tuple(image[int((y + 3.5) * 32), int((x + 3.5) * 32)])
    assert at(-2, 1) == (40, 80, 200) and at(1.5, -1) == at(1.8, -1) == (90, 170, 90)
    assert at(-3.2, 0) == (70, 70, 70) and at(0, 0) == (240, 240, 240)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"maze": "spirl"}, r"PointMaze: maze='spirl' \(did you mean 'spiral'\?\); use one of open, u, spiral"),
        ({"max_steps": 0}, "PointMaze: max_steps=0: use an integer of at least 1"),
        ({"speed": 1.0}, "PointMaze: speed=1.0; use a number above 0 and below 1"),
        ({"tolerance": 0}, "PointMaze: tolerance=0; use a number above 0"),
    ],
)
def test_bad_input_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        msrl.envs.make("PointMaze", **options)
