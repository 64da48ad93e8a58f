"""Algorithms, one file each, and their parts. Use `returns` and `losses` for algorithms of your own."""

from msrl_jax.algorithms import losses as losses
from msrl_jax.algorithms import returns as returns
from msrl_jax.algorithms.a2c import A2C as A2C
from msrl_jax.algorithms.a3c import A3C as A3C
from msrl_jax.algorithms.agent import Agent as Agent
from msrl_jax.algorithms.agent import Progress as Progress
from msrl_jax.algorithms.agent import counted as counted
from msrl_jax.algorithms.config import config as config
from msrl_jax.algorithms.config import field as field
from msrl_jax.algorithms.config import get as get
from msrl_jax.algorithms.config import make as make
from msrl_jax.algorithms.config import names as names
from msrl_jax.algorithms.config import tunable as tunable
from msrl_jax.algorithms.es import ES as ES
from msrl_jax.algorithms.impala import IMPALA as IMPALA
from msrl_jax.algorithms.ppo import PPO as PPO
from msrl_jax.algorithms.recurrent_ppo import RecurrentPPO as RecurrentPPO
