"""The best agents of a run: a hook of `train` saves the state that each member needs to act, at its best evaluation."""

import functools
import io
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax._files import replacing
from msrl_jax.envs.base import close_simulators
from msrl_jax.fragments.runtime.crossing import key_impl
from msrl_jax.fragments.support.random_keys import is_key, key_for
from msrl_jax.report.provenance import origin_of, write_origin
from msrl_jax.run.evaluation.evaluate import make_evaluator
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.loop.loop import Run
from msrl_jax.run.recipes import RecordError
from msrl_jax.run.result import Result

_BEST = "best.npz"


class BestAgents:
    """Saves in the folder of the run the state that every member needs to act, at its best evaluation."""

    def __init__(self):
        self.scores = self.steps = np.zeros(0)  # of each member, at its best evaluation. `[M]`
        self.leaves: list[np.ndarray] = []  # as `Behavior.take` gives them; keys as their data

    def begin(self, run: Run) -> None:
        """Reads the file of an earlier process of the run; repeating the same evaluation changes nothing."""
        assert run.path is not None
        if run.rows:
            origin_of(run.path)
        name = f"eval_{run.experiment.rank_by}"
        if (run.path / _BEST).exists() or any(np.isfinite(row.get(name, math.nan)).any() for row in run.rows):
            self.read(run.path)

    def after(self, run: Run) -> None:
        """Saves the members that improved, and the provenance of the run."""
        assert run.path is not None
        write_origin(run.path, run.experiment.env_name)
        name = f"eval_{run.experiment.rank_by}"
        scores = np.atleast_1d(run.rows[-1].get(name, math.nan))
        if np.isnan(scores).all():
            return
        best_scores = self.scores if len(self.scores) else np.full(len(scores), -math.inf)
        is_better = scores > best_scores
        if not is_better.any():
            return
        leaves = [_host_data(leaf) for leaf in run.experiment.behavior.take(run.acting_state())]
        if run.experiment.has_members:
            leaves = [
                np.where(_broadcast_flags(is_better, x), x, y) for x, y in zip(leaves, self.leaves or leaves, strict=True)
            ]
        self.leaves = leaves
        self.scores = np.where(is_better, scores, best_scores)
        self.steps = np.where(is_better, run.step, self.steps if len(self.steps) else 0)
        with replacing(run.path / _BEST) as partial, partial.open("wb") as file:
            np.savez(file, *self.leaves, scores=self.scores, steps=self.steps)

    def read(self, path: Path) -> None:
        """Reads the file of a run; raises RecordError if it is damaged or missing."""
        if not (path / _BEST).exists():
            raise RecordError(
                f"{path} has no {_BEST}: no evaluation had a score, the file was removed, or something else trained the run; "
                "delete the folder, or choose another one"
            )
        try:
            with np.load(io.BytesIO((path / _BEST).read_bytes())) as file:
                self.scores, self.steps = file["scores"], file["steps"]
                self.leaves = [file[f"arr_{i}"] for i in range(len(file.files) - 2)]
        except Exception as error:  # errors of zip files and of NumPy
            raise RecordError(f"{path / _BEST} is damaged ({error}); delete {path}, and reproduce it again") from None

    def check(self, result: Result) -> None:
        """Raises RecordError if the agents are not the best ones in the history of a run."""
        name = f"eval_{result.experiment.rank_by}"
        scores = np.reshape(result.history[name], (len(result.history["step"]), -1))
        scores = np.where(np.isnan(scores), -math.inf, scores)
        best = scores.max(axis=0)
        steps = np.where(best > -math.inf, result.history["step"][scores.argmax(axis=0)], 0)
        if not np.array_equal(best, self.scores) or not np.array_equal(steps, self.steps):
            raise _unusable_error(result.experiment, "is of another run")

    def play(self, experiment: Experiment, episodes: int) -> np.ndarray:
        """Returns the mean score of each member over greedy episodes, with other keys than in its evaluations. `[M]`"""
        behavior, many = experiment.behavior, experiment.has_members
        evaluator = make_evaluator(behavior, episodes, members=many)
        fold = functools.partial(key_for, "best agents")
        try:
            key = (jax.vmap(fold) if many else fold)(experiment.key)
            shapes = [np.shape(x)[many:] for x in self.leaves]
            expected_shapes = [jax.eval_shape(_key_data, leaf_type).shape for leaf_type in behavior.leaf_types]
            if shapes != expected_shapes or (many and {len(x) for x in self.leaves} - {experiment.seeds}):
                raise _unusable_error(experiment, "is of another agent")
            if any(np.isnan(x).any() for x in self.leaves if np.issubdtype(x.dtype, np.floating)):
                raise _unusable_error(experiment, "has nan")
            leaves = [_device_leaf(x, leaf_type) for x, leaf_type in zip(self.leaves, behavior.leaf_types, strict=True)]
            return np.atleast_1d(evaluator.evaluate_leaves(leaves, key).means[f"eval_{experiment.rank_by}"])
        finally:
            close_simulators(evaluator.env)


def _unusable_error(experiment: Experiment, fact: str) -> RecordError:
    name = f"{_BEST} of the seeds from {experiment.seed} on"
    return RecordError(f"{name} {fact}; delete its folder, and reproduce it again")


def _host_data(leaf: jax.Array) -> np.ndarray:
    return np.asarray(_key_data(leaf))


def _key_data(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if is_key(leaf) else leaf


def _device_leaf(data: np.ndarray, leaf_type: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.random.wrap_key_data(jnp.asarray(data), impl=key_impl(leaf_type)) if is_key(leaf_type) else jnp.asarray(data)


def _broadcast_flags(flags: np.ndarray, leaf: np.ndarray) -> np.ndarray:
    """Reshapes flags of members to broadcast against arrays with a leading dimension of members."""
    return flags.reshape(-1, *[1] * (leaf.ndim - 1))
