"""Algorithms: one file each, and the parts they are made of."""

from msrl_jax.algorithms.base import ALGORITHMS as ALGORITHMS
from msrl_jax.algorithms.base import Agent as Agent
from msrl_jax.algorithms.base import Algorithm as Algorithm
from msrl_jax.algorithms.base import get as get
from msrl_jax.algorithms.base import register as register
from msrl_jax.algorithms.es import ES as ES
from msrl_jax.algorithms.es import ESConfig as ESConfig
from msrl_jax.algorithms.ppo import PPO as PPO
from msrl_jax.algorithms.ppo import PPOConfig as PPOConfig
