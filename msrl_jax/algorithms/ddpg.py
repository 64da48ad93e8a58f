"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv 1509.02971): what TD3 is without its three additions.

One critic, no noise on the target actor, and the actor moves as often as the critic. Exploration noise is white, as in
TD3, where the paper's is correlated in time.
"""

import dataclasses

from msrl_jax.algorithms import td3
from msrl_jax.algorithms.base import Agent, Algorithm, register
from msrl_jax.algorithms.configs import checks as check
from msrl_jax.algorithms.networks.actor_and_critics import check_config
from msrl_jax.envs import Environment


@dataclasses.dataclass(frozen=True)
class DDPGConfig:
    """Everything about what DDPG computes; where it runs is a distribution policy's concern.

    Attributes:
      num_envs: environments stepped in parallel. Usual: 1 to 128.
      unroll_length: steps of every environment per iteration. Usual: 1 to 8.
      num_updates: updates per iteration, so `num_updates / (num_envs * unroll_length)` per step. Usual: 1/8 to 1 per step.
      batch_size: transitions per update. Usual: 64 to 256.
      capacity: steps that the buffer holds. Usual: 1e5 to 1e6.
      learning_starts: steps, of uniformly random actions, before the first update. Usual: 1e3 to 1e4.
      n_step: rewards in a target. Usual: 1.
      learning_rate: step size of Adam, for actor and critic. Usual: 1e-4 to 1e-3.
      anneal_learning_rate: whether the learning rate falls linearly to 0 over `total_steps`. Usual: False.
      discount: the factor per step. Usual: 0.99.
      tau: by which share the targets move towards actor and critic per update. Usual: 0.001 to 0.005.
      exploration_noise: deviation of the noise on actions, which reach from -1 to 1. Usual: 0.1 to 0.2.
      max_grad_norm: gradients of each network are scaled down to this norm; None leaves them. Usual: None.
      hidden_sizes: widths of the dense layers. Usual: (400, 300) or (256, 256).
      activation: "tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".
      network: "mlp", "cnn", or "auto", which convolves observations of three dimensions. Usual: "auto".
      storage: codec of stored observations: "bfloat16", "uint8" or "scaled_uint8"; None stores them as they are. Usual: None.
      shards: parts of the buffer, which may lie on devices of their own; None for the greatest common divisor of `num_envs`,
        `batch_size` and 8. Usual: None.
      data: a data set to learn from as well, by its path (`msrl_jax.data.load`); from Python, a `msrl_jax.data.Dataset` too.
        Usual: None.
      data_fraction: share of every batch that comes from it, rounded to whole rows of each of the `shards`. Usual: 0.5.
      total_steps: environment steps over which the learning rate falls; needed only if it does.
    """

    num_envs: int = 16
    unroll_length: int = 2
    num_updates: int = 8
    batch_size: int = 256
    capacity: int = 200_000
    learning_starts: int = 1000
    n_step: int = 1
    learning_rate: float = 1e-3
    anneal_learning_rate: bool = False
    discount: float = 0.99
    tau: float = 0.005
    exploration_noise: float = 0.1
    max_grad_norm: float | None = None
    hidden_sizes: tuple[int, ...] = (256, 256)
    activation: str = "relu"
    network: str = "auto"
    storage: str | None = None
    shards: int | None = None
    data: str | None = None
    data_fraction: float = 0.5
    total_steps: int | None = None

    def __post_init__(self):
        check_config(self)
        check.check_numbers(self, "exploration_noise", low=0.0)


def build(env: Environment, config: DDPGConfig) -> Agent:
    """Builds DDPG for one environment.

    Args:
      env: the environment; its action space is a bounded `Box` of floats.
      config: what to compute.

    Returns:
      The agent. It is deterministic outside of training: a key does not change how it acts.

    Raises:
      ValueError: if the buffer's sizes do not fit each other, if the network does not fit, if actions are not bounded, or if
        the learning rate is to be annealed and `config.total_steps` is None.
      TypeError: if a space is not supported.
    """
    check.check_annealing(config)
    without = {"num_critics": 1, "policy_period": 1, "policy_noise": 0.0}
    return td3.build(env, td3.TD3Config(**vars(config), **without), name="ddpg")


DDPG = register(Algorithm("ddpg", DDPGConfig, build))
