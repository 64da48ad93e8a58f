"""The names of the package, for type checkers and for `_lazy`, which imports each at its first use."""

from msrl_jax import algorithms as algorithms
from msrl_jax import codecs as codecs
from msrl_jax import data as data
from msrl_jax import envs as envs
from msrl_jax import experiment as experiment
from msrl_jax import fragments as fragments
from msrl_jax import policies as policies
from msrl_jax import replay as replay
from msrl_jax import report as report
from msrl_jax import search as search
from msrl_jax.experiment import PBT as PBT
from msrl_jax.experiment import Result as Result
from msrl_jax.experiment import replay_step as replay_step
from msrl_jax.experiment import train as train
from msrl_jax.fragments import Delayed as Delayed
from msrl_jax.fragments import Mean as Mean
from msrl_jax.fragments import Plan as Plan
from msrl_jax.fragments import Program as Program
from msrl_jax.fragments import compile as compile
from msrl_jax.fragments import counters as counters
from msrl_jax.fragments import fragment as fragment
from msrl_jax.fragments import plan_devices as plan_devices
from msrl_jax.search import Leaderboard as Leaderboard
from msrl_jax.search import SweepResult as SweepResult
from msrl_jax.search import compete as compete
from msrl_jax.search import sweep as sweep
