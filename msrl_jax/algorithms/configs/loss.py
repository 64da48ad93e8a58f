"""Fields of the losses of actor-critic algorithms."""

import dataclasses
from typing import Literal

from msrl_jax.algorithms.configs.base import Config, Tunable
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActorCriticLossConfig(Config):
    """Weights of the terms of the loss.

    Attributes:
      entropy_coef: weight of the entropy bonus. Usual: 0 to 0.01.
      value_coef: weight of the value loss (half the squared error). Usual: 0.5 to 1.
    """

    entropy_coef: Tunable = 0.01
    value_coef: Tunable = 0.5

    def check(self) -> None:
        """Raises ValueError unless the weights are at least 0."""
        check_numbers(self, "entropy_coef", "value_coef", low=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageConfig(Config):
    """How advantages are estimated.

    Attributes:
      gae_lambda: lambda of generalized advantage estimation, from 0 (more bias) to 1 (more variance). Usual: 0.95.
    """

    gae_lambda: Tunable = 0.95

    def check(self) -> None:
        """Raises ValueError unless lambda is in [0, 1]."""
        check_numbers(self, "gae_lambda", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProximalConfig(AdvantageConfig, ActorCriticLossConfig):
    """The updates of PPO: several passes over a batch, in minibatches, with a clipped loss.

    Attributes:
      num_epochs: passes over the batch per iteration. Usual: 3 to 10.
      num_minibatches: updates per pass. Usual: 4 to 32.
      clip_ratio: the probability ratio is clipped to [1 - clip_ratio, 1 + clip_ratio]. Usual: 0.1 to 0.3.
      clip_value: the change of a value in one iteration is clipped to this size, in units of the return; None does not
        clip. Usual: None.
      target_kl: largest estimated KL divergence from the policy that acted, in nats. An iteration skips its remaining
        updates once the estimate is larger. None never skips. Usual: None, or 0.01 to 0.03.
      normalize_advantage: whether advantages are standardized over each "minibatch", once over the whole "batch", or not
        ("none"). Usual: "minibatch".
    """

    num_epochs: int = 4
    num_minibatches: int = 8
    clip_ratio: Tunable = 0.2
    clip_value: Tunable | None = None
    target_kl: Tunable | None = None
    normalize_advantage: Literal["minibatch", "batch", "none"] = "minibatch"

    def check(self) -> None:
        """Raises ValueError unless numbers are positive."""
        check_integers(self, 1, "num_epochs", "num_minibatches")
        check_numbers(self, "clip_ratio", "clip_value", "target_kl", above=0.0)
