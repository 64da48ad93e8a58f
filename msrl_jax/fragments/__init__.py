"""Fragments: marking the parts of a training loop, and compiling the loop for a distribution policy.

`compile` (compiler.py) calls the passes in this order:

    pass              file                 takes -> gives
    trace             trace.py             iteration, state -> jaxpr, whose equations include the marked fragments
    build             build.py             jaxpr, layout -> Graph: nodes at placements, glue, opened loops
    check_owners      parameter_owners.py  Graph -> an error if two learners update one leaf
    delay             staleness.py         Graph, changed in place: registers between learner and actors
    check_codecs      packing.py           Layout -> an error if a codec or its edge does not exist
    check_codec_names packing.py           Graph, Layout -> an error if a codec is for a name that no value has
    partition         partition.py         Graph -> Partition: homes of glue and carry, nodes grouped into programs
    pack              packing.py           Partition, Graph, changed in place: codecs on edges; repeated until nothing changes
    schedule          schedule.py          Partition -> Schedule: Run, Move, Alloc and Loop instructions
    settle            lifetimes.py         Schedule -> Schedule with donations, copies and Free instructions
    check_meshes      own_meshes.py        Schedule -> an error if a fragment uses a mesh of other devices
    lower             lower.py             Schedule -> compiled programs and shardings (on first use)

`Executor` (runtime.py) then runs the instructions. If one placement holds the whole loop, the loop is one program instead
(fused.py). `explain` (explain.py) describes the result as a `Plan` (plan.py), using cost.py (operations), collectives.py
(XLA's collectives), advice.py and idle_devices.py (warnings).

Other modules: program.py (`Program`), marker.py and implementations.py (`fragment`), graph.py and instructions.py (data of
the passes), placement.py (sub-meshes and layouts), divisibility.py (whether a policy fits devices and sizes), executables.py
and program_key.py (compiled programs, sharing of equal ones), given_state.py (checks of a state), memory.py (placing a
state, and whether states and programs fit), host.py and host_calls.py (functions that the host calls), staged.py (states that
such functions make), crossing.py and processes.py (moves and arrays of several processes),
trip_counts.py (lengths of XLA's loops), topologies.py (devices that are not there), readings.py (metrics on the host) and
origin.py (the first operation whose result is nan).
"""

from msrl_jax.fragments.compiler import compile as compile
from msrl_jax.fragments.graph.host import host_fragment as host_fragment
from msrl_jax.fragments.graph.marker import fragment as fragment
from msrl_jax.fragments.graph.marker import fragment_scope as fragment_scope
from msrl_jax.fragments.plan.plan import Plan as Plan
from msrl_jax.fragments.plan.topologies import plan_devices as plan_devices
from msrl_jax.fragments.program import Delayed as Delayed
from msrl_jax.fragments.program import Program as Program
