"""Environments: the protocol of one, which a user writes, the protocol of `E` side by side, which training uses, and its step.

In the shape descriptions, `E` is the number of environments that run side by side.
"""

from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from msrl_jax.envs.spaces import Space
from msrl_jax.metrics import Mean

PyTree: TypeAlias = Any
"""A pytree of arrays."""


class Environment(Protocol):
    """One environment as pure functions: no automatic reset, no key in the state.

    Any class with these members is an environment; there is nothing to inherit. The state is a pytree of arrays whose
    structure, shapes and dtypes never change. An attribute `name` is used in messages, if there is one.
    """

    @property
    def observation_space(self) -> Space:
        """The space of the observations, which have exactly its shapes and dtypes."""
        ...

    @property
    def action_space(self) -> Space:
        """The space of the actions."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode.

        Args:
          key: typed PRNG key (`jax.random.key`).

        Returns:
          The state, and the first observation.
        """
        ...

    def step(
        self, key: jax.Array, state: PyTree, action: PyTree
    ) -> tuple[PyTree, PyTree, jax.Array, jax.Array, jax.Array]:
        """Advances an episode by one action.

        Args:
          key: typed PRNG key, a fresh one for every step.
          state: the state that `reset` or the last `step` returned.
          action: an element of `action_space`.

        Returns:
          The next state; its observation, also at the end of the episode; the reward, a scalar; `terminated`, a bool: the
          task is over and no reward can follow; `truncated`, a bool: the episode was cut off, for example by a time limit.
        """
        ...


class TimeStep(NamedTuple):
    """The outcome of one step of `E` environments.

    If both flags are set, `terminated` counts: the value of `final_obs` is zero.

    Attributes:
      obs: the observation to act on next: the first one of a new episode if an episode ended. `[E, ...]`
      reward: reward of the step. `[E]`, float32
      terminated: the episode reached an end of the task. `[E]`, bool
      truncated: the episode was cut off; its return bootstraps from the value of `final_obs`. `[E]`, bool
      final_obs: the true next observation, before any reset. `[E, ...]`
    """

    obs: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: PyTree


class VectorEnvironment(Protocol):
    """`E` environments side by side, which reset themselves when an episode ends.

    `vectorize` makes one of an `Environment`; wrappers add statistics and normalization to it.
    """

    @property
    def num_envs(self) -> int:
        """How many environments `reset` starts: `E`."""
        ...

    @property
    def observation_space(self) -> Space:
        """The space of one environment's observations."""
        ...

    @property
    def action_space(self) -> Space:
        """The space of one environment's actions."""
        ...

    @property
    def axes(self) -> PyTree:
        """Logical axes of the state: a prefix of it with a `PartitionSpec` for each part, `P("env")` or `P()`."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts all environments, each with a key of its own.

        Args:
          key: one typed PRNG key.

        Returns:
          The state, and the first observations `[E, ...]`.
        """
        ...

    def step(self, state: PyTree, action: PyTree) -> tuple[PyTree, TimeStep]:
        """Advances all environments by one action each, and resets those whose episode ends.

        Args:
          state: the state that `reset` or the last `step` returned.
          action: one action for each environment. `[E, ...]`

        Returns:
          The next state, and the `TimeStep`.
        """
        ...

    def pop_episodes(self, state: PyTree) -> tuple[PyTree, dict[str, Mean]]:
        """Takes the metrics of episodes that ended since the last call out of the state; `{}` if none are kept."""
        ...

    def observe(self, state: PyTree, obs: PyTree) -> PyTree:
        """Transforms raw observations as `step` does (normalization).

        Args:
          state: the state with the statistics.
          obs: observations of the innermost environment, `[..., *obs_shape]`.

        Returns:
          Observations as `reset` and `step` return them, of the same shape.
        """
        ...

    def statistics(self, state: PyTree) -> PyTree:
        """The running statistics in the state; `()` if there are none."""
        ...

    def with_statistics(self, state: PyTree, statistics: PyTree) -> PyTree:
        """The state with other running statistics, for example those of training in an evaluation."""
        ...


ENV_AXIS = PartitionSpec("env")
"""The logical axis of the leading dimension of every array that has an entry per environment."""


def env_name(env: Environment | VectorEnvironment) -> str:
    """The name of an environment in messages."""
    return str(getattr(env, "name", type(env).__name__))


def strong(tree: Any) -> Any:
    """The same values as arrays without weak types: a state keeps its types through a scan."""

    def convert(x):
        x = jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(convert, tree)
