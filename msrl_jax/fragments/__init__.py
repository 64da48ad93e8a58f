"""Fragments: mark the parts of a training loop, and compile the loop for a distribution policy.

Each layer imports only the ones before it: `support/`, codecs.py, placement.py (sub-meshes and layouts), `graph/`, `passes/`,
`runtime/`, `plan/`, program.py (`Program`), measure.py (the times of a program), compiler.py. Loops count and report with
counters.py, progress.py and metrics.py.

`compile` calls the passes in this order, but the last two run on first use, `prepare_for_placement` for several programs only:

    pass          file                     takes -> gives
    trace         graph/trace.py           iteration, state -> jaxpr, whose equations include the marked fragments
    build_graph   graph/build.py           jaxpr, layout -> Graph: nodes at placements, glue, opened loops
    delay         passes/staleness.py      Graph, changed in place: registers between learner and actors
    partition     passes/partition.py      Graph -> Partition: by placing.py, places of glue and carry; by grouping.py, programs
    pack          passes/packing.py        Partition, Graph, changed in place: codecs on edges; repeated until nothing changes
    schedule      passes/schedule.py       Partition -> Schedule: RunProgram, HostCall, Move, Alloc and Loop instructions; by
                                           stacked_rows.py, those that read or write a row of a stack
    add_lifetimes passes/lifetimes.py      Schedule -> Schedule with donations, copies and Free instructions
    prepare_for_placement
                  passes/prepare.py        jaxpr of a program -> jaxpr that XLA partitions correctly (repairs.py) and that, for
                                           one accelerator, has fewer kernels (compact.py)
    lower         runtime/lower.py         Schedule -> compiled programs (by compile_program.py) and shardings

passes/placed_policy.py applies the policy to devices and sizes before them; passes/validate.py refuses bad input.
`HostLoop` (runtime/host_loop.py) runs the instructions with an `Executor` (runtime/execute.py). If one placement holds the
whole loop, the loop is one program instead (runtime/fused_loop.py). runtime/state_layout.py says where the state is kept.
`explain` (plan/explain.py) describes the result as a `Plan` (plan/plan.py).

Each name is imported on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
