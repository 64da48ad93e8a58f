"""The fields that functions read of a config, for type checkers and readers: any config with these fields fits."""

from typing import Any, Protocol

from msrl_jax.configs.replay_options import Hindsight, Replay


class NetworkFields(Protocol):
    """What makes a network."""

    @property
    def network(self) -> Any:
        """A name, or a module."""
        ...

    @property
    def hidden_sizes(self) -> tuple[int, ...]:
        """The widths of the dense layers."""
        ...

    @property
    def activation(self) -> str:
        """A key of `networks.layers.ACTIVATIONS`."""
        ...

    @property
    def layer_norm(self) -> bool:
        """Whether hidden dense layers are normalized."""
        ...


class RolloutFields(Protocol):
    """How many steps of how many environments an iteration takes."""

    @property
    def num_envs(self) -> int:
        """The environments stepped in parallel, `E`."""
        ...

    @property
    def unroll_length(self) -> int:
        """The steps of every environment per iteration, `T`."""
        ...


class MinibatchFields(RolloutFields, Protocol):
    """How an unroll is split into minibatches; `core` is read if there is one."""

    @property
    def num_epochs(self) -> int:
        """The passes over the batch per iteration."""
        ...

    @property
    def num_minibatches(self) -> int:
        """The updates per pass."""
        ...


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


class DataFields(Protocol):
    """The data set of a run."""

    @property
    def data(self) -> Any:
        """The path of a data set, a `Dataset`, or None."""
        ...


class MixedFields(ReplayFields, DataFields, Protocol):
    """What mixes a data set into batches."""

    @property
    def data_fraction(self) -> float:
        """The share of the data in a batch."""
        ...


class WindowFields(MixedFields, NetworkFields, Protocol):
    """What off-policy actor-critics replay, with or without a core."""

    @property
    def hindsight(self) -> Hindsight | None:
        """The relabelling of sampled steps."""
        ...

    @property
    def core(self) -> Any:
        """A recurrent core, or None."""
        ...

    @property
    def burn_in(self) -> int:
        """The first steps of a window, which only refresh the carry."""
        ...

    @property
    def trace_length(self) -> int:
        """The steps of a window in the loss, `L`."""
        ...
