"""The best trials of several runs as one run, which goes on where they were."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.training.evaluate import Evaluation
from msrl_jax.training.result import Result


def joined(parts: Sequence[tuple[Result, int]], settings: Mapping[str, Sequence[float]]) -> Result:
    """Takes trials out of runs that did equally many steps.

    Args:
      parts: the run of each trial, and the number of its first member there.
      settings: the fields that are data, with a value for each trial; empty for one trial whose numbers are constants.

    Returns:
      The result of a run of these trials with all their seeds. Its history is the last row of theirs.
    """
    first = parts[0][0]
    if not first.has_members:
        return first
    seeds, agent = first.seeds, first.behavior.agent

    def taken(of: Any) -> Any:
        """The members of the trials in trees with a leading dimension of all members."""
        rows = [jax.tree.map(lambda x, m=m: x[m : m + seeds], of(run)) for run, m in parts]
        return jax.tree.map(lambda *xs: (jnp if isinstance(xs[0], jax.Array) else np).concatenate(xs), *rows)

    last = None
    if all(run.evaluation is not None for run, _ in parts):
        names = [field.name for field in dataclasses.fields(Evaluation)]
        last = Evaluation(**taken(lambda run: {name: getattr(run.evaluation, name) for name in names}))
    columns = [name for name, x in first.history.items() if x.ndim > 1]
    history = {name: x[-1:] for name, x in first.history.items() if x.ndim == 1}
    history |= {name: x[None] for name, x in taken(lambda run: {name: run.history[name][-1] for name in columns}).items()}
    one = {name: values[0] for name, values in settings.items()}
    about = {"settings": {name: list(values) for name, values in settings.items()} or None}
    return dataclasses.replace(
        first,
        history=history,
        config=dataclasses.replace(first.config, **one),
        state=agent.with_data(taken(lambda run: agent.without_data(run.state))),
        registers=taken(lambda run: run.registers),
        evaluation=last,
        description={**first.description, **about, "config": {**first.description["config"], **one}},
        folder=None,
    )
