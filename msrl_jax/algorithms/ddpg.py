"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv 1509.02971): TD3 without its three additions.

It has one critic and no noise on the target actor, and updates the actor as often as the critic. The exploration noise is
independent at every step, as in TD3; the paper's noise is correlated in time.
"""

import dataclasses

from msrl_jax.algorithms import td3
from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs.actor_critic import OffPolicyActorCriticConfig
from msrl_jax.algorithms.configs.base import Tunable
from msrl_jax.algorithms.configs.checks import check_numbers
from msrl_jax.envs import Environment


@dataclasses.dataclass(frozen=True, kw_only=True)
class DDPGConfig(OffPolicyActorCriticConfig):
    """What DDPG computes; a distribution policy decides where it runs.

    Attributes:
      hidden_sizes: widths of the dense layers. Usual: (400, 300) or (256, 256).
      exploration_noise: standard deviation of the noise on actions in [-1, 1]. Usual: 0.1 to 0.2.
    """

    num_updates: int = 8
    exploration_noise: Tunable = 0.1

    def check(self) -> None:
        """Raises ValueError unless the deviation is at least 0."""
        check_numbers(self, "exploration_noise", low=0.0)


def build(env: Environment, config: DDPGConfig) -> Agent:
    """Builds DDPG for one environment.

    Args:
      env: the environment; its action space is a bounded `Box` of floats.
      config: the settings of the algorithm.

    Returns:
      The agent. Outside of training it is deterministic and ignores keys.

    Raises:
      ValueError: if the buffer's sizes do not fit each other, if the network does not fit, if actions are not bounded, or if
        the config anneals the learning rate without `total_steps`.
      TypeError: if a space is not supported.
    """
    config.check_annealing()
    without = {"num_critics": 1, "policy_period": 1, "policy_noise": 0.0}
    return td3.build(env, td3.TD3Config(**vars(config), **without), name="ddpg")


DDPG = register(Algorithm("ddpg", DDPGConfig, build))
