"""The command `replay`."""

import dataclasses
from typing import Any

from msrl_jax.cli.command import Output, command
from msrl_jax.cli.commands import DIVERGED
from msrl_jax.cli.options import OptionGroup


@command(OptionGroup("msrl_jax.nonfinite.failure:replay_step", only=("path", "trust")))
def replay(arguments: dict[str, Any]) -> Output:
    """Repeat the first step of a run with a non-finite value, outside jax.jit, and report its origin."""
    from msrl_jax.nonfinite.failure import replay_step

    failure = replay_step(**arguments)
    if failure is None:
        return Output("all results of this step are finite here", {"finite": True}, DIVERGED)
    fields = {f.name: getattr(failure.origin, f.name) for f in dataclasses.fields(failure.origin) if f.name != "operands"}
    return Output(failure, {"iteration": failure.iteration, "member": failure.member, **fields})
