"""The protocol of simulators on the host: `E` environments that NumPy arrays go to and come from.

In the shape descriptions, `E` is the number of environments and `N` the number of those in one call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np


def is_on_host(env: Any) -> bool:
    """Whether an environment, or the one in its wrappers, is simulated on the host: it has copies, but no state of its own."""
    while env is not None:
        if getattr(env, "on_host", False):
            return True
        env = getattr(env, "env", None)
    return False


def release(env: Any) -> None:
    """Ends the simulators of a vector environment, until they are needed again; does nothing if it has none."""
    while env is not None:
        if is_on_host(env) and hasattr(env, "simulators"):
            env.simulators.close()
        env = getattr(env, "env", None)


class Outcome(NamedTuple):
    """What a step of `N` environments led to, as in `TimeStep`; NumPy arrays that nobody else writes to.

    Attributes:
      obs: the observations for the next actions. `[N, ...]`
      reward: rewards. `[N]` float32
      terminated: whether the episodes reached terminal states. `[N]` bool
      truncated: whether they were cut short. `[N]` bool
      final_obs: the next observations before any reset. `[N, ...]`
      present: whether the environment answered. `[N]` bool
    """

    obs: Any
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    final_obs: Any
    present: np.ndarray


Finish: TypeAlias = Callable[[], Outcome]


class Simulators(Protocol):
    """`E` environments outside of JAX, with automatic reset."""

    def reset(self, envs: np.ndarray, seeds: np.ndarray) -> Any:
        """Starts episodes.

        Args:
          envs: numbers of the environments. `[N]` int32
          seeds: their seeds. `[N]` uint32

        Returns:
          The first observations. `[N, ...]`
        """
        ...

    def start(self, envs: np.ndarray, action: np.ndarray) -> Finish:
        """Starts a step of some environments.

        Args:
          envs: their numbers. `[N]` int32
          action: their actions. `[N, ...]`

        Returns:
          A function that waits for the outcome.
        """
        ...

    def close(self) -> None:
        """Ends them."""
        ...
