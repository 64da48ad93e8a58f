"""The names of the package, for type checkers and for `_lazy`, which imports each at its first use."""

from msrl_jax import algorithms as algorithms
from msrl_jax import codecs as codecs
from msrl_jax import counters as counters
from msrl_jax import data as data
from msrl_jax import envs as envs
from msrl_jax import fragments as fragments
from msrl_jax import metrics as metrics
from msrl_jax import policies as policies
from msrl_jax import replay as replay
from msrl_jax import training as training
from msrl_jax.fragments import Delayed as Delayed
from msrl_jax.fragments import Plan as Plan
from msrl_jax.fragments import Program as Program
from msrl_jax.fragments import compile as compile
from msrl_jax.fragments import fragment as fragment
from msrl_jax.fragments import plan_devices as plan_devices
from msrl_jax.metrics import Mean as Mean
from msrl_jax.training import PBT as PBT
from msrl_jax.training import Leaderboard as Leaderboard
from msrl_jax.training import Result as Result
from msrl_jax.training import SweepResult as SweepResult
from msrl_jax.training import compete as compete
from msrl_jax.training import replay_step as replay_step
from msrl_jax.training import sweep as sweep
from msrl_jax.training import train as train
