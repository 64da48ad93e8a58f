"""`ResetPool`: resets at a fraction of their cost, for environments whose resets cost more than their steps.

A vectorized environment computes a reset in every step of every copy, because a program without branches has to. Here every
copy has a spare first state, which it takes when its episode ends, and in each step only one of `ratio` adjacent copies gets a
new spare, in turns. (Craftax's optimistic resets, Matthews et al. 2024, arXiv 2402.16801, share fresh states among the copies
instead, so copies whose episodes end in the same step may get the same state.)
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax._checks import whole
from msrl_jax.envs import spaces
from msrl_jax.envs.agents.base import has_agents
from msrl_jax.envs.base import ENV_AXIS, Environment, PyTree, TimeStep, env_name, strong
from msrl_jax.envs.conformity import as_actions, check_key
from msrl_jax.metrics import Mean


@dataclass(frozen=True)
class ResetPool:
    """An environment whose copies compute a new first state only every `ratio` steps.

    The first states of episodes have the distribution that `reset` gives them. But if an episode is shorter than `ratio` steps,
    the next one of the same copy may begin in the same state again; the metric `repeated_starts` is the share of such episodes.
    With `ratio=1` there are none, and the run is the one without a pool, bit for bit.

    Attributes:
      env: the environment, of one agent.
      ratio: steps between two resets of a copy. With a number of copies that it does not divide, their greatest common divisor
        counts.
    """

    env: Environment
    ratio: int = 16

    def __post_init__(self):
        whole(f"ResetPool of {env_name(self.env)}: ratio", self.ratio)
        if has_agents(self.env):
            raise TypeError(f"ResetPool takes environments of one agent, and {env_name(self.env)} has several; leave it out")

    @property
    def name(self) -> str:
        """The name of the environment."""
        return env_name(self.env)

    @property
    def observation_space(self) -> spaces.Space:
        """The space of the environment."""
        return self.env.observation_space

    @property
    def action_space(self) -> spaces.Space:
        """The space of the environment."""
        return self.env.action_space

    @property
    def action_mask(self) -> Any:
        """The legal actions of the environment; AttributeError if it does not name them."""
        return self.env.action_mask  # type: ignore[attr-defined]

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode."""
        return self.env.reset(key)

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> tuple[PyTree, PyTree, jax.Array, jax.Array, jax.Array]:
        """Advances the episode."""
        return self.env.step(key, state, action)


def ratio_of(env: Any) -> int:
    """The `ratio` of a `ResetPool` that is the environment, or that wrappers have inside; 1 if there is none."""
    while env is not None:
        if isinstance(env, ResetPool):
            return env.ratio
        env = getattr(env, "env", None)
    return 1


class PooledState(NamedTuple):
    """The state of copies with spare first states.

    Attributes:
      key: one typed PRNG key per environment, for all its randomness. `[E]`
      env_state: the states of the environments. `[E, ...]`
      spare: the state and the observation with which each environment's next episode begins. `[E, ...]`
      used: whether an episode has begun with the spare. `[E]` bool
      turn: which copy of a group gets the next spare; the same in all. `[E]` int32
      starts: number of episodes that began since `pop_episodes`, but the first. `[E]` float32
      repeats: number of these that began with a used spare. `[E]` float32
    """

    key: jax.Array
    env_state: PyTree
    spare: tuple[PyTree, PyTree]
    used: jax.Array
    turn: jax.Array
    starts: jax.Array
    repeats: jax.Array


