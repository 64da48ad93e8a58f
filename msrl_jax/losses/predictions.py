"""What networks predict of a return: here, its expectation. Each distribution of returns is an option in a separate file.

In the shape descriptions, `A` denotes the number of actions, `B` the batch size, `C` the number of critics, and `N` the number
of outputs per action: one value, or the atoms or quantiles of a distribution.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from msrl_jax.configs.config import TunableOrNone, tunable
from msrl_jax.configs.options import option
from msrl_jax.losses.values import value_error

Backup = Callable[[jax.Array], jax.Array]
"""Maps returns from the next step on to returns from this step on, `[B]` each and increasing."""


class ActionPrediction(NamedTuple):
    """Functions of the outputs of a network of action values."""

    num_outputs: int  # per action
    expected: Callable[[jax.Array], jax.Array]  # outputs [..., N] -> expected returns [...]
    # (outputs [N], outputs for the next step [N'], reward [], discount [], *inputs [N]) -> (loss [], TD error [])
    loss: Callable[..., tuple[jax.Array, jax.Array]]
    network: Callable[..., Any] | None = None  # makes the network, as `q_network` does; it may take more than observations:
    choice_inputs: tuple[jax.Array, ...] = ()  # what it also takes to choose actions
    # (key, batch size) -> what it also takes for a batch, and for the next steps
    inputs: Callable[[jax.Array, int], tuple[tuple[jax.Array, ...], ...]] = lambda key, batch_size: ((), ())


class CriticPrediction(NamedTuple):
    """Functions of the outputs of critics: `[C, B]` for expected returns, `[C, B, N]` for distributions."""

    num_outputs: int  # per critic
    expected: Callable[[jax.Array], jax.Array]  # outputs -> expected returns [C, B]
    value: Callable[[jax.Array], jax.Array]  # outputs -> combined value of the critics [B]
    target: Callable[[jax.Array, Backup], jax.Array]  # (outputs of the target critics, backup) -> [B, ...]
    loss: Callable[[jax.Array, jax.Array], jax.Array]  # (outputs, target) -> losses [C, B]
    error: Callable[[jax.Array, jax.Array], jax.Array]  # (outputs, target) -> TD errors [B], or losses for distributions


class ActionReturns(Protocol):
    """The options for what a network of action values predicts of a return."""

    def of_actions(self, discount: float) -> ActionPrediction:
        """Returns the functions of the network's outputs."""
        ...


class CriticReturns(Protocol):
    """The options for what the critics of an actor predict of a return."""

    def of_critics(self, discount: float) -> CriticPrediction:
        """Returns the functions of the critics' outputs."""
        ...


@option(of=(ActionReturns, CriticReturns))
class Expected:
    """Predicts the expected return; with several critics, uses the lowest (arXiv 1802.09477)."""

    huber_delta: TunableOrNone = tunable(
        default=None, above=0, doc="errors above it count linearly (Huber). Usual: None, or 1."
    )

    def of_actions(self, discount: float) -> ActionPrediction:
        """Returns the functions of one output per action."""

        def loss(
            outputs: jax.Array, next_outputs: jax.Array, reward: jax.Array, discount: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            target = reward + discount * next_outputs
            error = target.mean() - outputs.mean()
            return value_error(outputs.mean(), target.mean(), self.huber_delta), error

        return ActionPrediction(1, lambda outputs: outputs.mean(-1), loss)

    def of_critics(self, discount: float) -> CriticPrediction:
        """Returns the functions of one output per critic; the lowest counts, against overestimation (eq. 10)."""
        return CriticPrediction(
            num_outputs=1,
            expected=lambda q: q,
            value=lambda q: q.min(0),
            target=lambda q, backup: backup(q.min(0)),
            loss=lambda q, target: jax.vmap(lambda q: value_error(q, target, self.huber_delta))(q),
            error=lambda q, target: target - q.mean(0),
        )
