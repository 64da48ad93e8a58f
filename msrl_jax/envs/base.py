"""What an environment is: the protocol a user writes, the vectorized one that training uses, and the step between them.

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
        """Where observations come from; they have exactly its shapes and dtypes."""
        ...

    @property
    def action_space(self) -> Space:
        """Where actions come from."""
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
          state: what `reset` or the last `step` returned.
          action: an element of `action_space`.

        Returns:
          The next state; its observation, also where the episode ends; the reward, a scalar; `terminated`, a bool: the
          task is over and no reward can follow; `truncated`, a bool: the episode was cut off, by a time limit say.
        """
        ...


class TimeStep(NamedTuple):
    """What one step of `E` environments gives.

    Where both flags are set, `terminated` wins: the value of `final_obs` is zero.

    Attributes:
      obs: what the policy acts on next: the first of a new episode where one ended. `[E, ...]`
      reward: of the step. `[E]`, float32
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
        """Where the observations of one environment come from."""
        ...

    @property
    def action_space(self) -> Space:
        """Where the actions of one environment come from."""
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
        """Advances all environments by one action each, and starts anew those whose episode ends.

        Args:
          state: what `reset` or the last `step` returned.
          action: `[E, ...]`.

        Returns:
          The next state, and the `TimeStep`.
        """
        ...

    def drain(self, state: PyTree) -> tuple[PyTree, dict[str, Mean]]:
        """Takes the metrics that were gathered since the last drain out of the state; `{}` if none are."""
        ...

    def observe(self, state: PyTree, obs: PyTree) -> PyTree:
        """Does to raw observations what `step` does to them (normalization).

        Args:
          state: whose statistics are used.
          obs: observations of the innermost environment, `[..., *obs_shape]`.

        Returns:
          Observations as `reset` and `step` return them, of the same shape.
        """
        ...

    def statistics(self, state: PyTree) -> PyTree:
        """The running statistics in the state; `()` if there are none."""
        ...

    def with_statistics(self, state: PyTree, statistics: PyTree) -> PyTree:
        """The state with the running statistics of another one, such as those of training in an evaluation."""
        ...


ENV_AXIS = PartitionSpec("env")
"""The logical axis that every per-environment array carries in its leading dimension."""


def env_name(env: Environment | VectorEnvironment) -> str:
    """What messages call an environment."""
    return str(getattr(env, "name", type(env).__name__))


def strong(tree: Any) -> Any:
    """The same values as arrays without weak types, so that a state keeps its types through a scan."""

    def convert(x):
        x = jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(convert, tree)
