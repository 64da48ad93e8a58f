"""Environments: the protocols, `make`, `vectorize` and the wrappers."""

from msrl_jax._deprecated import deprecated as _deprecated
from msrl_jax.envs.agents.base import MultiAgentEnvironment as MultiAgentEnvironment
from msrl_jax.envs.agents.base import MultiAgentTimeStep as MultiAgentTimeStep
from msrl_jax.envs.agents.base import has_agents as has_agents
from msrl_jax.envs.agents.joint import JointObservation as JointObservation
from msrl_jax.envs.agents.joint import TeamView as TeamView
from msrl_jax.envs.agents.stacked import DictEnvironment as DictEnvironment
from msrl_jax.envs.agents.stacked import stack_agents as stack_agents
from msrl_jax.envs.agents.vector import VectorizedAgents as VectorizedAgents
from msrl_jax.envs.agents.vector import vectorize_agents as vectorize_agents
from msrl_jax.envs.base import Environment as Environment
from msrl_jax.envs.base import MaskedObservation as MaskedObservation
from msrl_jax.envs.base import TimeStep as TimeStep
from msrl_jax.envs.base import VectorEnvironment as VectorEnvironment
from msrl_jax.envs.checking import Report as Report
from msrl_jax.envs.checking import check as check
from msrl_jax.envs.distributions import choice as choice
from msrl_jax.envs.distributions import log_uniform as log_uniform
from msrl_jax.envs.distributions import ramp as ramp
from msrl_jax.envs.distributions import uniform as uniform
from msrl_jax.envs.params import Curriculum as Curriculum
from msrl_jax.envs.params import RandomizeParams as RandomizeParams
from msrl_jax.envs.registry import make as make
from msrl_jax.envs.registry import names as names
from msrl_jax.envs.registry import register as register
from msrl_jax.envs.reset_pool import ResetPool as ResetPool
from msrl_jax.envs.running import RunningStatistics as RunningStatistics
from msrl_jax.envs.spaces import Box as Box
from msrl_jax.envs.spaces import Dict as Dict
from msrl_jax.envs.spaces import Discrete as Discrete
from msrl_jax.envs.spaces import MultiDiscrete as MultiDiscrete
from msrl_jax.envs.spaces import Space as Space
from msrl_jax.envs.spaces import Tuple as Tuple
from msrl_jax.envs.suites.gymnasium_env import GymnasiumEnvironment as GymnasiumEnvironment
from msrl_jax.envs.vector import Vectorized as Vectorized
from msrl_jax.envs.vector import VectorState as VectorState
from msrl_jax.envs.vector import vectorize as vectorize
from msrl_jax.envs.vector_wrappers import EpisodeStatistics as EpisodeStatistics
from msrl_jax.envs.vector_wrappers import NormalizeObservation as NormalizeObservation
from msrl_jax.envs.vector_wrappers import NormalizeReward as NormalizeReward
from msrl_jax.envs.wrappers import FlattenObservation as FlattenObservation
from msrl_jax.envs.wrappers import FrameStack as FrameStack
from msrl_jax.envs.wrappers import TimeLimit as TimeLimit

vectorise = _deprecated("vectorise", vectorize)
