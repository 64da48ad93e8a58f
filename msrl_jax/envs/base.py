"""The protocols of environments: `Environment`, which a user writes, and `VectorEnvironment`, which training uses.

In the shape descriptions of this package, `E` is the number of parallel environments and `A` the number of agents in each.
"""

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from msrl_jax.envs.episode_metrics import Reduction, metrics_of
from msrl_jax.envs.spaces import Space
from msrl_jax.fragments.metrics import Mean
from msrl_jax.fragments.support.checks import shown

PyTree: TypeAlias = Any  # of arrays

Stepped: TypeAlias = tuple[PyTree, PyTree, jax.Array, jax.Array, jax.Array]
"""What a step of an environment returns: the state, the observation, the reward, `terminated` and `truncated`."""

ENV_AXIS = PartitionSpec("env")  # the logical axis of arrays with one entry per environment


class Environment(Protocol):
    """One environment as pure functions: no automatic reset, no key in the state.

    Any class with these members is an environment; a base class is not needed. The state is a pytree of arrays whose structure,
    shapes and dtypes are constant. Messages use the attribute `name`, if present. Optional members:

    - `action_mask(state)`: returns bool `[n]`, which of the `n` actions of a `Discrete` space are legal.
    - `privileged_state(state)`: what the critic sees instead of the observation, an array or dicts and tuples of arrays.
    - `metrics` and `report(state)`: `metrics` maps names to how they are reduced over an episode, "last", "sum", "mean" or
      "max"; `report` returns the scalars of the state after a step by name. Several agents share them.
    - `default_params` and `with_params(params)`: a mapping from names to numbers or arrays, and a method that returns the same
      environment with other, possibly traced, values for some of them. See `RandomizeParams`.
    - `render(state)` and `render_fps`: for videos, the image of a state, `[H, W, 3]` uint8, always of the same size, and the
      number of frames per second. `render` is called with NumPy arrays, outside `jax.jit`.

    See `goals.GoalEnvironment` for goal-conditioned environments.
    """

    @property
    def observation_space(self) -> Space:
        """The space of the observations; observations have exactly its shapes and dtypes."""
        ...

    @property
    def action_space(self) -> Space:
        """The space of the actions."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts an episode from a typed PRNG key (`jax.random.key`); returns the state and the first observation."""
        ...

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> Stepped:
        """Advances an episode by one action.

        Args:
          key: typed PRNG key, a new one for every step.
          state: the state that `reset` or the last `step` returned.
          action: an element of `action_space`.

        Returns:
          The next state; the next observation, also at the end of the episode; the reward, a scalar; `terminated`, a bool:
          the episode reached a terminal state and no further reward is possible; `truncated`, a bool: the episode was cut
          short, for example by a time limit.
        """
        ...


class MaskedObservation(NamedTuple):
    """An observation with its legal actions.

    `vectorize` creates it for an environment with a method `action_mask(state)`.

    Attributes:
      obs: the observation. `[..., *observation_shape]`
      action_mask: whether each of the `n` discrete actions is legal. `[..., n]` bool
    """

    obs: PyTree
    action_mask: jax.Array


class TimeStep(NamedTuple):
    """The outcome of one step of `E` environments.

    If both flags are set, `terminated` takes precedence: the value of `final_obs` is zero.

    Attributes:
      obs: the observation for the next action; it is the first of a new episode if the episode ended. `[E, ...]`
      reward: reward of the step. `[E]`, float32
      terminated: whether the episode reached a terminal state. `[E]`, bool
      truncated: whether the episode was cut short; its return bootstraps from the value of `final_obs`. `[E]`, bool
      final_obs: the true next observation, before any reset. `[E, ...]`
      valid: whether the environment answered; None if all always do. Steps without an answer are not used for learning;
        `truncated` then means that the episode is lost. `[E]` bool
      metrics: what `report` returned for the true next states, in the order of `metrics`; nan where the environment did not
        answer; None if it has no metrics, or outside `EpisodeStatistics`. `[E, K]` float32
    """

    obs: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: PyTree
    valid: jax.Array | None = None
    metrics: jax.Array | None = None

    @property
    def ended(self) -> jax.Array:
        """Whether the episode ended. `[E]` bool."""
        return self.terminated | self.truncated


