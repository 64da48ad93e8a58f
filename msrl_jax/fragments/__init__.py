"""Fragments: mark the parts of a training loop, and compile the loop for a distribution policy.

Each layer imports only the ones before it: placement.py (sub-meshes and layouts), `graph/`, `passes/`, `runtime/`, `plan/`,
program.py (`Program`), measure.py (the times of a program), compiler.py. Loops count and report with counters.py, progress.py
and metrics.py.

`compile` applies a policy (passes/placed_policy.py), then calls, in this order, `trace` and `build_graph` of `graph/`; `delay`,
`partition`, `pack`, `schedule` and `add_lifetimes` of `passes/`. On first use, `prepare_for_placement` (passes/prepare.py) and
`lower` (runtime/lower.py) make programs. docs/architecture.md says what each pass takes and returns; passes/validate.py refuses
bad input.

`HostLoop` (runtime/host_loop.py) runs the instructions with an `Executor` (runtime/execute.py). If one placement holds the
whole loop, the loop is one program instead (runtime/fused_loop.py). runtime/state_layout.py says where the state is kept.
`explain` (plan/explain.py) describes the result as a `Plan` (plan/plan.py).

Each name is imported on first use.
"""

from msrl_jax.fragments.support.lazy import names_of as _names_of

__getattr__, __dir__, __all__ = _names_of(__name__, __file__)
