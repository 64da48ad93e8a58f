"""The command `act`."""

import functools
import sys
from typing import Any

import tyro

from msrl_jax.cli.commands import Command, command, option
from msrl_jax.cli.handlers import print_json


@command
class Act(Command):
    """Act for a learner that `msrl-jax train --actors-at` started, until its run is over."""

    addresses: tyro.conf.Positional[tuple[str, ...]] = option(
        doc="HOST:PORT of the learner, or the path of a file that contains it, such as /shared/learner, which may be written "
        "later; with several, act for several learners, each with its own run."
    )  # fmt: skip
    wait: str = option("10m", "how long to wait for the learner while it is away.")


def _act(args: Act, config: dict[str, Any]) -> int:
    from msrl_jax.elastic.actor import act

    unrolls = act(*args.addresses, wait=args.wait, trust=args.trust, say=functools.partial(print, file=sys.stderr, flush=True))
    if args.json:
        print_json({"unrolls": unrolls})
    return 0


ACT = (Act, _act)
