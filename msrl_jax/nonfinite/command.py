"""The command `replay`."""

import dataclasses
from pathlib import Path
from typing import Any

import tyro

from msrl_jax.cli.commands import Command, command, option
from msrl_jax.cli.handlers import DIVERGED, print_json


@command
class Replay(Command):
    """Repeat the first step of a run with a non-finite value, outside jax.jit, and report its origin."""

    file: tyro.conf.Positional[Path] = option(doc="the file non_finite.npz in the folder of the run.")


def _replay(args: Replay, config: dict[str, Any]) -> int:
    from msrl_jax.nonfinite.failure import replay_step

    failure = replay_step(args.file, trust=args.trust)
    if failure is None:
        print("all results of this step are finite here")
        return DIVERGED
    print(failure)
    if args.json:
        fields = {f.name: getattr(failure.origin, f.name) for f in dataclasses.fields(failure.origin) if f.name != "operands"}
        print_json({"iteration": failure.iteration, "member": failure.member, **fields})
    return 0


REPLAY = (Replay, _replay)
