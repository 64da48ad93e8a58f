"""`check`: tests an environment and reports where it violates the protocol."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.tree_util import keystr

from msrl_jax.envs import spaces
from msrl_jax.envs.base import ENV_AXIS, Environment, PyTree, drop_weak_types, env_name, has_agents, is_on_host
from msrl_jax.envs.check_types import in_short, line_of_user
from msrl_jax.envs.episode_metrics import metrics_of
from msrl_jax.envs.goals import goals_of
from msrl_jax.envs.images import unseen_images
from msrl_jax.envs.masks import has_masks, mask_of, sample_legal, unmasked
from msrl_jax.envs.privileged import with_privileged
from msrl_jax.envs.registry import make
from msrl_jax.envs.vector import Vectorized, vectorize
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.tracebacks import entry


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `check`.

    Attributes:
      name: the name of the environment.
      steps: number of steps taken, over all copies.
      episodes: number of episodes that ended.
      problems: violations of the protocol, with remedies; empty if there are none.
      notes: what is allowed, but usually unintended.
    """

    name: str
    steps: int
    episodes: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the check found no problems."""
        return not self.problems

    def __str__(self) -> str:
        outcome = "conforms" if self.ok else f"has {len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        head = f"{self.name} {outcome}; {self.steps:,} random steps, {self.episodes:,} episodes ended"
        lines = [f"problem: {text}" for text in self.problems] + [f"note: {text}" for text in self.notes]
        return "\n".join([head, *lines])


@entry
def check(env: Environment | str, *, steps: int = 200, num_envs: int = 4, seed: int = 0) -> Report:
    """Takes random legal actions in an environment and checks its results against the protocol.

    It checks shapes and dtypes, bounds, non-finite values, observations after the end of an episode, legal actions, metrics,
    randomness that does not come from keys, side effects, and whether `vmap` and `shard_map` change results. It compiles a few
    programs, so it takes seconds, and longer for simulators.

    Args:
      env: the environment, or its name for `make`.
      steps: number of steps of each copy.
      num_envs: number of copies, `E`.
      seed: seed of keys and actions.

    Returns:
      The report; `report.ok` is True if it has no problems, and `print(report)` lists them.
    """
    steps, num_envs = whole("steps", steps), whole("num_envs", num_envs)
    if isinstance(env, str):
        env = make(env)
    name = env_name(env)
    try:
        env = with_privileged(env)
        venv = vectorize(env, num_envs)
    except Exception as error:
        if (line := line_of_user(error)) is None and not isinstance(error, TypeError | ValueError):
            raise
        return Report(name, 0, 0, (str(error) if line is None else f"{name} fails at {line}: {in_short(error)}",), ())
    key = jax.random.key(seed)
    first, history = jax.device_get(jax.jit(lambda key: _play(venv, key, steps))(key))
    second_run = jax.device_get(jax.jit(lambda key: _play(venv, key, steps))(key))  # a new function, so it is traced again
    problems = [*_check_effects(venv, name), *_check_values(env, name, first, history), *_check_ends(name, history)]
    random = list(_check_same(name, (first, history), second_run))
    problems += random or [*_check_alone(name, history), *_check_split(venv, key)]  # these compare two programs
    return Report(
        name, steps * num_envs, int(history["ended"].sum()), tuple(problems), tuple(_make_notes(env, name, first, history))
    )


def _act(venv: Any, key: jax.Array, obs: PyTree) -> PyTree:
    """Random legal actions of all copies, and of all agents if there are several."""
    batch, mask = (venv.num_envs, *([len(venv.agents)] if has_agents(venv) else [])), mask_of(obs)
    sample = venv.action_space.sample if mask is None else sample_legal
    for _ in batch:
        sample = jax.vmap(sample)
    return sample(jax.random.split(key, batch), *([] if mask is None else [mask]))


def _play(venv: Any, key: jax.Array, steps: int) -> tuple[PyTree, dict[str, Any]]:
    """Returns the first observations, and the results of each step `[T, E, ...]`; `alone` steps the first copy without vmap."""
    reset_key, key = jax.random.split(key)
    plain = isinstance(venv, Vectorized)

    def step(carry: tuple[Any, PyTree], key: jax.Array) -> tuple[Any, dict[str, Any]]:
        state, obs = carry
        action = _act(venv, key, obs)
        new_state, t = venv.step(state, action)
        outcome = t._asdict() | {"ended": t.ended, "mask": mask_of(t.obs), "had_mask": mask_of(obs)}
        outcome |= {"obs": unmasked(t.obs), "final_obs": unmasked(t.final_obs)}
        if _is_game(venv):
            outcome["to_move"] = jax.vmap(venv.env.to_move)(venv.states(new_state))
        if plain:
            step_key, _ = jax.random.split(jax.random.split(state.key[0])[1])
            env_state, action = jax.tree.map(lambda x: x[0], (state.env_state, action))
            _, *results = drop_weak_types(venv.env.step(step_key, env_state, action))
            outcome["alone"] = (unmasked(results[0]), results[1].astype(jnp.float32), *results[2:])
        return (new_state, t.obs), outcome

    state, obs = venv.reset(reset_key)
    _, history = jax.lax.scan(step, (state, obs), jax.random.split(key, steps))
    return obs, history


def _check_effects(venv: Any, name: str) -> Iterator[str]:
    def once(key: jax.Array) -> Any:
        state, obs = venv.reset(key)
        return venv.step(state, _act(venv, key, obs))

    # Simulators on the host are host calls.
    if not is_on_host(venv) and (effects := jax.make_jaxpr(once)(jax.random.key(0)).effects):
        yield (
            f"{name} has side effects ({', '.join(sorted(map(str, effects)))}); a program may run them in any order, or more "
            "than once: return values in the state or the observation instead"
        )


def _check_values(env: Any, name: str, first: PyTree, history: dict[str, Any]) -> Iterator[str]:
    """Bounds, finite numbers, legal actions."""
    for method, obs in {"reset": unmasked(first), "step": history["final_obs"]}.items():
        for path, space, x in spaces.arrays_of(env.observation_space, obs):
            yield from _check_bounds(space, np.asarray(x), f"the observation of {name}.{method}{path}")
    reward, mask, had_mask = (history[field] for field in ("reward", "mask", "had_mask"))
    if mask is not None:
        valid = np.ones(had_mask.shape[:-1], bool) if (valid := history.get("valid")) is None else valid
        if (valid & ~had_mask.any(-1)).any() or (~mask.any(-1) & ~history["terminated"]).any():
            yield f"{name}.action_mask allows no action in a state in which the episode continues; allow at least one"
            return
    if bad := int((~np.isfinite(reward)).sum()):
        yield f"the reward of {name}.step is {reward[~np.isfinite(reward)].flat[0]} in {bad} of {reward.size} steps"
    for k, metric in enumerate(metrics_of(env)):
        x = history["metrics"][..., k]
        if (bad := ~np.isfinite(x)).any() and not is_on_host(env):  # on the host, nan marks a step without an answer
            yield f"the metric {metric!r} of {name}.report is {x[bad].flat[0]} in {bad.sum()} of {x.size} steps"
    if (player := history.get("to_move")) is None:
        return
    if (bad := ~np.isin(player, (0, 1))).any():
        yield f"{name}.to_move is {player[bad].flat[0]} in a game that continues; return 0 or 1, the number of an agent"
    if (bad := ~np.isclose(reward.sum(-1), 0, atol=1e-5)).any():
        total = reward.sum(-1)[bad].flat[0]
        yield f"the rewards of {name}.step sum to {total:g}; a two-player game must be zero-sum"


def _is_game(venv: Any) -> bool:
    """Whether two players move alternately, as search algorithms require."""
    return has_agents(venv) and len(venv.agents) == 2 and callable(getattr(getattr(venv, "env", None), "to_move", None))


def _check_bounds(space: spaces.Discrete | spaces.Box, x: np.ndarray, place: str) -> Iterator[str]:
    """Yields how many values `[..., *shape]` are outside a space."""
    low, high = space.low, space.high
    inexact = np.issubdtype(x.dtype, np.inexact)
    if inexact and not np.isfinite(x).all():
        yield f"{place} has {x[~np.isfinite(x)].flat[0]}; observations must be finite"
        return
    below, above = (1e-5 * np.maximum(np.abs(bound), 1) if inexact else 0 for bound in (low, high))  # tolerate rounding
    for side, bad in {"below": x < low - below, "above": x > high + above}.items():
        if bad.any():
            index = tuple(int(i) for i in np.argwhere(bad)[0][x.ndim - len(space.shape) :])
            at_index = f" at index {index}" if index else ""
            yield (
                f"{place} is {x[bad].flat[0]}{at_index}, {side} the bounds of its observation_space, {space}; widen the space, "
                "or clip the observation"
            )


def _is_equal(x: Any, y: Any) -> bool:
    return np.array_equal(x, y, equal_nan=x.dtype.kind == "f")


def _is_close(x: Any, y: Any) -> bool:
    """Whether two results of the same step in different programs are close; XLA's fusions change rounding."""
    return np.allclose(np.asarray(x, np.float64), np.asarray(y, np.float64), rtol=1e-3, atol=1e-4, equal_nan=True)


