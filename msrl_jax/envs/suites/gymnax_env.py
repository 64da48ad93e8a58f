"""gymnax environments as `Environment`s."""

import copy
import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs.base import NamedEnvironment
from msrl_jax.envs.suites.common import loaded_at_first_use
from msrl_jax.fragments.support.checks import shown

with loaded_at_first_use("seaborn", "matplotlib.pyplot"):  # only for figures, and two thirds of the import time
    import gymnax
from gymnax.environments import spaces as gymnax_spaces
from gymnax.environments.environment import Environment as GymnaxBase
from gymnax.environments.environment import EnvParams

from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, Stepped, output_shapes, to_32_bit
from msrl_jax.envs.suites import common
from msrl_jax.fragments.support.checks import whole

_KNOWN = {  # methods that are not needed here, by the names of their definitions
    "reset": {"gymnax.environments.environment.Environment.reset"},
    # DeepSea's step differs from the common one only in counters kept across resets, which nothing else uses.
    "step": {"gymnax.environments.environment.Environment.step", "gymnax.environments.bsuite.deep_sea.DeepSea.step"},
}

_CLASSIC = ("Acrobot-v1", "CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0")  # drawn by Gymnasium
_DRAWN = (
    "Asterix-MinAtar",
    "Breakout-MinAtar",
    "Freeway-MinAtar",
    "Seaquest-MinAtar",
    "SpaceInvaders-MinAtar",
    "Pong-misc",
    "Catch-bsuite",
    "PointRobot-misc",
    "MetaMaze-misc",
    "FourRooms-misc",
)
_NUMBERS = (bool, int, float, np.ndarray, np.generic, jax.Array)


