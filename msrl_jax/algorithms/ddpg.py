"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv 1509.02971): TD3 without its three additions.

It has one critic and no noise on the target actor, and updates the actor as often as the critic. The exploration noise is
independent at every step, as in TD3; the paper's noise is correlated in time.
"""


from msrl_jax.algorithms import td3
from msrl_jax.algorithms.agent import Agent
from msrl_jax.algorithms.config import Activation, Codec, NetworkKind, config, field, tunable
from msrl_jax.envs import Environment


@config("ddpg")
class DDPG:
    """What DDPG computes; a distribution policy decides where it runs."""

    num_envs: int = field(default=16, doc="environments stepped in parallel, `E`. Usual: 1 to 256.")
    unroll_length: int = field(default=2, doc="steps of every environment per iteration, `T`. Usual: 1 to 40.")
    discount: float = tunable(default=0.99, doc="discount factor per step. Usual: 0.99.", low=0, high=1)
    num_updates: int = field(default=8, doc="updates per iteration, `K`. Usual: 1/8 to 1 per environment step.")
    batch_size: int = field(default=256, doc="transitions or windows per update, `B`. Usual: 32 to 512.")
    storage: Codec | None = field(
        default=None,
        doc='codec of stored observations: "uint8" (whole numbers), "scaled_uint8" (those over 255) or "bfloat16". Usual: None, '
        'or "uint8" for images.',
    )
    shards: int | None = field(
        default=None,
        doc="parts of the buffer, for different devices; None: greatest common divisor of `batch_size`, `num_envs` and 8. "
        "Usual: None.",
    )
    capacity: int = field(default=200000, doc="largest number of environment steps in the replay buffer. Usual: 1e4 to 1e6.")
    learning_starts: int = field(
        default=1000, doc="environment steps with uniformly random actions before the first update. Usual: 1e3 to 1e4."
    )
    n_step: int = field(default=1, doc="number of rewards that a target sums up before it bootstraps. Usual: 1 to 5.")
    data: str | None = field(
        default=None, doc="path of a data set to learn from as well, or a `msrl_jax.data.Dataset`. Usual: None."
    )
    data_fraction: float = field(
        default=0.5, above=0, high=1,
        doc="share of every batch that comes from `data`, rounded to whole rows per shard. Usual: 0.5.",
    )
    learning_rate: float = tunable(default=0.001, doc="step size of Adam. Usual: 1e-4 to 1e-3.", above=0)
    anneal_learning_rate: bool = field(default=False, doc="whether the learning rate falls linearly to 0. Usual: False.")
    max_grad_norm: float | None = tunable(
        default=None, doc="largest norm of each network's gradients; larger ones are scaled down to it. Usual: None.", above=0
    )
    tau: float = tunable(
        default=0.005, above=0, high=1,
        doc="share of the way that target networks move towards the trained ones per update. Usual: 0.001 to 0.05.",
    )
    hidden_sizes: tuple[int, ...] = field(
        default=(256, 256), doc="widths of the dense layers. Usual: (400, 300) or (256, 256)."
    )
    activation: Activation = field(default="relu", doc='"tanh", "relu", "elu", "gelu" or "silu". Usual: "relu".')
    network: NetworkKind = field(
        default="auto",
        doc='"mlp": dense layers; "cnn": convolutions first; "auto": "cnn" for observations with three dimensions. Usual: '
        '"auto".',
    )
    exploration_noise: float = tunable(
        default=0.1, doc="standard deviation of the noise on actions in [-1, 1]. Usual: 0.1 to 0.2.", low=0
    )


    def build(self, env: Environment) -> Agent:
        """Builds the agent for one environment; raises TypeError or ValueError if a space or a size does not fit."""
        return build(env, self)


def build(env: Environment, config: DDPG) -> Agent:
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
    without = {"num_critics": 1, "policy_period": 1, "policy_noise": 0.0}
    return td3.build(env, td3.TD3Config(**vars(config), **without), name="ddpg")