def _different_paths(first: PyTree, second: PyTree, is_same: Callable[[Any, Any], bool] = _is_equal) -> list[Any]:
    """Returns the paths of the leaves in which two trees with the same structure differ."""
    leaves = zip(jax.tree.leaves_with_path(first), jax.tree.leaves(second), strict=True)
    return [path for (path, x), y in leaves if not is_same(x, y)]


def _check_ends(name: str, history: dict[str, Any]) -> Iterator[str]:
    """Checks that the final observation equals the next one, unless the episode ended."""
    obs, final_obs = jax.tree.map(lambda x: x[~history["ended"]], (history["obs"], history["final_obs"]))
    for path in _different_paths(obs, final_obs):
        yield (
            f"obs and final_obs{keystr(path)} of {name}.vectorize(...).step differ in steps that do not end an episode; "
            "final_obs is the observation before any reset"
        )


def _check_same(name: str, first_run: PyTree, second_run: PyTree) -> Iterator[str]:
    for path in _different_paths(first_run, second_run)[:1]:
        yield (
            f"{name} returned a different {_label(path)} in a second run with the same keys and actions; draw all random "
            "numbers from the keys of reset and step, never from NumPy or the clock"
        )


def _label(path: Any) -> str:
    """Returns the name of a leaf of the result of `_play`."""
    keys = [str(getattr(part, "key", getattr(part, "idx", part))) for part in path]
    return "first observation" if keys[0] == "0" else "step" if keys[1] == "alone" else keys[1]