class GymnaxEnvironment(NamedEnvironment):
    """A gymnax environment with its parameters, by default gymnax's, without automatic reset.

    To reproduce gymnax's `step` with one key, split the key with `jax.random.split`, call `step` with the first half, and
    `reset` with the second if the episode ended. The reward is always float32. No array has a weak type. The observation space
    has the actual shapes and dtypes of observations.
    """

    def __init__(self, env: GymnaxBase, params: Any = None, name: str = ""):
        kind = type(env)
        for method, usual_names in _KNOWN.items():
            method_of_env = getattr(kind, method)
            if f"{method_of_env.__module__}.{method_of_env.__qualname__}" not in usual_names:
                raise ValueError(
                    f"{kind.__name__} overrides gymnax's {method}, which is not called here; move its code to reset_env, "
                    "step_env and is_truncated"
                )
        self.env, self.params, self.name = env, env.default_params if params is None else params, name or kind.__name__
        _, obs = output_shapes(self.reset)
        self.observation_space = _convert_space(env.observation_space(self.params), obs)
        action_space = env.action_space(self.params)
        self.action_space = _convert_space(action_space, output_shapes(lambda key: to_32_bit(action_space.sample(key))))

    @property
    def default_params(self) -> dict[str, Any]:
        """The parameters that are numbers or numeric arrays, by name."""
        fields = [field.name for field in dataclasses.fields(self.params) if field.metadata.get("pytree_node", True)]
        return {name: x for name in fields if isinstance(x := getattr(self.params, name), _NUMBERS)}

    def with_params(self, params: Mapping[str, Any]) -> "GymnaxEnvironment":
        """Returns the environment with other, possibly traced, values for some parameters; its spaces stay the same."""
        env = copy.copy(self)  # spaces cannot be computed from traced parameters
        env.params = dataclasses.replace(self.params, **params)
        return env

    def __repr__(self) -> str:
        defaults = vars(self.env.default_params)
        params = {name: x for name, x in vars(self.params).items() if isinstance(x, int | float) and x != defaults.get(name)}
        return f"{type(self).__name__}({', '.join([repr(self.name), *(f'{name}={x}' for name, x in params.items())])})"

    @property
    def render_fps(self) -> float:
        """Frames per second, higher for continuous motion."""
        return 30.0 if self.env.name in _CLASSIC else 10.0

    @functools.cached_property
    def _screen(self) -> Any:
        import gymnasium

        common.no_windows()
        try:
            screen = gymnasium.make(self.env.name, render_mode="rgb_array").unwrapped
            screen.reset()
            screen.render()
        except (ImportError, gymnasium.error.DependencyNotInstalled) as error:
            raise ValueError(f"pygame, which draws {self.name}, is not installed: pip install 'msrl-jax[video]'") from error
        return screen

    def render(self, state: PyTree) -> np.ndarray:
        """Returns an image rendered by gymnax's visualizer."""
        if self.env.name in _CLASSIC:
            vis_gym = common.load("gymnax.visualize.vis_gym")
            vis_gym.set_gym_params(self._screen, self.env.name, self.params)
            self._screen.state = vis_gym.get_gym_state(state, self.env.name)
            if hasattr(state, "last_u"):
                self._screen.last_u = np.asarray(state.last_u, np.float64)
            return self._screen.render()
        if self.env.name not in _DRAWN:
            raise ValueError(f"gymnax cannot draw {self.name}; it draws {', '.join((*_CLASSIC, *_DRAWN))}")
        import matplotlib.pyplot as plt

        visualizer = common.load("gymnax.visualize").Visualizer(self.env, self.params, [state])
        try:
            visualizer.init()
            visualizer.update(0)
            visualizer.ax.set_title(self.name)  # without the step number, which is unknown
            return common.image_of(visualizer.fig)
        finally:
            plt.close(visualizer.fig)

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        obs, state = self.env.reset_env(key, self.params)
        return to_32_bit(state), to_32_bit(obs)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Advances the episode."""
        obs, state, reward, terminated, _ = self.env.step_env(key, state, action, self.params)
        truncated = self.env.is_truncated(state, self.params)
        reward, terminated, truncated = jnp.float32(reward), jnp.bool_(terminated), jnp.bool_(truncated)
        return to_32_bit(state), to_32_bit(obs), reward, terminated, truncated


def make(name: str, **params: Any) -> GymnaxEnvironment:
    """Makes an environment by its gymnax name.

    Parameters are fields of its `EnvParams` (`max_steps_in_episode=100`) and arguments of its constructor (`size=10` for
    DeepSea).
    """
    env, defaults = _construct(name, {})
    fields = [field.name for field in dataclasses.fields(defaults)]
    arguments = {n: p.default for n, p in inspect.signature(type(env)).parameters.items() if n not in fields}
    common.check_params(name, params, [*fields, *arguments])
    if options := {p: common.fit(f"{name}: {p}", value, arguments[p]) for p, value in params.items() if p in arguments}:
        env, defaults = _construct(name, options)
    defaults = common.replace(name, defaults, {p: value for p, value in params.items() if p in fields})
    if "max_steps_in_episode" in params:
        whole(f"{name}: max_steps_in_episode", defaults.max_steps_in_episode)
    return GymnaxEnvironment(env, defaults, name)


def _construct(name: str, arguments: dict[str, Any]) -> tuple[GymnaxBase, EnvParams]:
    try:
        return gymnax.make(name, **arguments)
    except OSError as error:
        raise RuntimeError(
            f"{name} could not load its data ({error}); gymnax downloads it at first use, so connect to the internet, "
            "or put the four MNIST files of https://storage.googleapis.com/cvdf-datasets/mnist/ into /tmp/mnist"
        ) from error


def _convert_space(space: gymnax_spaces.Space, x: PyTree) -> spaces.Space:
    """Returns a gymnax space with the shapes and dtypes of its actual values; some declarations are wrong (Catch,
    FourRooms).
    """
    if isinstance(space, gymnax_spaces.Discrete):
        return spaces.Discrete(space.n, x.dtype)
    if isinstance(space, gymnax_spaces.Box):
        return spaces.Box(space.low, space.high, x.shape, x.dtype)
    if isinstance(space, gymnax_spaces.Tuple):
        return spaces.Tuple(tuple(_convert_space(part, value) for part, value in zip(space.spaces, x, strict=True)))
    if isinstance(space, gymnax_spaces.Dict):
        return spaces.Dict({name: _convert_space(part, x[name]) for name, part in space.spaces.items()})
    raise TypeError(f"the gymnax space {shown(space)} is not supported; use Discrete, Box, Tuple or Dict")
