"""`vectorize`: parallel copies of an environment, each with its own key and automatic reset."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from msrl_jax.envs import param_source, reset_pool
from msrl_jax.envs.agents.base import has_agents
from msrl_jax.envs.agents.vector import vectorize_agents
from msrl_jax.envs.base import ENV_AXIS, Environment, PyTree, TimeStep, VectorEnvironment, Wrapper, check_made, env_name, strong
from msrl_jax.envs.check_types import as_actions, check_key, check_types
from msrl_jax.envs.masks import with_masks
from msrl_jax.envs.params import ParamSource
from msrl_jax.envs.reset_pool import Spares
from msrl_jax.fragments.metrics import Mean


class VectorState(NamedTuple):
    """The state of a vectorized environment.

    Attributes:
      key: one typed PRNG key per environment, for all its randomness. `[E]`
      env_state: the states of the environments. `[E, ...]`
      spares: what their next episodes begin with, if resets are pooled; else `()`.
      source: what the parameters of their next episodes are drawn from, if these are data; else `()`. `[E, ...]`
    """

    key: jax.Array
    env_state: PyTree
    spares: Spares | tuple[()] = ()
    source: ParamSource | tuple[()] = ()


def vectorize(env: Environment, num_envs: int) -> VectorEnvironment:
    """Makes `num_envs` parallel copies of an environment, with automatic reset.

    Environments do not depend on each other, and each has its own key. So trajectories do not depend on the split over
    devices, and the split needs no communication.

    If the environment has a method `vectorize(num_envs)`, that method makes the copies. An environment of several agents
    becomes `VectorizedAgents`. With a method `action_mask(state)`, observations are `MaskedObservation`s.

    Args:
      env: the environment.
      num_envs: number of copies, `E`.

    Returns:
      The vector environment.

    Raises:
      TypeError: if a result of `reset`, `step` or `action_mask` does not fit the protocol; the message names it.
      ValueError: if `num_envs` is not at least 1.
    """
    if not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1:
        raise ValueError(f"num_envs={num_envs!r} of {env_name(env)} must be an int of at least 1")
    check_made(env)
    own = getattr(env, "vectorize", None)
    if own is not None:
        return own(num_envs)
    if has_agents(env):
        return vectorize_agents(env, num_envs)  # type: ignore[arg-type,return-value]
    check_types(env)
    return Vectorized(with_masks(env), num_envs, reset_pool.ratio_of(env))


@dataclass(frozen=True)
class Vectorized(Wrapper):
    """The `VectorEnvironment` that `vectorize` returns.

    Attributes:
      env: the environment.
      num_envs: number of copies, `E`.
      ratio: steps between two resets of a copy. Above 1, adjacent copies share the resets, as `ResetPool` says.
    """

    env: Environment
    num_envs: int
    ratio: int = 1
    axes = ENV_AXIS

    def reset(self, key: jax.Array) -> tuple[VectorState, PyTree]:
        """Starts all environments; returns the state and the first observations `[E, ...]`."""
        check_key(key)

        def reset_one(key, source):
            key, reset_key = jax.random.split(key)
            return key, strong(param_source.with_source(self.env, source).reset(reset_key))

        def spare_one(key, source):
            reset_key = jax.random.split(key)[1]
            return strong(param_source.with_source(self.env, source).reset(jax.random.fold_in(reset_key, 1)))

        keys, source = jax.random.split(key, self.num_envs), param_source.sources(self.env, self.num_envs)
        key, (env_state, obs) = jax.vmap(reset_one)(keys, source)
        spares = () if self.ratio == 1 else reset_pool.fill(jax.vmap(spare_one)(keys, source))
        return VectorState(key, env_state, spares, source), obs

    def step(self, state: VectorState, action: PyTree) -> tuple[VectorState, TimeStep]:
        """Advances every environment by one action, and resets environments at the end of an episode."""
        action = as_actions(self, action, (state.key.shape[0],), "environment")

        def reset(key, source):
            return strong(param_source.with_source(self.env, source).reset(key))

        spares = state.spares
        if spares:
            reset_keys = jax.vmap(lambda key: _keys(key)[2])(state.key)
            together = math.gcd(self.num_envs, self.ratio)
            spares = reset_pool.renew(reset, spares, (reset_keys, state.source), self.ratio, together)

        def step_one(key, env_state, action, source, spare):
            key, step_key, reset_key = _keys(key)
            env_state, final_obs, reward, terminated, truncated = strong(self.env.step(step_key, env_state, action))
            # Reset in every step: under vmap a branch is a select anyway, and a branch on "any done" would couple the
            # environments.
            fresh = reset(reset_key, source) if spare is None else spare
            done = terminated | truncated
            env_state, obs = jax.tree.map(lambda new, old: jnp.where(done, new, old), fresh, (env_state, final_obs))
            return key, env_state, TimeStep(obs, reward.astype(jnp.float32), terminated, truncated, final_obs)

        of_copies = (state.key, state.env_state, action, state.source, spares.first if spares else None)
        key, env_state, t = jax.vmap(step_one)(*of_copies)
        spares = reset_pool.take(spares, t.ended) if spares else ()
        return VectorState(key, env_state, spares, param_source.after_step(state.source, self.num_envs)), t

    def pop_episodes(self, state: VectorState) -> tuple[VectorState, dict[str, Mean]]:
        """Returns the share `repeated_starts` of a `ResetPool` and the means `env_params/NAME` of drawn parameters, if any."""
        metrics = param_source.means(state.env_state)
        if not state.spares:
            return state, metrics
        spares, shares = reset_pool.pop_repeats(state.spares)
        return state._replace(spares=spares), metrics | shares

    def observe(self, state: VectorState, obs: PyTree) -> PyTree:
        """Returns the observations unchanged."""
        return obs

    def statistics(self, state: VectorState) -> tuple[()]:
        """Returns `()`: there are no statistics."""
        return ()

    def with_statistics(self, state: VectorState, statistics: tuple[()]) -> VectorState:
        """Returns the state unchanged."""
        return state


def _keys(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The next key of a copy, and the keys of its step and of its reset."""
    key, step_key = jax.random.split(key)
    step_key, reset_key = jax.random.split(step_key)
    return key, step_key, reset_key
