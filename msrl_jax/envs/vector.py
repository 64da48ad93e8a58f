"""`vectorize`: parallel copies of an environment, each with its own key and automatic reset."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs.base import (
    Environment,
    PyTree,
    TimeStep,
    VectorEnvironment,
    WithoutStatistics,
    Wrapper,
    check_made,
    drop_weak_types,
    env_name,
    has_agents,
    iter_wrapped,
    keys_of_step,
)
from msrl_jax.envs.check_types import as_actions, check_key, check_types
from msrl_jax.envs.episode_metrics import reported
from msrl_jax.envs.masks import with_masks
from msrl_jax.envs.multi_agent import vectorize_agents
from msrl_jax.envs.param_sources import advance_source, means, sources, with_source
from msrl_jax.envs.params import ParamSampler
from msrl_jax.envs.reset_pool import ResetPool, Spares, count_starts, first_spares, pop_starts, refill
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.tracebacks import entry


class VectorState(NamedTuple):
    """The state of a vectorized environment.

    Attributes:
      key: one typed PRNG key per environment, the source of all its randomness. `[E]`
      env_state: the states of the environments. `[E, ...]`
      spares: the first states of the next episodes if resets are pooled; otherwise `()`.
      source: the source of the parameters of the next episodes if these are data; otherwise `()`. `[E, ...]`
    """

    key: jax.Array
    env_state: PyTree
    spares: Spares | tuple[()] = ()
    source: ParamSampler | tuple[()] = ()


@entry
def vectorize(env: Environment, num_envs: int) -> VectorEnvironment:
    """Makes `num_envs` parallel copies of an environment, with automatic reset.

    Environments are independent and each has its own key, so trajectories do not depend on how the copies are split over
    devices, and splitting needs no communication.

    If the environment has a method `vectorize(num_envs)`, that method makes the copies. A multi-agent environment becomes
    `VectorizedAgents`. With a method `action_mask(state)`, observations are `MaskedObservation`s.

    Args:
      env: the environment.
      num_envs: number of copies, `E`.

    Returns:
      The vector environment.

    Raises:
      TypeError: if a result of `reset`, `step`, `action_mask` or `report` violates the protocol; the message names it.
      ValueError: if `num_envs` is less than 1, or a metric has an invalid name or an unknown reduction.
    """
    if not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1:
        raise ValueError(f"num_envs={num_envs!r} of {env_name(env)} must be an int of at least 1")
    check_made(env)
    own_method = getattr(env, "vectorize", None)
    if own_method is not None:
        return own_method(num_envs)
    if has_agents(env):
        return vectorize_agents(env, num_envs)  # type: ignore[arg-type,return-value]
    check_types(env)
    return Vectorized(with_masks(env), num_envs, next((x.ratio for x in iter_wrapped(env) if isinstance(x, ResetPool)), 1))


@dataclass(frozen=True)
class Vectorized(WithoutStatistics, Wrapper):
    """The `VectorEnvironment` that `vectorize` returns.

    Attributes:
      env: the environment.
      num_envs: number of copies, `E`.
      ratio: number of steps between two resets of a copy. Above 1, adjacent copies share the resets, see `ResetPool`.
    """

    env: Environment
    num_envs: int
    ratio: int = 1

    def reset(self, key: jax.Array) -> tuple[VectorState, PyTree]:
        """Starts all environments; returns the state and the first observations `[E, ...]`."""
        check_key(key)

        def reset_one(key, source):
            key, reset_key = jax.random.split(key)
            return key, self._reset(reset_key, source)

        keys, source = jax.random.split(key, self.num_envs), sources(self.env, self.num_envs)
        key, (env_state, obs) = jax.vmap(reset_one)(keys, source)
        spares = first_spares(self._reset, keys, source) if self.ratio > 1 else ()
        return VectorState(key, env_state, spares, source), obs

    def step(self, state: VectorState, action: PyTree) -> tuple[VectorState, TimeStep]:
        """Advances every environment by one action, and resets environments at the end of an episode."""
        action = as_actions(self, action, (state.key.shape[0],), "environment")
        spares = state.spares
        if spares:
            reset_keys = jax.vmap(lambda key: keys_of_step(key)[2])(state.key)
            spares = refill(self._reset, spares, (reset_keys, state.source), self.ratio)

        def step_one(key, env_state, action, source, spare):
            key, step_key, reset_key = keys_of_step(key)
            env_state, final_obs, reward, terminated, truncated = drop_weak_types(self.env.step(step_key, env_state, action))
            # Reset in every step: under vmap, a branch is a select anyway, and branching on "any done" would couple the
            # environments.
            metrics = reported(self.env, env_state)
            fresh = self._reset(reset_key, source) if spare is None else spare
            done = terminated | truncated
            env_state, obs = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, (env_state, final_obs))
            return key, env_state, TimeStep(obs, reward.astype(jnp.float32), terminated, truncated, final_obs, metrics=metrics)

        of_copies = (state.key, state.env_state, action, state.source, spares.first if spares else None)
        key, env_state, t = jax.vmap(step_one)(*of_copies)
        if spares:
            spares = count_starts(spares, t.ended)
        return VectorState(key, env_state, spares, advance_source(state.source, self.num_envs)), t

    def _reset(self, key: jax.Array, source: ParamSampler | tuple[()]) -> tuple[PyTree, PyTree]:
        return drop_weak_types(with_source(self.env, source).reset(key))

    def pop_episodes(self, state: VectorState) -> tuple[VectorState, dict[str, Mean]]:
        """Returns the share `repeated_starts` of a `ResetPool` and the means `env_params/NAME` of drawn parameters, if any."""
        metrics = means(state.env_state)
        if not state.spares:
            return state, metrics
        spares, repeated = pop_starts(state.spares)
        return state._replace(spares=spares), metrics | {"repeated_starts": repeated}


def next_states(env: Any, state: Any, action: PyTree) -> PyTree:
    """Returns the states of the copies in `Vectorized` or `VectorizedAgents` after a step, before any reset. `[E, ...]`"""
    keys = jax.vmap(lambda key: keys_of_step(key)[1])(state.key)
    return drop_weak_types(jax.vmap(env.env.step)(keys, state.env_state, action)[0])
