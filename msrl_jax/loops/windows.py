"""The windows of steps that off-policy actor-critics replay: single (n-step) transitions here; a recurrent core brings others.

In the shape descriptions, `B` denotes the number of windows in a batch, and `N` the number of steps to learn from: the same
without a core.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from msrl_jax.configs.checking import check_unused
from msrl_jax.configs.replay_options import Hindsight
from msrl_jax.envs import Environment, Space
from msrl_jax.loops.off_policy import Batch
from msrl_jax.loops.replay_buffers import MixedFields, n_step_buffer
from msrl_jax.networks.core import RecurrentFields, core_of
from msrl_jax.networks.network import Network
from msrl_jax.replay import ReplayBuffer


class WindowFields(MixedFields, RecurrentFields, Protocol):
    """What off-policy actor-critics replay, with or without a core."""

    @property
    def hindsight(self) -> Hindsight | None:
        """The relabelling of sampled steps."""
        ...

    @property
    def burn_in(self) -> int:
        """The first steps of a window, which only refresh the carry."""
        ...

    @property
    def trace_length(self) -> int:
        """The steps of a window in the loss, `L`."""
        ...


class Windows:
    """The windows of networks without a recurrent core, of one step each; with a core, see `loops.core_windows`."""

    def __init__(self, config: WindowFields) -> None:
        self.config: Any = config  # whose tunable fields are numbers, or traced ones

    def network(self, name: str, space: Space, make: Callable[[Any], Network]) -> Network:
        """Makes the network of a part of the parameters with `make`, from what it sees."""
        return make(space)

    def buffer(self, env: Environment) -> ReplayBuffer:
        """Makes the replay buffer."""
        return n_step_buffer(env, self.config)

    def initial_carry(self, num_envs: int) -> Any:
        """Returns the recurrent states at the start of episodes, zeros `[E, H]`, by network; `()` without cores."""
        return ()

    def step(self, params: Mapping[str, Any], obs: Any, carry: Any) -> tuple[Any, Any]:
        """Steps the cores that `carry` is of; returns what the actor sees, and the next carry."""
        return obs, carry

    def steps(self, batch: Batch) -> Batch:
        """Returns the steps `[N, ...]` of a batch."""
        return batch

    def errors(self, td_error: jax.Array) -> jax.Array:
        """Returns the TD errors of the buffer's items `[B]` from those of steps `[N]`."""
        return td_error

    def first_critic(self, params: Any) -> Any:
        """Returns the parameters of the first critic."""
        return jax.tree.map(lambda x: x[:1], params)


def windows_of(config: WindowFields) -> Windows:
    """Returns the windows of a config."""
    return Windows(config) if config.core is None else core_of(config).windows(config)


def check_core(config: WindowFields) -> None:
    """Raises ValueError if a config combines a core with a data set or with HER."""
    name = type(config).__name__
    if config.core is None:
        check_unused(config, ("burn_in", "trace_length"), "without a core")
    elif config.hindsight:
        raise ValueError(
            f"{name}.hindsight={config.hindsight} replaces goals of single steps, but {name}.core learns from sequences, whose "
            "carries come from the old ones; use core=None, or leave hindsight out"
        )
    elif config.data is not None:
        raise ValueError(
            f"{name}.core learns from sequences with the carries of the actors, but data have single steps; "
            "use core=None, or leave data out"
        )
