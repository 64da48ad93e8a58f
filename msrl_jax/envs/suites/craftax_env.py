"""Environments of Craftax (https://github.com/MichaelTMatthews/Craftax; Matthews et al. 2024, arXiv 2402.16801)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import NamedEnvironment, PyTree, Stepped, output_shapes, to_32_bit
from msrl_jax.envs.reset_pool import ResetPool
from msrl_jax.envs.suites import common
from msrl_jax.envs.suites.catalog import SUITES


def make(name: str, *, reset_ratio: int = 16, **params: Any) -> ResetPool:
    """Makes an environment of Craftax, such as "Craftax-Classic-Symbolic-v1"; `reset_ratio` is that of `ResetPool`.

    Resets are pooled, because generating a world takes as long as hundreds of steps. Other parameters are fields of its
    `EnvParams`, such as `max_timesteps`, and of its `StaticEnvParams`, such as `map_size`.
    """
    full = common.full_name("craftax", name, SUITES["craftax"].own_names)
    env = common.load("craftax.craftax_env").make_craftax_env_from_name(name, auto_reset=False)
    fields, static = ({f.name for f in dataclasses.fields(x)} for x in (env.default_params, env.default_static_params()))
    common.check_params(full, params, fields | static | {"reset_ratio"})
    if static_values := {key: value for key, value in params.items() if key in static}:
        env = common.build(
            full, type(env), {"static_env_params": common.replace(full, env.default_static_params(), static_values)}
        )
    values = {key: value for key, value in params.items() if key in fields}
    return ResetPool(CraftaxEnvironment(env, common.replace(full, env.default_params, values), full), reset_ratio)


class CraftaxEnvironment(NamedEnvironment):
    """An environment of Craftax without its automatic reset; `params` are its `EnvParams`.

    Death, lava and defeating the last boss terminate an episode; `max_timesteps` truncates it. The metrics are the
    achievements: whether each was unlocked in the episode.
    """

    def __init__(self, env: Any, params: Any, name: str):
        self.env, self.params, self.name = env, params, name
        _, obs = output_shapes(self.reset)
        declared = env.observation_space(params)
        self.observation_space = spaces.Box(np.asarray(declared.low), np.asarray(declared.high), obs.shape, obs.dtype)
        self.action_space = spaces.Discrete(env.action_space(params).n)
        constants = common.load("craftax.craftax_classic.constants" if "Classic" in name else "craftax.craftax.constants")
        self._achievements = {achievement.name.lower(): achievement.value for achievement in constants.Achievement}
        self.metrics = dict.fromkeys(self._achievements, "last")

    def reset(self, key: jax.Array) -> tuple[PyTree, jax.Array]:
        """Starts an episode in a new world."""
        obs, state = self.env.reset_env(key, self.params)
        return to_32_bit(state), to_32_bit(obs)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> Stepped:
        """Advances the episode."""
        obs, state, reward, _, _ = self.env.step_env(key, state, action, self.params)
        endless = dataclasses.replace(self.params, max_timesteps=np.iinfo(np.int32).max)
        terminated = jnp.bool_(self.env.is_terminal(state, endless))
        truncated = (state.timestep >= self.params.max_timesteps) & ~terminated
        return to_32_bit(state), to_32_bit(obs), jnp.float32(reward), terminated, truncated

    render_fps = 8.0

    @functools.cached_property
    def _draw(self) -> Any:
        world = "craftax.craftax_classic" if "Classic" in self.name else "craftax.craftax"
        size = common.load(f"{world}.constants").BLOCK_PIXEL_SIZE_IMG
        return jax.jit(common.load(f"{world}.renderer").make_craftax_pixel_renderer(size))

    def render(self, state: Any) -> np.ndarray:
        """Returns the view of the player."""
        return np.asarray(self._draw(state)).clip(0, 255).astype(np.uint8)

    def report(self, state: Any) -> dict[str, jax.Array]:
        """Returns which achievements were unlocked so far."""
        return {name: state.achievements[number] for name, number in self._achievements.items()}