class MultiAgentEnvironment(Environment, Protocol):
    """An environment with `A` agents as pure functions: no automatic reset, no key in the state.

    Arrays of agents have a leading dimension `A`, including the observations that `reset` returns. The spaces are those of one
    agent; all agents have the same spaces (`stack_agents` pads smaller ones). The attribute `agents` distinguishes such an
    environment from a single-agent one.

    Three methods are optional. `action_mask(state) -> [A, n]` bool: the legal actions of every agent. `global_state(state) ->
    [S]` float32: the input of a centralized critic or a mixer; without it, they see the observations of all agents.
    `to_move(state)`, an integer: which of two players moves, in deterministic games with perfect information.
    """

    @property
    def agents(self) -> tuple[str, ...]:
        """The names of the agents, in the order of all arrays."""
        ...

    def step(self, key: jax.Array, state: PyTree, action: PyTree) -> Stepped:
        """Advances an episode by one action of every agent.

        Args:
          key: typed PRNG key, a fresh one for every step.
          state: the state that `reset` or the last `step` returned.
          action: an element of `action_space` for every agent; those of agents that have left are ignored. `[A, ...]`

        Returns:
          The next state; the next observations `[A, ...]`; the rewards `[A]`; `terminated` `[A]` bool: which agents have
          reached a terminal state and can receive no further reward; `truncated`, a bool: the episode was cut short.
          The episode ends when it is truncated, or when all agents have terminated.
        """
        ...


class MultiAgentTimeStep(NamedTuple):
    """The outcome of one step of `E` environments with `A` agents.

    An agent that has terminated is absent until its episode ends: its rewards are 0, and it stays terminated.

    Attributes:
      obs: observations for the next actions; the first of a new episode if the episode ended. `[E, A, ...]`
      reward: rewards. `[E, A]` float32
      terminated: which agents have terminated in this step or before. `[E, A]` bool
      truncated: whether the episode was cut short. `[E]` bool
      final_obs: the true next observations, before any reset. `[E, A, ...]`
      valid: which agents were in the episode when they acted, so that the step is valid for them. `[E, A]` bool
      ended: whether the episode ended: it was truncated, or all agents have terminated. `[E]` bool
      state: the global state for the next actions. `[E, S]` float32
      final_state: the global state that belongs to `final_obs`. `[E, S]` float32
      metrics: those of the environments, as in `TimeStep`. `[E, K]` float32
    """

    obs: PyTree
    reward: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    final_obs: PyTree
    valid: jax.Array
    ended: jax.Array
    state: jax.Array
    final_state: jax.Array
    metrics: jax.Array | None = None


class VectorEnvironment(Protocol):
    """`E` parallel environments with automatic reset.

    `vectorize` makes one from an `Environment`; wrappers add statistics and normalization.
    """

    @property
    def num_envs(self) -> int:
        """The number of environments that `reset` starts, `E`."""
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
        """Logical axes of the state: a prefix tree of the state with `P("env")` or `P()` for each part."""
        ...

    def reset(self, key: jax.Array) -> tuple[PyTree, PyTree]:
        """Starts all environments, each with its own key; returns the state and the first observations `[E, ...]`."""
        ...

    def step(self, state: PyTree, action: PyTree) -> tuple[PyTree, TimeStep]:
        """Advances every environment by one action `[E, ...]`, and resets environments at the end of an episode."""
        ...

    def pop_episodes(self, state: PyTree) -> tuple[PyTree, dict[str, Mean]]:
        """Removes the metrics of the episodes that ended since the last call from the state; returns them, possibly `{}`."""
        ...

    def observe(self, state: PyTree, obs: PyTree) -> PyTree:
        """Transforms observations of the innermost environment `[..., *obs_shape]` as `step` does, e.g. normalizes them."""
        ...

    def statistics(self, state: PyTree) -> PyTree:
        """Returns the running statistics in the state; `()` if there are none."""
        ...

    def with_statistics(self, state: PyTree, statistics: PyTree) -> PyTree:
        """Replaces the running statistics in the state, for example in an evaluation by those of training."""
        ...


def delegate(name: str) -> Any:
    """Makes a property that returns the attribute `name` of the inner environment `env`."""
    return property(attrgetter(f"env.{name}"), doc=f"The `{name}` of the inner environment.")


