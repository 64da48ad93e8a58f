"""Simulators on the host, in worker processes or threads, as vector environments.

In the shape descriptions, `N` is the number of environments in one call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.envs import spaces
from msrl_jax.envs.base import PyTree, TimeStep, WithoutStatistics
from msrl_jax.envs.check_types import as_actions, check_key
from msrl_jax.fragments.graph.host import host_fragment, received
from msrl_jax.fragments.metrics import Mean


class Outcome(NamedTuple):
    """What a step of `N` environments led to, as in `TimeStep`; NumPy arrays `[N, ...]` that nothing else writes to."""

    obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: Any
    present: np.ndarray


class Simulators(Protocol):
    """`E` environments outside of JAX, with automatic reset."""

    def reset(self, envs: np.ndarray, seeds: np.ndarray) -> Any:
        """Starts episodes of the environments with the numbers `envs` `[N]` int32 and the seeds `[N]` uint32.

        Returns the first observations `[N, ...]`.
        """
        ...

    def start(self, envs: np.ndarray, action: np.ndarray) -> Callable[[], Outcome]:
        """Starts a step of environments `[N]` int32 with the actions `[N, ...]`; returns a function that waits for its end."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class HostState(NamedTuple):
    """What the state of a run knows of simulators on the host; the rest of their state is theirs. `[E]`"""

    number: jax.Array  # int32
    seed: jax.Array  # uint32
    steps: jax.Array  # uint32, modulo 2**32
    asked: jax.Array  # float32: steps since `pop_episodes`
    absent: jax.Array  # float32: those of them that the environment did not answer


@dataclass(frozen=True)
class HostVectorized(WithoutStatistics):
    """`E` environments on the host as a `VectorEnvironment`.

    Its step is a call of the host between programs. The state names the step that each simulator has to be at. If one is at
    another, because a run was resumed or an old state was used again, it begins a new episode, and the step counts for
    nothing: `present` is False.
    """

    name: str
    num_envs: int
    observation_space: spaces.Space
    action_space: spaces.Space
    simulators: "Stepping"
    on_host = True

    def reset(self, key: jax.Array) -> tuple[HostState, PyTree]:
        """Starts all environments, each with its own seed; returns the state and the first observations `[E, ...]`."""
        check_key(key)
        number = jnp.arange(self.num_envs, dtype=jnp.int32)
        seed = jax.vmap(lambda key: jax.random.bits(key, dtype=jnp.uint32))(jax.random.split(key, self.num_envs))
        results = jax.ShapeDtypeStruct((self.num_envs,), jnp.uint32), self._observations(self.num_envs)
        steps, obs = host_fragment(self.simulators.reset, results, name="reset")(number, seed)
        return HostState(number, seed, steps, jnp.zeros(self.num_envs), jnp.zeros(self.num_envs)), received(obs, "env")

    def step(self, state: HostState, action: PyTree) -> tuple[HostState, TimeStep]:
        """Advances every environment by one action; environments start again at the end of an episode."""
        count = state.number.shape[0]
        action = as_actions(self, action, (count,), "environment")
        row = {kind: jax.ShapeDtypeStruct((count,), kind) for kind in (jnp.uint32, jnp.float32, jnp.bool_)}
        obs, flag = self._observations(count), row[jnp.bool_]
        results = row[jnp.uint32], (obs, row[jnp.float32], flag, flag, obs, flag)
        simulate = host_fragment(self.simulators, results, name="simulate")
        steps, outcome = simulate(state.number, state.seed, state.steps, action)
        t = TimeStep(*received(outcome, "env"))
        return state._replace(steps=steps, asked=state.asked + 1, absent=state.absent + ~t.present), t  # type: ignore[operator]

    def pop_episodes(self, state: HostState) -> tuple[HostState, dict[str, Mean]]:
        """Removes the counts of steps from the state; returns the share that was not answered, `absent`."""
        zero = jnp.zeros_like(state.asked)
        share = Mean(state.absent.sum(), state.asked.sum())
        return state._replace(asked=zero, absent=zero), {"absent": share}

    def _observations(self, count: int) -> PyTree:
        one = spaces.struct(self.observation_space)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), one)


class Stepping:
    """Simulators that `make` starts at the first reset, and that know at which step each of the `E` environments is."""

    makes_new_arrays = True

    def __init__(self, make: Callable[[], Simulators], num_envs: int):
        self._make, self._simulators = make, None
        self._steps = np.zeros(num_envs, np.uint32)
        self._started = np.zeros(num_envs, bool)

    @property
    def simulators(self) -> Simulators:
        """The simulators, which are made now if they were not before."""
        if self._simulators is None:
            self._simulators = self._make()
        return self._simulators

    def close(self) -> None:
        """Ends the simulators, until they are needed again."""
        if self._simulators is not None:
            self._simulators.close()
        self._simulators, self._started[:] = None, False

    def reset(self, number: np.ndarray, seed: np.ndarray) -> tuple[np.ndarray, Any]:
        """Starts episodes; returns the numbers of steps, and the first observations `[N, ...]`."""
        obs = self.simulators.reset(number, seed)
        self._steps[number], self._started[number] = 0, True
        return self._steps[number], obs

    def __call__(self, *args: Any) -> tuple[np.ndarray, Any]:
        """Steps environments."""
        return self.start(*args)()

    def start(self, number: np.ndarray, seed: np.ndarray, steps: np.ndarray, action: np.ndarray) -> Callable[[], Any]:
        """Starts a step of some environments; environments that are not at the step `steps` begin a new episode."""
        simulators = self.simulators
        other = ~self._started[number] | (self._steps[number] != steps)
        if other.any():
            simulators.reset(number[other], seed[other] ^ steps[other])
            self._started[number] = True
        finish = simulators.start(number, action)
        self._steps[number] = steps + np.uint32(1)
        after = self._steps[number]

        def outcome() -> tuple[np.ndarray, Any]:
            made = finish()
            if other.any():
                made.present[other], made.truncated[other], made.terminated[other], made.reward[other] = False, True, False, 0
            return after, tuple(made)

        return outcome
