"""Fields of replay buffers and data sets."""

import dataclasses
import os
from collections.abc import Collection
from typing import Literal

from msrl_jax.algorithms.configs.base import Config, Tunable
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers
from msrl_jax.algorithms.configs.optimizer import LearningRateConfig
from msrl_jax.algorithms.configs.rollout import DiscountConfig, RolloutConfig
from msrl_jax.data import Dataset

Codec = Literal["bfloat16", "uint8", "scaled_uint8"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchConfig(Config):
    """Batches from a buffer, and the storage of the buffer.

    Attributes:
      num_updates: updates per iteration, `K`. Usual: 1/8 to 1 per environment step, or 10 to 100 without an environment.
      batch_size: transitions or windows per update, `B`. Usual: 32 to 512.
      storage: codec of stored observations: "uint8" for whole numbers from 0 to 255, "scaled_uint8" for such numbers divided
        by 255, "bfloat16", or None to store them unchanged. Usual: None, or "uint8" for images.
      shards: number of parts of the buffer; they can be on different devices. It must divide `batch_size`, and `num_envs` if
        there are environments. None takes the greatest common divisor of these and 8. Usual: None.
    """

    num_updates: int = 4
    batch_size: int = 256
    storage: Codec | None = None
    shards: int | None = None

    def check(self) -> None:
        """Raises ValueError unless the numbers are positive integers."""
        check_integers(self, 1, "num_updates", "batch_size", "shards")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayConfig(BatchConfig):
    """A replay buffer of environment steps. The metric `replay_lost` counts steps that the codec could not store exactly.

    Attributes:
      capacity: largest number of environment steps in the replay buffer. Usual: 1e4 to 1e6.
      learning_starts: environment steps before the first update; they take random actions. None takes as many as a batch
        needs. Usual: 1e3 to 5e4.
      n_step: number of rewards that a target sums up before it bootstraps. Usual: 1 to 5.
    """

    capacity: int = 200_000
    learning_starts: int | None = 1_000
    n_step: int = 1

    def check(self) -> None:
        """Raises ValueError unless the numbers are positive integers."""
        check_integers(self, 1, "capacity", "n_step")
        if self.learning_starts is not None:
            check_integers(self, 1, "learning_starts")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PriorityConfig(LearningRateConfig):
    """Prioritized replay (Schaul et al., 2016, arXiv 1511.05952).

    Attributes:
      prioritised: whether transitions or windows with a larger last TD error are drawn more often. Usual: True for images and
        sequences.
      alpha: exponent of the priorities: 0 draws uniformly, 1 in proportion to the errors. Usual: 0.4 to 0.9.
      beta: initial exponent of the importance weights, which correct the bias of prioritized draws. It rises to 1 over
        `total_steps`, if they are given. None gives all weight 1. Usual: 0.4 to 0.6, or None for sequences.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`; constant if they are not given.
        Usual: True.
      total_steps: environment steps over which `beta` rises and the learning rate falls; None keeps both constant.
    """

    prioritised: bool = False
    alpha: Tunable = 0.4
    beta: Tunable | None = 0.4
    anneal_learning_rate: bool = True

    def check(self) -> None:
        """Raises ValueError unless the exponents are in their ranges."""
        check_numbers(self, "alpha", low=0.0)
        if self.beta is not None:
            check_numbers(self, "beta", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Config):
    """A data set.

    Attributes:
      data: path of a data set to learn from as well, for `msrl_jax.data.load`; in Python also a `msrl_jax.data.Dataset`.
        Usual: None.
    """

    data: str | None = None

    def check(self) -> None:
        """Raises ValueError unless the data are a path or a data set."""
        if not isinstance(self.data, str | os.PathLike | Dataset | None):
            raise ValueError(
                f"{type(self).__name__}.data={self.data!r}: use the path of a data set, or a msrl_jax.data.Dataset"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(ReplayConfig, DiscountConfig, RolloutConfig):
    """Fields shared by all algorithms that learn from a replay buffer.

    An iteration takes `unroll_length` steps of every environment, then makes `num_updates` updates.

    Attributes:
      num_envs: environments stepped in parallel, `E`. Usual: 1 to 256.
      unroll_length: steps of every environment per iteration, `T`. Usual: 1 to 40.
    """

    num_envs: int = 16
    unroll_length: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixingConfig(DataConfig, OffPolicyConfig):
    """Batches that mix the run's own experience with a data set (Ball et al., 2023, arXiv 2302.02948).

    Attributes:
      data_fraction: share of every batch that comes from `data`, rounded to whole rows per shard. Usual: 0.5.
    """

    data_fraction: float = 0.5

    def check(self) -> None:
        """Raises ValueError unless the share is in (0, 1], and the default if there are no data."""
        check_numbers(self, "data_fraction", above=0.0, high=1.0)
        if self.data_fraction != type(self).data_fraction:
            self.check_given(["data_fraction"])

    def check_given(self, fields: Collection[str]) -> None:
        """Raises ValueError if `data_fraction` is given without `data`."""
        if "data_fraction" in fields and self.data is None:
            raise ValueError(
                f"{type(self).__name__}.data_fraction={self.data_fraction} is a share of every batch for a data set, but there "
                "is none; give data='experience.npz', or leave data_fraction out"
            )