class Wrapper:
    """Base class of wrappers: the name, spaces and metrics of `env`, the inner environment or vector environment.

    `env` is the first argument of every wrapper; a string or a class raises TypeError.
    """

    env: Any

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Checks `env` before the wrapper reads from it; copying calls this without arguments."""
        if args or kwargs:
            check_made(args[0] if args else kwargs.get("env"))
        return super().__new__(cls)

    name = property(lambda self: env_name(self.env))
    observation_space = delegate("observation_space")
    action_space = delegate("action_space")

    @property
    def metrics(self) -> Mapping[str, Reduction]:
        """How the metrics of the environment are reduced, by name."""
        return metrics_of(self.env)


class NamedEnvironment:
    """An environment whose repr is its name."""

    name: str

    def __repr__(self) -> str:
        kind = type(self).__name__
        return f"{kind}({'' if self.name == kind else repr(self.name)})"


class WithoutStatistics:
    """A part of vector environments without running statistics: it passes observations through unchanged."""

    axes = ENV_AXIS

    def observe(self, state: PyTree, obs: PyTree) -> PyTree:
        """Returns the observations unchanged."""
        return obs

    def statistics(self, state: PyTree) -> tuple[()]:
        """Returns `()`, because it has no statistics."""
        return ()

    def with_statistics(self, state: PyTree, statistics: tuple[()]) -> PyTree:
        """Returns the state unchanged."""
        return state


def env_name(env: object) -> str:
    """Returns the name of an environment for messages."""
    return str(getattr(env, "name", type(env).__name__))


def check_made(env: object) -> None:
    """Raises TypeError if `env` is not an environment, but a name, a class, or an object without the methods."""
    if isinstance(env, str):
        raise TypeError(f"the environment {env!r} is a string; pass the result of msrl_jax.envs.make({env!r})")
    if isinstance(env, type):
        raise TypeError(f"the environment {env.__name__} is a class; pass an instance, {env.__name__}(...)")
    if not any(hasattr(type(env), name) or hasattr(env, name) for name in ("reset", "step", "vectorize")):
        raise TypeError(f"the environment is {shown(env)}, which has no reset; pass an environment, e.g. from envs.make")


def has_agents(env: object) -> bool:
    """Whether an environment has several agents: whether it has an attribute `agents`."""
    return hasattr(env, "agents")


def is_on_host(env: object) -> bool:
    """Whether an environment, or the one inside its wrappers, is simulated on the host: it has copies, but no state."""
    return any(getattr(inner, "on_host", False) for inner in iter_wrapped(env))


def iter_wrapped(env: object) -> Iterator[Any]:
    """Yields an environment and those inside its wrappers, outermost first."""
    while env is not None:
        yield env
        env = getattr(env, "env", None)


def close_simulators(env: object) -> None:
    """Stops the simulators of a vector environment until they are needed again; does nothing if it has none."""
    for inner in iter_wrapped(env):
        if is_on_host(inner) and hasattr(inner, "simulators"):
            inner.simulators.close()


def keys_of_step(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits the key of a copy into its next key, the key of its step and that of its reset."""
    key, step_key = jax.random.split(key)
    step_key, reset_key = jax.random.split(step_key)
    return key, step_key, reset_key


def output_shapes(function: Callable[[jax.Array], PyTree]) -> PyTree:
    """Returns the shapes and dtypes that a function of a typed key returns, without running it."""
    return jax.eval_shape(function, jax.eval_shape(lambda: jax.random.key(0)))


def drop_weak_types(tree: Any) -> Any:
    """Converts values to arrays without weak types, so that a state keeps its types in `jax.lax.scan`."""

    def convert(x):
        x = jnp.asarray(x)
        return x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else jax.lax.convert_element_type(x, x.dtype)

    return jax.tree.map(convert, tree)


def to_32_bit(tree: Any) -> Any:
    """Like `drop_weak_types`, and converts 64-bit floats and integers, which `jax_enable_x64` makes of suites' defaults."""

    def convert(x):
        return x.astype({"float64": "float32", "int64": "int32", "uint64": "uint32"}.get(x.dtype.name, x.dtype))

    return jax.tree.map(convert, drop_weak_types(tree))
