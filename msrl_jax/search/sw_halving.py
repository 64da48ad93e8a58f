"""Successive halving: all settings train for a few steps, and the best of them go on."""

import math
from collections.abc import Sequence

from msrl_jax._checks import whole
from msrl_jax.search.sw_trials import Trial, by_return


def rung_steps(
    total_steps: int, factor: int | None, rungs: int | None, min_steps: int | None, trials: int, least: int
) -> list[int]:
    """The steps after which trials are compared, and at last those of the whole sweep.

    Args:
      total_steps: steps of the trials that go on to the end.
      factor: one of this many trials goes on; None trains all to the end.
      rungs: number of comparisons, the last one included; None for as many as leave one trial.
      min_steps: steps of the first rung, in place of `rungs`; each rung has `factor` times as many.
      trials: number of trials.
      least: steps of one iteration.

    Returns:
      The steps of each rung (Jamieson and Talwalkar, 2016, arXiv 1502.07943).

    Raises:
      ValueError: if a number is out of range or has no effect.
    """
    if factor is None:
        for name, value in (("rungs", rungs), ("min_steps", min_steps)):
            if value is not None:
                raise ValueError(f"{name}={value} has no effect without halving=; give the factor, such as halving=3")
        return [total_steps]
    factor = whole("halving", factor, least=2)
    if rungs is not None and min_steps is not None:
        raise ValueError(f"rungs={rungs} and min_steps={min_steps} both choose the first rung; leave one out")
    if min_steps is not None:
        found = [whole("min_steps", min_steps)]
        while found[-1] * factor < total_steps:
            found.append(found[-1] * factor)
        found.append(total_steps)
        given = f"min_steps={min_steps}"
    else:
        count = 1 if rungs is None else whole("rungs", rungs, least=2)
        while rungs is None and factor**count <= trials and total_steps // factor**count >= least:
            count += 1
        found = [total_steps // factor**i for i in reversed(range(count))]
        given = f"halving={factor} with rungs={count}"
    if found[0] < least or found[0] >= total_steps:
        raise ValueError(
            f"{given}: the first rung has {found[0]} of total_steps={total_steps}; it needs at least the {least} steps of one "
            "iteration, and fewer than all"
        )
    return found


def survivors(trials: Sequence[Trial], factor: int) -> list[Trial]:
    """The best trials, one of `factor`, at least one; none whose return is nan."""
    best = sorted(trials, key=by_return)[: -(-len(trials) // factor)]
    return sorted((trial for trial in best if not math.isnan(trial.mean)), key=lambda trial: trial.number)
