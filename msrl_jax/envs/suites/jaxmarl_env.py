"""JaxMARL's environments (https://github.com/FLAIROx/JaxMARL) as multi-agent environments."""

import contextlib
import dataclasses
import functools
import io
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import MultiAgentEnvironment, PyTree, output_shapes, to_32_bit
from msrl_jax.envs.stacking import stack_agents
from msrl_jax.envs.suites import common
from msrl_jax.envs.suites.catalog import SUITES

# Arguments of JaxMARL's particle environments that are not part of a signature.
_PHYSICS = {
    "accel",
    "c_noise",
    "collide",
    "contact_force",
    "contact_margin",
    "damping",
    "mass",
    "max_speed",
    "moveable",
    "rad",
    "silent",
    "u_noise",
}


def make(name: str, **params: Any) -> MultiAgentEnvironment:
    """Makes an environment by its JaxMARL name, with padded spaces if its agents differ (`stack_agents`).

    Parameters are constructor arguments. `scenario` of SMAX and `layout` of Overcooked may be names, such as `"3m"`.
    `shaped_reward` of Overcooked is the weight of the shaped rewards, which are added to the others.
    """
    full = common.full_name("jaxmarl", name, _registration().registered_envs)
    if package := SUITES["jaxmarl"].lacks(name):
        remedy = f"install it with: pip install {package}" if package == "brax" else "it is not on PyPI, see JaxMARL's README"
        raise ImportError(f"{full} needs the package {package!r}, which JaxMARL does not install; {remedy}")
    suite = next((suite for start, suite in _SUITES.items() if name.startswith(start)), _Suite(_tasks))
    weight = _weight(full, params.pop("shaped_reward", 0.0)) if suite.shapes_rewards else 0.0
    with common.quiet():
        params = {key: _look_up_name(full, key, value) for key, value in params.items()}
        if suite.ending is _brax:
            params["auto_reset"] = False
        make = functools.partial(_registration().make, name)
        try:
            env = common.build(full, make, params)
        except ValueError:
            with contextlib.suppress(TypeError):  # without parameters; the constructor may require some
                _check_params(full, suite, params, make())
            raise
        _check_params(full, suite, params, env)
        return stack_agents(JaxMARLEnvironment(env, full, suite, weight))


def _registration() -> Any:
    """JaxMARL's registry. Restores the standard streams, which one of its modules replaces by the original ones."""
    streams, began_with = (sys.stdout, sys.stderr), sys.__stdout__
    sys.__stdout__ = io.StringIO()  # type: ignore[misc]
    try:
        return common.load("jaxmarl.registration")
    finally:
        (sys.stdout, sys.stderr), sys.__stdout__ = streams, began_with  # type: ignore[misc]


def _check_params(full: str, suite: "_Suite", params: dict[str, Any], env: Any) -> None:
    """Raises ValueError for a parameter that no constructor has: those with `**kwargs` ignore it."""
    parameters = common.arguments_of(type(env)) | common.arguments_of(type(getattr(env, "_env", env)))
    parameters |= _PHYSICS if hasattr(env, "contact_margin") else set()
    common.check_params(full, params, parameters | ({"shaped_reward"} if suite.shapes_rewards else set()))


