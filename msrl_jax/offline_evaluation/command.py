"""The command `estimate`."""

import dataclasses
from typing import Any

from msrl_jax.cli.command import Output, command
from msrl_jax.cli.commands import about_agent, run_of
from msrl_jax.cli.options import OptionGroup


@command(run_of, OptionGroup("msrl_jax.offline_evaluation.fitted_q:estimate_return", only=("seed", "member")))
def estimate(run: dict[str, Any], arguments: dict[str, Any], *, data: str, discount: float = 0.99) -> Output:
    """Estimate the discounted return of a trained agent from a data set, by fitted Q evaluation, without running episodes.

    Args:
      data: the data set.
      discount: discount factor per step.
    """
    from msrl_jax.offline_evaluation.fitted_q import FittedQ, estimate_return

    result = run_of(**run)
    off_policy_estimate = estimate_return(result, data, FittedQ(discount=discount), **arguments)
    line, about = about_agent(result, arguments.get("member"))
    return Output(f"{line}{off_policy_estimate}", about | dataclasses.asdict(off_policy_estimate))
