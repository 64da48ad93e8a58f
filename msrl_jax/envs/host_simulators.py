"""Simulators on the host as vector environments: the protocol of simulators, and copies whose step is a host call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, TimeStep, WithoutStatistics, Wrapper
from msrl_jax.envs.check_types import as_actions, check_key
from msrl_jax.fragments.graph.host_calls import host_fragment, received
from msrl_jax.fragments.metrics import Mean


class HostStep(NamedTuple):
    """The outcome of a step, as in `TimeStep`; NumPy arrays `[E, ...]` that nothing else writes to."""

    obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: Any
    valid: np.ndarray
    metrics: np.ndarray | None = None  # nan where the environment did not answer. `[E, K]` float32


class Simulators(Protocol):
    """`E` environments outside JAX, with automatic reset."""

    def reset(self, envs: np.ndarray, seeds: np.ndarray) -> Any:
        """Starts episodes of the environments with numbers `envs` `[N]` and seeds `[N]`; returns observations `[N, ...]`."""
        ...

    def start(self, action: np.ndarray) -> Callable[[], HostStep]:
        """Starts a step with the actions `[E, ...]`; returns a function that waits for the outcome."""
        ...

    def close(self) -> None:
        """Stops the environments."""
        ...


class HostState(NamedTuple):
    """The part of the run's state that describes host simulators, which keep the rest themselves. `[E]`"""

    seed: jax.Array  # uint32
    steps: jax.Array  # uint32, modulo 2**32
    asked: jax.Array  # float32: number of steps since `pop_episodes`
    absent: jax.Array  # float32: number of these that the environment did not answer


@dataclass(frozen=True)
class HostVectorized(WithoutStatistics, Wrapper):
    """`E` copies of an environment on the host as a `VectorEnvironment`, whose step is a host call between programs.

    The state records the step that each simulator must have reached. A simulator at a different step, because a run was resumed
    or an old state was used again, starts a new episode, and the step is not valid: `valid` is False.
    """

    env: Any
    num_envs: int
    simulators: "Stepping"

    def reset(self, key: jax.Array) -> tuple[HostState, PyTree]:
        """Starts all environments, each with its own seed; returns the state and the first observations `[E, ...]`."""
        check_key(key)
        seed = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(jax.random.split(key, self.num_envs))
        results = self._row(jnp.uint32), self._observations()
        steps, obs = host_fragment(self.simulators.reset, results, name="reset")(seed)
        zero = jnp.zeros(self.num_envs, jnp.float32)
        return HostState(seed, steps, zero, jnp.copy(zero)), received(obs, "env")

    def step(self, state: HostState, action: PyTree) -> tuple[HostState, TimeStep]:
        """Advances every environment by one action; environments reset at the end of an episode."""
        action = as_actions(self, action, (self.num_envs,), "environment")
        obs, flag = self._observations(), self._row(jnp.bool_)
        metrics = (self._row(jnp.float32, len(self.metrics)),) if self.metrics else ()
        results = self._row(jnp.uint32), (obs, self._row(jnp.float32), flag, flag, obs, flag, *metrics)
        steps, outcome = host_fragment(self.simulators, results, name="simulate")(state.seed, state.steps, action)
        t = TimeStep(*received(outcome, "env"))
        return state._replace(steps=steps, asked=state.asked + 1, absent=state.absent + ~t.valid), t  # type: ignore[operator]

    def pop_episodes(self, state: HostState) -> tuple[HostState, dict[str, Mean]]:
        """Removes the step counts from the state; returns `absent`, the share of steps without an answer."""
        zero = jnp.zeros_like(state.asked)
        share = Mean(state.absent.sum(), state.asked.sum())
        return state._replace(asked=zero, absent=zero), {"absent": share}

    def _row(self, dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.num_envs, *shape), dtype)

    def _observations(self) -> PyTree:
        return jax.tree.map(lambda x: self._row(x.dtype, *x.shape), spaces.struct(self.observation_space))


class Stepping:
    """Simulators that `make` starts at the first reset, with the step that each of the `E` environments has reached."""

    makes_new_arrays = True

    def __init__(self, make: Callable[[], Simulators], num_envs: int):
        self._make, self._simulators = make, None
        self._steps = np.zeros(num_envs, np.uint32)
        self._started = False

    @property
    def simulators(self) -> Simulators:
        """The simulators, started on first use."""
        if self._simulators is None:
            self._simulators = self._make()
        return self._simulators

    def close(self) -> None:
        """Stops the simulators until they are needed again."""
        if self._simulators is not None:
            self._simulators.close()
        self._simulators, self._started = None, False

    def reset(self, seed: np.ndarray) -> tuple[np.ndarray, Any]:
        """Starts episodes; returns the step numbers and the first observations `[E, ...]`."""
        obs = self.simulators.reset(np.arange(len(seed)), seed)
        self._steps, self._started = np.zeros_like(self._steps), True
        return self._steps.copy(), obs

    def __call__(self, *args: Any) -> tuple[np.ndarray, Any]:
        """Steps environments."""
        return self.start(*args)()

    def start(self, seed: np.ndarray, steps: np.ndarray, action: np.ndarray) -> Callable[[], Any]:
        """Starts a step; environments that are not at step `steps` start a new episode."""
        fresh = (self._steps != steps) | (not self._started)
        if fresh.any():
            self.simulators.reset(np.flatnonzero(fresh), seed[fresh] ^ steps[fresh])
        finish = self.simulators.start(action)
        next_steps = steps + np.uint32(1)
        self._steps, self._started = next_steps.copy(), True

        def outcome() -> tuple[np.ndarray, Any]:
            step = finish()
            if fresh.any():
                step.valid[fresh], step.truncated[fresh], step.terminated[fresh], step.reward[fresh] = False, True, False, 0
                if step.metrics is not None:
                    step.metrics[fresh] = np.nan
            return next_steps, tuple(step) if step.metrics is not None else tuple(step)[:-1]

        return outcome