def _weight(full: str, value: Any) -> float:
    number = not isinstance(value, bool) and isinstance(value, int | float | np.integer | np.floating)
    if not number or not 0 <= float(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{full}: shaped_reward={value!r} is not a weight; use a finite float32 of at least 0, such as 1.0")
    return float(value)


def _look_up_name(full: str, key: str, value: Any) -> Any:
    """Replaces the name of a scenario or layout by its value; returns other values unchanged."""
    if not isinstance(value, str) or (key, full) == ("layout", "jaxmarl:overcooked_v2"):
        return value
    if key == "scenario":
        from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO as table  # type: ignore
    elif key == "layout":
        from jaxmarl.environments.overcooked.layouts import overcooked_layouts as table  # type: ignore
    else:
        return value
    common.check_name(full, value, table, key)
    return table[value]


# Distinguishes termination from the time limit, which JaxMARL's dones do not. From the environment, the states before and after
# a step, the actions and the dones, it returns `terminated`, per agent (`[A]`) or one flag for all, and `truncated`.
Ending = Callable[[Any, Any, Any, Mapping[Any, jax.Array], Mapping[Any, jax.Array]], tuple[jax.Array, jax.Array]]


def _time_limit(env: Any, old: Any, new: Any, actions: Any, dones: Any) -> tuple[jax.Array, jax.Array]:
    """Episodes that end only by the time limit."""
    return jnp.asarray(False), dones["__all__"]


def _tasks(env: Any, old: Any, new: Any, actions: Any, dones: Any) -> tuple[jax.Array, jax.Array]:
    """Episodes that end when the task is over for all agents; an agent may leave earlier."""
    return jnp.stack([dones[agent] | dones["__all__"] for agent in env.agents]), jnp.asarray(False)


def _battle(env: Any, old: Any, new: Any, actions: Any, dones: Any) -> tuple[jax.Array, jax.Array]:
    """SMAX: a side is dead, or time is up. JaxMARL marks dead units as done, but they share the rewards of their team."""
    alive = getattr(new, "state", new).unit_alive
    ended = ~alive[: env.num_allies].any() | ~alive[env.num_allies :].any()
    return ended, dones["__all__"] & ~ended


def _won(env: Any, state: Any) -> jax.Array:
    """SMAX: whether all enemies are dead and an ally is alive; the mean over episodes is the win rate."""
    alive = getattr(state, "state", state).unit_alive
    return ~alive[env.num_allies :].any() & alive[: env.num_allies].any()


def _share_at_goal(env: Any, state: Any) -> jax.Array:
    """JaxNav: the share of agents that have reached their goals."""
    return state.goal_reached.mean()


def _riddle(env: Any, old: Any, new: Any, actions: Any, dones: Any) -> tuple[jax.Array, jax.Array]:
    """Switch Riddle: the agent in the room announces that all have visited it, or time is up."""
    told_all = jnp.stack([actions[agent] for agent in env.agents])[old.agent_in_room] == env.game_actions["TELL"]
    return told_all, dones["__all__"] & ~told_all


def _navigation(env: Any, old: Any, new: Any, actions: Any, dones: Any) -> tuple[jax.Array, jax.Array]:
    """JaxNav: every agent has arrived or crashed, or time is up. Agents share rewards until then."""
    ended = (new.goal_reached | new.move_term | new.term).all()
    return ended, dones["__all__"] & ~ended


def _brax(env: Any, old: Any, new: Any, actions: Any, dones: Any) -> tuple[jax.Array, jax.Array]:
    """Brax's own flag."""
    truncated = new.info["truncation"].astype(bool)
    return dones["__all__"] & ~truncated, truncated


@dataclasses.dataclass(frozen=True)
class _Suite:
    """Differences between JaxMARL's suites of environments."""

    ending: Ending
    legal: str = ""  # the name of the method that returns the legal actions, if there is one
    has_world_state: bool = False  # whether `get_world_state` returns one vector for all agents
    takes_tuples: bool = False  # whether actions are a tuple instead of a dict
    shapes_rewards: bool = False  # whether a step also reports shaped rewards
    success: Callable[[Any, Any], jax.Array] | None = None  # (environment, state) -> the completed share of the task


_SMAX = _Suite(_battle, "get_avail_actions", has_world_state=True, success=_won)
_SUITES = {  # by name prefix
    "MPE_": _Suite(_time_limit),
    "overcooked": _Suite(_time_limit, shapes_rewards=True),
    "coin_game": _Suite(_time_limit),
    "storm": _Suite(_time_limit, takes_tuples=True),
    "hanabi": _Suite(_tasks, "get_legal_moves"),
    "SMAX": _SMAX,
    "HeuristicEnemySMAX": _SMAX,
    "LearnedPolicyEnemySMAX": _SMAX,
    "switch_riddle": _Suite(_riddle),
    "jaxnav": _Suite(_navigation, success=_share_at_goal),
    **dict.fromkeys(("ant_", "halfcheetah_", "hopper_", "humanoid_", "walker2d_"), _Suite(_brax)),
}


class JaxMARLEnvironment:
    """An environment of JaxMARL without automatic reset, with dicts by agent name for `stack_agents`.

    The step is JaxMARL's `step_env` with the same key. Rewards are float32. No array has a weak type.
    """

    def __init__(self, env: Any, name: str, suite: _Suite, shaped_reward: float = 0.0):
        """Reads the spaces of an environment; `shaped_reward` is the weight of the shaped rewards that it reports."""
        self.env, self.name, self.suite, self.shaped_reward = env, name, suite, shaped_reward
        self.agents = tuple(agent if isinstance(agent, str) else f"agent_{agent}" for agent in env.agents)
        _, obs = output_shapes(self.reset)
        suite_names = dict(zip(self.agents, env.agents, strict=True))
        self.observation_spaces = {a: _observation_space(env.observation_space(suite_names[a]), obs[a]) for a in self.agents}
        self.action_spaces = {a: _action_space(env.action_space(suite_names[a])) for a in self.agents}
        if suite.legal and all(isinstance(space, spaces.Discrete) for space in self.action_spaces.values()):
            self.action_mask = self._action_mask
        if suite.has_world_state:
            self.global_state = env.get_world_state
        if (success := suite.success) is not None:
            self.metrics, self.report = {"success": "last"}, lambda state: {"success": success(env, state)}

    def reset(self, key: jax.Array) -> tuple[PyTree, dict[str, PyTree]]:
        """Starts an episode."""
        with common.quiet():
            obs, state = self.env.reset(key)
        return to_32_bit(state), self._by_agent(to_32_bit(obs))

    def step(
        self, key: jax.Array, state: PyTree, action: Mapping[str, PyTree]
    ) -> tuple[PyTree, dict[str, PyTree], dict[str, jax.Array], dict[str, jax.Array], jax.Array]:
        """Advances the episode by JaxMARL's `step_env`."""
        actions = dict(zip(self.env.agents, (action[agent] for agent in self.agents), strict=True))
        suite_actions = tuple(actions.values()) if self.suite.takes_tuples else actions
        with common.quiet():
            obs, new, reward, dones, info = self.env.step_env(key, state, suite_actions)
        rewards = {agent: jnp.float32(x) for agent, x in self._by_agent(reward).items()}
        if self.shaped_reward:
            shaped = self._by_agent(info["shaped_reward"])
            rewards = {agent: reward + jnp.float32(self.shaped_reward * shaped[agent]) for agent, reward in rewards.items()}
        terminated, truncated = self.suite.ending(self.env, state, new, actions, dones)
        flags = jnp.broadcast_to(terminated, (len(self.agents),))
        return to_32_bit(new), self._by_agent(to_32_bit(obs)), rewards, dict(zip(self.agents, flags, strict=True)), truncated

    render_fps = 10.0

    def render(self, state: PyTree) -> np.ndarray:
        """Returns an image of a particle environment, rendered by JaxMARL's visualizer."""
        if not hasattr(state, "p_pos"):
            raise ValueError(f"{self.name} cannot be drawn; only JaxMARL's visualizer of particle environments is supported")
        import matplotlib.pyplot as plt

        with common.quiet():
            visualizer = common.load("jaxmarl.environments.mpe.mpe_visualizer").MPEVisualizer(self.env, [state])
        try:
            return common.image_of(visualizer.fig)
        finally:
            plt.close(visualizer.fig)

    def _action_mask(self, state: PyTree) -> dict[str, jax.Array]:
        return {agent: mask.astype(bool) for agent, mask in self._by_agent(getattr(self.env, self.suite.legal)(state)).items()}

    def _by_agent(self, values: Any) -> dict[str, Any]:
        """Values by agent name. JaxMARL uses names, numbers, a tuple, or arrays `[A, ...]`."""
        suite_names = self.env.agents
        if isinstance(values, Mapping) and all(agent in values for agent in suite_names):
            return {name: values[agent] for name, agent in zip(self.agents, suite_names, strict=True)}
        if isinstance(values, tuple):
            return dict(zip(self.agents, values, strict=True))
        if isinstance(values, Mapping) and "inventory" in values:  # storm: `[5, A]`
            values = {**values, "inventory": values["inventory"].T}
        return {name: jax.tree.map(lambda x, i=i: x[i], values) for i, name in enumerate(self.agents)}


def _observation_space(declared: Any, output_shapes: PyTree) -> spaces.Space:
    """Returns the space of an agent's observations, with JaxMARL's declared bounds; some declared shapes and dtypes are
    wrong.
    """
    if isinstance(output_shapes, Mapping):
        parts = getattr(declared, "spaces", declared)
        part = parts.get if isinstance(parts, Mapping) else {}.get
        return spaces.Dict({name: _observation_space(part(name), x) for name, x in output_shapes.items()})
    if hasattr(declared, "n"):
        return spaces.Discrete(int(declared.n), output_shapes.dtype)
    low, high = (getattr(declared, bound, infinite) for bound, infinite in (("low", -np.inf), ("high", np.inf)))
    if hasattr(declared, "num_categories"):  # a MultiDiscrete
        low, high = 0, np.asarray(declared.num_categories) - 1
    if np.shape(low) not in ((), output_shapes.shape) or np.shape(high) not in ((), output_shapes.shape):
        low, high = np.min(low), np.max(high)
    if jnp.issubdtype(output_shapes.dtype, jnp.integer):
        limits = jnp.iinfo(output_shapes.dtype)
        low, high = (np.clip(np.asarray(bound, float), limits.min, limits.max) for bound in (low, high))
    return spaces.Box(low, high, output_shapes.shape, output_shapes.dtype)


def _action_space(space: Any) -> spaces.Space:
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))  # all of JaxMARL's environments accept int32, whatever they declare
    return spaces.Box(np.asarray(space.low), np.asarray(space.high), tuple(space.shape), space.dtype)
