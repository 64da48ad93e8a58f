"""The command `estimate`."""

import dataclasses
from pathlib import Path
from typing import Any

from msrl_jax.cli.commands import Checkpoint, OfAgent, command, option
from msrl_jax.cli.handlers import about_agent, print_json


@command
class Estimate(OfAgent):
    """Estimate the discounted return of a trained agent from a data set, by fitted Q evaluation, without running episodes."""

    data: Path = option(doc="the data set.")
    checkpoint: Checkpoint = option("newest", "newest, best, or the iteration after which it was written.")
    discount: float = option(0.99, "discount factor per step.")


def _estimate(args: Estimate, config: dict[str, Any]) -> int:
    from msrl_jax.offline_evaluation.fitted_q import FittedQ, estimate_return
    from msrl_jax.run import Result

    result = Result.load(args.run, checkpoint=args.checkpoint, trust=args.trust)
    settings = FittedQ(discount=args.discount)
    found = estimate_return(result, str(args.data), settings, seed=args.seed, member=args.member)
    about = about_agent(result, args.member)
    print(found)
    if args.json:
        print_json(about | dataclasses.asdict(found))
    return 0


ESTIMATE = (Estimate, _estimate)
