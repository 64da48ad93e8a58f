"""Algorithms: one file each, and the parts they are made of: `returns` and `losses` are for algorithms of your own."""

from msrl_jax.algorithms import losses as losses
from msrl_jax.algorithms import returns as returns
from msrl_jax.algorithms.a2c import A2C as A2C
from msrl_jax.algorithms.a2c import A2CConfig as A2CConfig
from msrl_jax.algorithms.a3c import A3C as A3C
from msrl_jax.algorithms.a3c import A3CConfig as A3CConfig
from msrl_jax.algorithms.base import ALGORITHMS as ALGORITHMS
from msrl_jax.algorithms.base import Agent as Agent
from msrl_jax.algorithms.base import Algorithm as Algorithm
from msrl_jax.algorithms.base import get as get
from msrl_jax.algorithms.base import register as register
from msrl_jax.algorithms.dqn import DQN as DQN
from msrl_jax.algorithms.dqn import ApexDQN as ApexDQN
from msrl_jax.algorithms.dqn import ApexDQNConfig as ApexDQNConfig
from msrl_jax.algorithms.dqn import DQNConfig as DQNConfig
from msrl_jax.algorithms.es import ES as ES
from msrl_jax.algorithms.es import ESConfig as ESConfig
from msrl_jax.algorithms.impala import IMPALA as IMPALA
from msrl_jax.algorithms.impala import IMPALAConfig as IMPALAConfig
from msrl_jax.algorithms.ppo import PPO as PPO
from msrl_jax.algorithms.ppo import PPOConfig as PPOConfig
from msrl_jax.algorithms.recurrent_ppo import RecurrentPPO as RecurrentPPO
from msrl_jax.algorithms.recurrent_ppo import RecurrentPPOConfig as RecurrentPPOConfig
from msrl_jax.algorithms.sac import SAC as SAC
from msrl_jax.algorithms.sac import SACConfig as SACConfig
