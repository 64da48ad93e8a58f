"""Reports: pages and figures of runs (`runs_page`, `plot_runs`), profiles (`profile`), reproduction of recipes (`reproduce`),
training speed (`bench`), and scaling of plans with devices (`scaling`).
"""

from msrl_jax.report import bench as bench
from msrl_jax.report import scaling as scaling
from msrl_jax.report import statistics as statistics
from msrl_jax.report.profile_results import Profile as Profile
from msrl_jax.report.profile_results import profiles_figure as profiles_figure
from msrl_jax.report.profiler import profile as profile
from msrl_jax.report.profiler import profile_program as profile_program
from msrl_jax.report.reproduction import Reproduction as Reproduction
from msrl_jax.report.reproduction import recipe as recipe
from msrl_jax.report.reproduction import reproduce as reproduce
from msrl_jax.report.runs_figure import plot_runs as plot_runs
from msrl_jax.report.runs_page import runs_page as runs_page
