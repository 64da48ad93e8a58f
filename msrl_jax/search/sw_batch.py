"""A run of a sweep: a batch of trials, trained as the members of one program."""

import dataclasses
import functools
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.algorithms import Algorithm
from msrl_jax.envs import Environment
from msrl_jax.envs.params import GivenParams
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.search.sw_joining import joined
from msrl_jax.search.sw_trials import Group, Trial
from msrl_jax.training import checkpoint, resume
from msrl_jax.training.folder import RunFolderError
from msrl_jax.training.progress import Progress
from msrl_jax.training.result import Result
from msrl_jax.training.settings import whole_iterations
from msrl_jax.training.setup import Setup, resolve
from msrl_jax.training.train import train


@dataclasses.dataclass(frozen=True)
class Common:
    """What all runs of a sweep share; the attributes are the arguments of `train`.

    Attributes:
      algorithm: the algorithm.
      env: the environment, or its name.
      distribution: the distribution policy.
      devices: the devices; all if None.
      total_steps: steps of a trial that goes on to the end.
      seed: the first seed.
      seeds: members of each trial.
      config: the config to start from.
      constants: fields that all trials share.
      eval_episodes: episodes of an evaluation.
      checkpoint_every: steps or time between checkpoints.
      env_params: what parameters of the environment are drawn from.
      progress: the display of a run.
    """

    algorithm: Algorithm
    env: str | Environment
    distribution: DistributionPolicy
    devices: Sequence[Device] | None
    total_steps: int
    seed: int
    seeds: int
    config: Any
    constants: Mapping[str, Any]
    eval_episodes: int
    checkpoint_every: int | str | None
    env_params: GivenParams | None
    progress: Progress

    def fields(self, group: Group, trials: Sequence[Trial]) -> dict[str, Any]:
        """The fields of the config of a run: those that are data have a value for each trial."""
        data = {name: [trial.values[name] for trial in trials] for name in group.data}
        return {**self.constants, **group.fields, **data}

    def setup(self, group: Group, trials: Sequence[Trial]) -> Setup:
        """The run of some trials, checked as `train` checks it; raises ValueError if it is invalid."""
        setup = resolve(
            self.algorithm.name, self.env, seed=self.seed, seeds=self.seeds, config=self.config,
            overrides=self.fields(group, trials) | {"total_steps": self.total_steps}, env_params=self.env_params,
        )  # fmt: skip
        agent = setup.behavior.agent
        whole_iterations(self.total_steps, agent.steps_per_iteration, None)
        if not agent.ranked:
            raise ValueError(
                f"{self.algorithm.name} trains teams or players that oppose each other, so returns do not rank its trials; "
                "train them with a list of values, and compare them otherwise"
            )
        if agent.unit == "updates" and self.eval_episodes == 0:
            raise ValueError(
                f"{self.algorithm.name} learns from data alone, so only evaluations have returns; give eval_episodes above 0"
            )
        return setup

    def run(
        self,
        group: Group,
        trials: Sequence[Trial],
        before: Sequence[tuple[Path | Result, int]],
        until: int,
        path: Path | None,
        time_limit: float | None,
    ) -> Result:
        """Trains trials from their start, or goes on with them in their folder.

        Args:
          group: their program.
          trials: the trials.
          before: the runs that trained them before, with the number of their first members there; empty at their start.
          until: the steps after which the run stops, at the first whole iteration.
          path: the folder of the run; None writes nothing.
          time_limit: seconds until the run has to be over.

        Returns:
          The result, with an evaluation at its end.
        """
        if path is not None and (done := self._done(path, until)) is not None:
            return done
        partly = until < self.total_steps
        with tempfile.TemporaryDirectory() as elsewhere:
            where = Path(elsewhere, "run") if path is None and before else path
            if before and where is not None and not resume.holds_run(where):
                data = {name: [trial.values[name] for trial in trials] for name in group.data}
                joined(self._loaded(before), data).save(where)
            result = self._train(group, trials, where, until if partly else None, time_limit)
        return result if path is not None else dataclasses.replace(result, folder=None)

    def _loaded(self, before: Sequence[tuple[Path | Result, int]]) -> list[tuple[Result, int]]:
        """The runs that trained trials before, each read once."""
        read = functools.cache(lambda run: Result.load(run, env=self._env_object, env_params=self.env_params))
        return [(run if isinstance(run, Result) else read(run), member) for run, member in before]

    @property
    def _env_object(self) -> Environment | None:
        return None if isinstance(self.env, str) else self.env

    def _train(
        self, group: Group, trials: Sequence[Trial], path: Path | None, until: int | None, time_limit: float | None
    ) -> Result:
        """Trains trials up to some steps, or to the end; goes on with the run in the folder if it holds one."""
        return train(
            self.algorithm.name, self.env, policy=self.distribution, total_steps=self.total_steps, seed=self.seed,
            seeds=self.seeds, config=self.config, devices=self.devices, out=path, resume=path is not None,
            eval_episodes=self.eval_episodes, eval_every=until, checkpoint_every=self.checkpoint_every,
            time_limit=time_limit, guard="ignore", env_params=self.env_params, progress=self.progress,
            callbacks=[] if until is None else [lambda tick: tick.step >= until], **self.fields(group, trials),
        )  # fmt: skip

    def _done(self, path: Path, until: int) -> Result | None:
        """The result of a run that did all these steps before."""
        if not resume.holds_run(path) or not checkpoint.complete(path):
            return None
        result = Result.load(path, env=self._env_object, env_params=self.env_params)
        per_iteration = result.behavior.agent.steps_per_iteration
        iterations = min(math.ceil(until / per_iteration), self.total_steps // per_iteration)
        done = int(result.history["iteration"][-1]) if len(result.history.get("iteration", ())) else 0
        if done > iterations:
            raise RunFolderError(
                f"the run in {path} has done {done * per_iteration} steps, and this sweep compares it after "
                f"{iterations * per_iteration}; restore its folder, or sweep in another one"
            )
        return result if done == iterations else None


def returns(result: Result) -> np.ndarray:
    """The return of every member: of its last evaluation, or over the last tenth of training without one.

    Args:
      result: the result of a run.

    Returns:
      The returns; nan for a member whose parameters are not finite. `[M]` float64
    """
    means = result.final("episode_return") if result.evaluation is None else result.evaluation.mean_return
    finite = np.ones(result.members, bool)
    for leaf in jax.tree.leaves(result.state.params):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite &= np.isfinite(np.asarray(leaf, np.float32)).reshape(result.members, -1).all(axis=1)
    return np.where(finite, np.atleast_1d(np.asarray(means, np.float64)), np.nan)


def outcome(trials: Sequence[Trial], seeds: int, result: Result, rung: int, run: int) -> list[Trial]:
    """The trials of a run with their steps and returns."""
    scores = returns(result).reshape(len(trials), seeds).tolist()
    steps = int(result.history["step"][-1])
    return [
        dataclasses.replace(trial, steps=steps, rung=rung, returns=tuple(scores[i]), run=run, member=i * seeds)
        for i, trial in enumerate(trials)
    ]
