"""Fields for collecting experience, discounting and normalization."""

import dataclasses

from msrl_jax.algorithms.configs.base import Config, Tunable
from msrl_jax.algorithms.configs.checks import check_integers, check_numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig(Config):
    """The number of environments and the length of an unroll.

    Attributes:
      num_envs: environments stepped in parallel, `E`. Usual: 8 to 4096.
      unroll_length: steps of every environment per iteration, `T`. Usual: 5 to 128.
    """

    num_envs: int = 32
    unroll_length: int

    @property
    def steps_per_iteration(self) -> int:
        """Environment steps per iteration, over all environments: `T * E`."""
        return self.num_envs * self.unroll_length

    def check(self) -> None:
        """Raises ValueError unless the numbers are positive integers."""
        check_integers(self, 1, "num_envs", "unroll_length")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvGroupsConfig(RolloutConfig):
    """Groups of environments.

    Attributes:
      env_groups: groups of environments that take turns, so that one is simulated on the host while actions are chosen for
        another. It divides `num_envs`. Usual: 1, or 2 for simulators on the host.
    """

    env_groups: int = 1

    def check(self) -> None:
        """Raises ValueError unless the number of groups divides the number of environments."""
        check_integers(self, 1, "env_groups")
        if self.num_envs % self.env_groups:
            raise ValueError(
                f"{type(self).__name__}.env_groups={self.env_groups} does not divide num_envs={self.num_envs}; use one that "
                "does"
            )
        if self.env_groups > 1 and getattr(self, "exploration", "") == "per_env":
            raise ValueError(
                f"{type(self).__name__}.env_groups={self.env_groups}: with exploration='per_env' every environment has an "
                "epsilon of its own, which groups do not keep; use env_groups=1, or exploration='annealed'"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiscountConfig(Config):
    """The discount factor.

    Attributes:
      discount: discount factor per step. Usual: 0.99.
    """

    discount: Tunable = 0.99

    def check(self) -> None:
        """Raises ValueError unless the discount is in [0, 1]."""
        check_numbers(self, "discount", low=0.0, high=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NormalizationConfig(Config):
    """Whether observations and rewards are normalized.

    Attributes:
      normalize_observations: whether observations are standardized by running statistics. Usual: True for locomotion.
      normalize_rewards: whether rewards are divided by the running standard deviation of the return. Usual: True for
        locomotion.
    """

    normalize_observations: bool = False
    normalize_rewards: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnPolicyConfig(NormalizationConfig, DiscountConfig, EnvGroupsConfig):
    """Fields shared by the on-policy algorithms."""