def _check_alone(name: str, history: dict[str, Any]) -> Iterator[str]:
    if "alone" not in history:
        return
    batched = (history["final_obs"], history["reward"], history["terminated"], history["truncated"])
    for path in _different_paths(history["alone"], jax.tree.map(lambda x: x[:, 0], batched), _is_close):
        part = ("observation", "reward", "terminated", "truncated")[path[0].idx]
        yield f"the {part}{keystr(path[1:])} of {name}.step differs under jax.vmap"


def _check_split(venv: Any, key: jax.Array) -> Iterator[str]:
    """Checks that splitting the copies over devices does not change the results of one step from the first states."""
    if not isinstance(venv, Vectorized):
        return
    venv = dataclasses.replace(venv, ratio=1)  # a pool needs whole groups, and a device may have fewer copies
    state, obs = jax.jit(venv.reset)(key)
    action = jax.jit(lambda key, obs: _act(venv, key, obs))(key, obs)
    count = max(n for n in range(1, len(jax.local_devices()) + 1) if venv.num_envs % n == 0)
    mesh = Mesh(np.array(jax.local_devices()[:count]), ("env",))
    try:
        split = jax.shard_map(venv.step, mesh=mesh, in_specs=ENV_AXIS, out_specs=ENV_AXIS, check_vma=False)
        whole_result, split_result = jax.device_get((jax.jit(venv.step)(state, action)[1], jax.jit(split)(state, action)[1]))
    except Exception as error:  # the environment may raise anything; report it
        yield f"{venv.name}.step fails under jax.shard_map: {type(error).__name__}: {error}"
        return
    for path in _different_paths(whole_result, split_result, _is_close):
        yield f"{venv.name}.step under jax.shard_map over {count} devices returns a different {keystr(path).lstrip('.')}"


def _make_notes(env: Any, name: str, first: PyTree, history: dict[str, Any]) -> Iterator[str]:
    yield from unseen_images(env)
    if not history["ended"].any():
        yield f"no episode of {name} ended in {len(history['ended'])} steps; returns need the end of an episode"
    ends = history["terminated"].all(-1) if has_agents(env) else history["terminated"]
    if (ends & history["truncated"]).any():
        yield f"some steps of {name} both terminate and truncate; terminated takes precedence, so no value is bootstrapped"
    if hasattr(env, "report") and not metrics_of(env):
        yield f"{name} has a method report, but no metrics, so it is not called; declare metrics = {{'success': 'last'}}"
    leaves = jax.tree.leaves(unmasked(first))
    if len(history["ended"][0]) > 1 and all((x == x[:1]).all() for x in leaves):
        yield f"all first observations of {name} are equal; if episodes should start differently, use the key or seed of reset"
    if (mask := history["mask"]) is not None and has_masks(env) and mask.all():
        yield f"{name}.action_mask allowed all actions in all states"
    if hasattr(env, "goal_reward"):
        yield from _check_goals(env, name, history)


def _check_goals(env: Any, name: str, history: dict[str, Any]) -> Iterator[str]:
    """Checks that the rewards of steps equal `goal_reward`, which HER uses instead."""
    try:
        goals, obs = goals_of(env), history["final_obs"]
    except (TypeError, ValueError) as error:
        yield str(error)
        return
    reward, ends = jax.device_get(jax.jit(jax.vmap(jax.vmap(goals.reward)))(goals.achieved(obs), goals.desired(obs)))
    if (bad := ~np.isclose(reward, history["reward"], rtol=1e-3, atol=1e-4)).any():
        yield (
            f"the reward of {name}.step is {history['reward'][bad][0]} where its goal_reward is {reward[bad][0]}; relabelled "
            "steps get the latter"
        )
    if (ends & ~history["terminated"]).any():
        yield f"{name}.goal_reward terminates where {name}.step does not; they must agree"
