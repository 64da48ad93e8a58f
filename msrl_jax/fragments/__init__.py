"""Fragments: marking the parts of a training loop, and compiling the loop for a distribution policy.

`compile` (program.py) calls the passes in this order:

    pass              file                 takes -> gives
    trace             trace.py             iteration, state -> jaxpr, whose equations include the marked fragments
    build             build.py             jaxpr, layout -> Graph: nodes at placements, glue, opened loops
    check_owners      parameter_owners.py  Graph -> an error if two learners update one leaf
    delay             staleness.py         Graph, changed in place: registers between learner and actors
    check_codecs      packing.py           Layout -> an error if a codec or its edge does not exist
    partition         partition.py         Graph -> Partition: homes of glue and carry, nodes grouped into programs
    pack              packing.py           Partition, Graph, changed in place: codecs on edges; partition again until it rests
    schedule          schedule.py          Partition -> Schedule: Run, Move, Alloc and Loop instructions
    settle            lifetimes.py         Schedule -> Schedule with donations, copies and Free instructions
    check_meshes      own_meshes.py        Schedule -> an error if a fragment brings a mesh of other devices
    lower             lower.py             Schedule -> compiled programs and shardings (on first use)

`Executor` (runtime.py) then runs the instructions; a loop that one placement holds is one program instead (fused.py). `explain`
(explain.py) describes them as a `Plan` (plan.py), with the help of cost.py (operations), collectives.py (what XLA's partitioner
inserted), advice.py and idle_devices.py (warnings). Under them: marker.py and implementations.py (what `fragment` makes),
graph.py and instructions.py (data of the passes), placement.py (sub-meshes and layouts), divisibility.py (how a policy fits
devices and sizes), executables.py and program_key.py (compiled programs, and which of them are equal), given_state.py (checks
of a state), memory.py (where a state lies) and readings.py (metrics on the host).
"""

from msrl_jax.fragments.marker import fragment as fragment
from msrl_jax.fragments.plan import Plan as Plan
from msrl_jax.fragments.program import Delayed as Delayed
from msrl_jax.fragments.program import Program as Program
from msrl_jax.fragments.program import compile as compile
