"""The names of the package, for type checkers and for `lazy`, which imports each at its first use."""

from msrl_jax.fragments import codecs as codecs
from msrl_jax.fragments import counters as counters
from msrl_jax.fragments.compiler import compile as compile
from msrl_jax.fragments.graph.host_calls import host_fragment as host_fragment
from msrl_jax.fragments.graph.marker import fragment as fragment
from msrl_jax.fragments.graph.marker import fragment_scope as fragment_scope
from msrl_jax.fragments.metrics import Mean as Mean
from msrl_jax.fragments.plan.plan import Plan as Plan
from msrl_jax.fragments.plan.topologies import plan_devices as plan_devices
from msrl_jax.fragments.program import Program as Program
from msrl_jax.fragments.progress import Progress as Progress
from msrl_jax.fragments.runtime.state_layout import Delayed as Delayed
