"""Going back to the last good state of a run, with half the learning rate and other random numbers."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.training import folder
from msrl_jax.training.guard import Finding, Guard
from msrl_jax.training.hyperparameters import FIELD, arrays
from msrl_jax.training.resume import fingerprint
from msrl_jax.training.run import Run
from msrl_jax.training.setup import Setup

MOST_ROLLBACKS = 5
"""A run goes back at most this often, and diverges after that."""


def fold_keys(state: Any, number: int) -> Any:
    """Folds a number into every typed key of a state, so that all randomness is another one."""

    def fold(x: Any) -> Any:
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return x
        each = jax.vmap(lambda key: jax.random.fold_in(key, number))
        return each(x.reshape(-1)).reshape(x.shape)

    return jax.tree.map(fold, state)


def slower(config: Any) -> Any:
    """The config with half of every learning rate."""
    rates = {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.name.endswith("learning_rate")}
    return dataclasses.replace(config, **{name: rate / 2 for name, rate in rates.items() if isinstance(rate, float)})


def again(state: Any, number: int, setup: Setup) -> Any:
    """The state with which a run begins again after it went back for the `number`-th time.

    Its keys are other ones, and the learning rates in which its members differ are halved: as often, or once if they evolve.
    """
    state = fold_keys(state, number)
    if not setup.settings:
        return state
    was = getattr(state, FIELD)
    slow = {name: x / 2 for name, x in was.items()}
    if setup.pbt is None:
        slow = {name: jnp.asarray(x / 2**number) for name, x in arrays(setup.settings, setup.seeds).items()}
    return state._replace(**{FIELD: was | {name: x for name, x in slow.items() if name.endswith("learning_rate")}})


def roll_back(
    run: Run,
    finding: Finding,
    description: dict[str, Any],
    path: Path | None,
    checkpoints: Callable[[], Iterator[tuple[Any, int]]],
    distribution: DistributionPolicy,
    devices: Sequence[Device] | None,
) -> None:
    """Takes a run back, in place: to the newest finite one of the guard's copy, the checkpoints and the start.

    Rows of the history after that state are dropped, and the program is compiled again.

    Args:
      run: the run.
      finding: what was not finite.
      description: the content of `config.json`; receives the new config and an entry of `rollbacks`.
      path: the folder of the run, or None.
      checkpoints: reads the states and iterations of the checkpoints, the newest first.
      distribution: the distribution policy.
      devices: the devices.
    """
    number = len(description["rollbacks"]) + 1
    state, iteration = run.guard.earlier(checkpoints)
    state = jax.tree.map(lambda x: jnp.copy(x), again(state, number, run.setup))
    before = run.setup.config
    run.setup = run.setup.with_config(slower(before))
    run.compiled_before += run.program.compile_seconds
    run.program = run.setup.compile(distribution, devices)
    run.run_state = run.program.place(state)
    run.guard = Guard(run.setup, run.program, run.run_state, policy="rollback", iteration=iteration)
    run.iteration, run.non_finite = iteration, None
    run.last_episodes = run.last_episodes.until(iteration)
    run.rows = [row for row in run.rows if row["iteration"] <= iteration]
    description["config"] = folder.to_json(run.setup.config)
    description["rollbacks"] = [
        *description["rollbacks"],
        {
            "from": finding.iteration,
            "to": iteration,
            "because": finding.metric or f"state{finding.leaf}",
            "learning_rate": getattr(run.setup.config, "learning_rate", None),
        },
    ]
    run.fingerprint = fingerprint(description)
    if path is not None:
        folder.rewind_rows(path, len(run.rows))
        folder.write_json(path / folder.CONFIG, description)
    run.compile()
