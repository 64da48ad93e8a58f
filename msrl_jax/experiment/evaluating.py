"""The hook that evaluates a run: with the same keys every time and for every member, so that only policies make differences."""

import time

import jax
import numpy as np

from msrl_jax.envs import VectorEnvironment
from msrl_jax.experiment import processes
from msrl_jax.experiment.evaluate import make_evaluator
from msrl_jax.experiment.run import Run
from msrl_jax.experiment.spec import Experiment


class Evaluating:
    """Plays greedy episodes when they are due, and at the end of the run."""

    def __init__(self, experiment: Experiment, episodes: int, every: int | None):
        """Makes the evaluation, without compiling it."""
        self._play = make_evaluator(experiment.behavior, episodes, members=experiment.has_members)
        fold = lambda key: jax.random.fold_in(key, 1)  # noqa: E731
        self._key = (jax.vmap(fold) if experiment.has_members else fold)(experiment.key)
        unknown = np.full(experiment.members, np.nan) if experiment.has_members else np.nan
        names = ("eval_return", "eval_length", *(f"eval_return/{team}" for team in self._play.teams))
        self._unknown = dict.fromkeys(names, unknown)
        self._has_begun, self._from, self.every = False, 0, every

    def before(self, run: Run) -> None:
        """Has another thread compile the evaluation while the chunks after the first one run."""
        self._from = run.step
        if not self._has_begun and run.iteration > run.resumed_from and processes.count() == 1:
            start, self._has_begun = time.perf_counter(), True
            self._play.begin(run.acting_state(), self._key)
            run.seconds["evaluation_seconds"] += time.perf_counter() - start

    def after(self, run: Run) -> None:
        """Evaluates if it is time, unless something is not finite."""
        run.rows[-1] |= self._unknown
        due = self.every is not None and run.step // self.every > self._from // self.every
        if run.finding is None and (due or run.iteration == run.iterations):
            start, self._has_begun = time.perf_counter(), True
            run.evaluation = self._play(run.acting_state(), self._key)
            run.seconds["evaluation_seconds"] += time.perf_counter() - start
            run.rows[-1] |= run.evaluation.means

    @property
    def env(self) -> VectorEnvironment:
        """The environments in which it plays."""
        return self._play.env