@dataclass(frozen=True)
class PooledVectorized:
    """Copies of an environment, each with its own key and a spare first state; `vectorize` makes them of a `ResetPool`.

    A copy's randomness comes from its own key, as without a pool. Groups of `ratio` adjacent copies that are on one device need
    no communication.

    Attributes:
      env: the environment.
      num_envs: number of copies, `E`.
      ratio: size of a group; it divides `num_envs`.
    """

    env: Environment
    num_envs: int
    ratio: int
    axes = ENV_AXIS

    @property
    def name(self) -> str:
        """The name of the environment."""
        return env_name(self.env)

    @property
    def observation_space(self) -> spaces.Space:
        """The space of one environment's observations."""
        return self.env.observation_space

    @property
    def action_space(self) -> spaces.Space:
        """The space of one environment's actions."""
        return self.env.action_space

    def reset(self, key: jax.Array) -> tuple[PooledState, PyTree]:
        """Starts all environments; returns the state and the first observations `[E, ...]`."""
        check_key(key)

        def reset_one(key):
            key, reset_key = jax.random.split(key)
            return key, strong(self.env.reset(reset_key)), strong(self.env.reset(jax.random.fold_in(reset_key, 1)))

        key, (env_state, obs), spare = jax.vmap(reset_one)(jax.random.split(key, self.num_envs))
        zero = jnp.zeros(self.num_envs)
        return PooledState(key, env_state, spare, zero > 0, jnp.zeros(self.num_envs, jnp.int32), zero, zero), obs

    def step(self, state: PooledState, action: PyTree) -> tuple[PooledState, TimeStep]:
        """Advances every environment by one action; one of each group gets a new spare."""
        action = as_actions(self, action, (state.key.shape[0],), "environment")

        def step_one(key, env_state, action):
            key, step_key = jax.random.split(key)
            step_key, reset_key = jax.random.split(step_key)
            return key, reset_key, strong(self.env.step(step_key, env_state, action))

        key, reset_key, stepped = jax.vmap(step_one)(state.key, state.env_state, action)
        env_state, final_obs, reward, terminated, truncated = stepped
        spare, used = self._refresh(state, reset_key)
        done = terminated | truncated

        def begun(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(done.reshape(done.shape + (1,) * (old.ndim - 1)), new, old)

        env_state, obs = jax.tree.map(begun, spare, (env_state, final_obs))
        turn = (state.turn + 1) % self.ratio
        starts, repeats = state.starts + done, state.repeats + (done & used)
        time_step = TimeStep(obs, reward.astype(jnp.float32), terminated, truncated, final_obs)
        return PooledState(key, env_state, spare, used | done, turn, starts, repeats), time_step

    def _refresh(self, state: PooledState, reset_key: jax.Array) -> tuple[tuple[PyTree, PyTree], jax.Array]:
        """The spares and whether they are used, after one copy of each group, whose turn it is, got a new one."""

        def grouped(x: jax.Array) -> jax.Array:
            return x.reshape(-1, self.ratio, *x.shape[1:])

        turn = grouped(state.turn)[:, 0]

        def put(old: jax.Array, new: jax.Array) -> jax.Array:
            return jax.vmap(lambda row, i, x: row.at[i].set(x))(grouped(old), turn, new).reshape(old.shape)

        keys = jax.vmap(lambda row, i: row[i])(grouped(reset_key), turn)
        fresh = jax.vmap(lambda key: strong(self.env.reset(key)))(keys)
        return jax.tree.map(put, state.spare, fresh), put(state.used, jnp.zeros(turn.shape, bool))

    def pop_episodes(self, state: PooledState) -> tuple[PooledState, dict[str, Mean]]:
        """Returns the share of episodes that began as an earlier one, `repeated_starts`, and starts to count again."""
        zero = jnp.zeros_like(state.starts)
        metrics = {"repeated_starts": Mean(state.repeats.sum(), state.starts.sum())}
        return state._replace(starts=zero, repeats=zero), metrics

    def observe(self, state: PooledState, obs: PyTree) -> PyTree:
        """Returns the observations unchanged."""
        return obs

    def statistics(self, state: PooledState) -> tuple[()]:
        """Returns `()`: there are no statistics."""
        return ()

    def with_statistics(self, state: PooledState, statistics: tuple[()]) -> PooledState:
        """Returns the state unchanged."""
        return state


def pooled(env: Environment, num_envs: int, ratio: int) -> PooledVectorized:
    """Copies with spares, for as large a part of the ratio as divides their number."""
    return PooledVectorized(env, num_envs, math.gcd(num_envs, ratio))
