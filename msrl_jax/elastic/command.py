"""The command `act`."""

import functools
import sys
from typing import Any

from msrl_jax.cli.command import Output, command
from msrl_jax.cli.options import OptionGroup, UsageError


@command(OptionGroup("msrl_jax.elastic.actor:act", without=("experiment", "say")))
def act(arguments: dict[str, Any]) -> Output:
    """Act for a learner that `msrl-jax train --actors-at` started, until its run is over."""
    from msrl_jax.elastic.actor import act

    if not (addresses := arguments.pop("addresses")):
        raise UsageError("ADDRESSES are missing: give HOST:PORT of a learner, or the path of a file with it")
    unrolls = act(*addresses, **arguments, say=functools.partial(print, file=sys.stderr, flush=True))
    return Output(data={"unrolls": unrolls})
