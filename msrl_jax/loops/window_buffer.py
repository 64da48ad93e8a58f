"""Makes the replay buffer of windows of steps of a config."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp

from msrl_jax import replay
from msrl_jax.agents.agent import RolloutFields
from msrl_jax.configs.replay_options import Replay
from msrl_jax.replay import ReplayBuffer, Transition
from msrl_jax.replay.buffers import storage_of


class ReplayFields(RolloutFields, Protocol):
    """What makes a replay buffer."""

    @property
    def batch_size(self) -> int:
        """The transitions, or windows, per update, `B`."""
        ...

    @property
    def replay(self) -> Replay:
        """The buffer."""
        ...


def window_buffer(
    obs: Any,
    action: Any,
    config: ReplayFields,
    batch_size: int,
    shards: int | None,
    carry: Any = (),
    agents: tuple[int, ...] = (),
    may_be_absent: bool = False,
    length_is: str = "n_step is",
    **windows: Any,
) -> ReplayBuffer:
    """Makes the buffer of windows of steps of a config; `length_is` names the fields that set the length in messages."""
    number, flag = jax.ShapeDtypeStruct(agents, jnp.float32), jax.ShapeDtypeStruct(agents, jnp.bool_)
    example = Transition(obs, action, number, flag, flag, obs, carry, flag if may_be_absent else None)
    options: dict[str, Any] = {
        "capacity": config.replay.capacity,
        "num_envs": config.num_envs,
        "unroll_length": config.unroll_length,
        "batch_size": batch_size,
        "min_size": config.replay.learning_starts,
        "shards": shards,
        "storage": storage_of(config.replay.storage, obs),
        **windows,
    }
    make = replay.uniform
    if priorities := config.replay.priorities:
        make, options = replay.prioritized, options | {"alpha": priorities.alpha, "beta": priorities.beta}
    try:
        return make(example, **options)
    except ValueError as error:
        text = str(error).replace("min_size", "replay.learning_starts")  # the name of the config field and the flag
        raise ValueError(f"{type(config).__name__}: {text} ({length_is} the length of a window)") from None
