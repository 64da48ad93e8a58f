"""Deep deterministic policy gradients (Lillicrap et al., 2016, arXiv 1509.02971): TD3 without its three additions."""

from msrl_jax.algorithms.registry import variant
from msrl_jax.algorithms.td3 import TD3

DDPG = variant(
    TD3,
    "DDPG",
    "ddpg",
    """Deep deterministic policy gradients: TD3 with one critic, no noise on the target actor, and an actor that moves as often.

    The exploration noise is independent at every step, as in TD3; the paper's noise is correlated in time.
    """,
    num_critics=1,
    policy_period=1,
    policy_noise=0.0,
)
