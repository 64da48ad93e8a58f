"""A run in progress, as the host sees it: chunks of iterations, rows of the history, evaluations."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from msrl_jax.data.experience import ExperienceWriter, without_experience
from msrl_jax.envs.param_source import changed, find_source, replace_sources
from msrl_jax.envs.params import ParamSource
from msrl_jax.fragments.program import Delayed, Program
from msrl_jax.fragments.runtime.memory import put
from msrl_jax.training import processes
from msrl_jax.training.evaluate import Evaluation, Evaluator, make_evaluator
from msrl_jax.training.guard import Finding, Guard
from msrl_jax.training.history import NO_EPISODES, LastEpisodes, Row, reduce_chunk
from msrl_jax.training.pace import Pace
from msrl_jax.training.setup import Setup

TIMINGS = ("setup_seconds", "train_seconds", "evaluation_seconds")
"""Parts of a run's time, besides compiling."""

_METRICS_BYTES, _HOST_DRIVEN, _FUSED = 2**22, 256, 2**16
"""Limits of one dispatched part of a chunk: bytes of its metrics, and its iterations in plans of both kinds."""


@dataclasses.dataclass
class Run:
    """A run in progress.

    Attributes:
      setup: the run's agent and settings.
      program: the compiled iteration.
      run_state: the state, as `Program.run` takes and returns it.
      iterations: number of iterations of the whole run.
      pace: chooses the lengths of chunks.
      evaluate: plays greedy episodes; None never evaluates.
      eval_every: steps between evaluations; None evaluates at the end only.
      boundaries: numbers of steps at whose multiples a chunk has to end.
      experience: records the steps, if the run is recorded.
      guard: notices numbers that are not finite.
      started: time of `time.perf_counter` at which the run would have started if it had never been interrupted.
      rows: the history.
      last_episodes: the returns of the last episodes.
      iteration: iterations done.
      evaluation: the last evaluation.
      has_begun_evaluation: whether the evaluation is compiled, or is being compiled by another thread.
      non_finite: the first thing that is not finite and ends the run.
      rollbacks: how often the run went back to an earlier state.
      seconds: time spent on setting up, training and evaluating, by part.
      compiled_before: time that earlier processes spent on compiling.
      last_seconds: time of the last chunk.
      fingerprint: the settings that decide what the run computes, as a sum.
      new_env_params: what callbacks have set since the last chunk; None if nothing.
    """

    setup: Setup
    program: Program
    run_state: Any
    iterations: int
    pace: Pace
    evaluate: "RunEvaluation | None"
    eval_every: int | None
    boundaries: tuple[int, ...]
    experience: ExperienceWriter | None
    guard: Guard
    started: float
    rows: list[Row] = dataclasses.field(default_factory=list)
    last_episodes: LastEpisodes = NO_EPISODES
    iteration: int = 0
    evaluation: Evaluation | None = None
    has_begun_evaluation: bool = False
    non_finite: Finding | None = None
    rollbacks: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(TIMINGS, 0.0))
    compiled_before: float = 0.0
    last_seconds: float = 0.0
    fingerprint: str = ""
    new_env_params: Any = None

    @property
    def steps_per_iteration(self) -> int:
        """Steps per iteration."""
        return self.setup.behavior.agent.steps_per_iteration

    @property
    def step(self) -> int:
        """Steps done."""
        return self.iteration * self.steps_per_iteration

    @property
    def total_steps(self) -> int:
        """Steps of the whole run."""
        return self.iterations * self.steps_per_iteration

    @property
    def compile_seconds(self) -> float:
        """Time spent on tracing the training program, and on waiting until it was compiled."""
        return self.compiled_before + self.program.compile_seconds

    @property
    def registers(self) -> tuple[jax.Array, ...]:
        """The parameters on their way to the actors, if the policy has staleness."""
        return self.run_state.registers if isinstance(self.run_state, Delayed) else ()

    def state(self) -> Any:
        """The state of the algorithm."""
        return without_experience(self.program.unwrap(self.run_state))

    def advance(self) -> None:
        """Runs a chunk and adds a row to the history."""
        first = self.iteration
        compiling, start = self.program.compile_seconds, time.perf_counter()
        parts = []
        if not self.pace.is_known:
            parts.append(self._iterate(1))
        if rest := min(self.pace.length(first), self._to_boundary(first)) - (self.iteration - first):
            parts.append(self._iterate(rest))
        metrics = parts[0] if len(parts) == 1 else jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        self.last_seconds = time.perf_counter() - start - (self.program.compile_seconds - compiling)
        self.seconds["train_seconds"] += self.last_seconds
        if self.experience is not None:
            steps = (self.iteration - first) * self.steps_per_iteration // self.setup.behavior.agent.env.num_envs
            self.experience.add(self.program.unwrap(self.run_state), steps)
        self.non_finite = self.guard.check(self.run_state, metrics, self.iteration)
        self._add_row(self.iteration - first, metrics)
        if (returns := metrics.get("episode_return")) is not None:
            self.last_episodes = self.last_episodes.add(first, returns, finite=self.setup.skips)
        due = self.eval_every is not None and self.step // self.eval_every > first * self.steps_per_iteration // self.eval_every
        if due or self.iteration == self.iterations:
            self.evaluate_now()

    @property
    def _most(self) -> int:
        """The largest number of iterations between two readings of the metrics."""
        return most_at_once(self.program, self.pace.most)

    def compile(self) -> None:
        """Compiles the training program, unless it is compiled."""
        self.program.warm_up(self._most)

    def again(self, state: Any, count: int) -> tuple[Any, Any]:
        """Runs iterations from another state, which stays valid."""
        return self.program.run(state, count, chunk=self._most)

    def _iterate(self, count: int) -> Any:
        compiling, start = self.program.compile_seconds, time.perf_counter()
        self.run_state, metrics = self.program.run(self.run_state, count, chunk=self._most, donate=True)
        jax.block_until_ready(self.run_state)
        self.iteration += count
        seconds = time.perf_counter() - start - (self.program.compile_seconds - compiling)
        self.pace.measured(count, processes.agreed(seconds))
        return metrics

    def set_env_params(self, values: Any) -> None:
        """Checks what the next chunks draw parameters of the environments from; see `Tick`."""
        new = changed(self.setup.env, values)
        if not find_source(self.run_state):
            algo = self.setup.algorithm.name
            raise ValueError(f"{algo} takes no environment steps, so no parameters can be set during its run")
        self.new_env_params = {**(self.new_env_params or {}), **new} if isinstance(new, Mapping) else new

    def apply_env_params(self) -> None:
        """Puts what was set into the state.

        Raises:
          ValueError: if the processes of the run set different values.
        """
        values, self.new_env_params = self.new_env_params, None
        digest = "" if values is None else hashlib.sha256(repr(jax.tree.leaves_with_path(values)).encode()).hexdigest()
        if len(set(processes.gathered(digest))) > 1:
            raise ValueError("the processes of the run called tick.set_env_params with different values; call it alike in all")
        if values is None:
            return

        def placed(old: jax.Array, new: Any) -> jax.Array:
            if new is old:
                return old
            return put([np.broadcast_to(new, old.shape)], [(old.sharding,)], copy=True)[0][0]  # type: ignore[list-item]

        def replaced(source: ParamSource) -> ParamSource:
            new = source.values | values if isinstance(values, Mapping) else values
            return source._replace(values=jax.tree.map(placed, source.values, new))

        self.run_state = replace_sources(self.run_state, replaced)
        if not self.non_finite:
            self.guard.changed(self.run_state, self.iteration)

    def _to_boundary(self, iteration: int) -> int:
        """Iterations until the chunk has to end."""
        ends = [self.iterations]
        for every in self.boundaries:
            multiple = (iteration * self.steps_per_iteration // every + 1) * every
            ends.append(-(-multiple // self.steps_per_iteration))
        return min(ends) - iteration

    def _add_row(self, iterations: int, metrics: Mapping[str, Any]) -> None:
        self.rows.append({
            "step": self.step,
            "iteration": self.iteration,
            "seconds": time.perf_counter() - self.started,
            "steps_per_second": iterations * self.steps_per_iteration * self.setup.members / self.last_seconds,
            **reduce_chunk(metrics, finite=self.setup.skips),
        })  # fmt: skip
        if self.evaluate is not None:
            unknown = np.full(self.setup.members, np.nan) if self.setup.has_members else np.nan
            self.rows[-1] |= dict.fromkeys(self.evaluate.columns, unknown)

    def prepare_evaluation(self) -> None:
        """Has another thread compile the evaluation while the next chunks run."""
        if self.evaluate is not None and not self.has_begun_evaluation and processes.count() == 1:
            start = time.perf_counter()
            self.has_begun_evaluation = True
            self.evaluate.begin(self.state())
            self.seconds["evaluation_seconds"] += time.perf_counter() - start

    def evaluate_now(self) -> None:
        """Evaluates, unless a metric is not finite."""
        if self.evaluate is None or self.non_finite:
            return
        start = time.perf_counter()
        self.has_begun_evaluation = True
        self.evaluation = self.evaluate(self.state())
        self.seconds["evaluation_seconds"] += time.perf_counter() - start
        self.rows[-1] |= self.evaluation.means

    def score(self) -> float | None:
        """The measure of success by which the best checkpoint is kept; more is better. None if there is no such measure."""
        if not self.setup.behavior.agent.ranked:
            return None
        row = self.rows[-1] if self.rows else {}
        if self.setup.behavior.agent.unit == "updates":
            value = -np.mean(row.get("validation_loss", np.nan))
        elif self.eval_every is not None:
            value = np.mean(row.get("eval_return", np.nan))
        else:
            value = np.mean(self.last_episodes.mean())
        return float(value) if np.isfinite(value) else None


def most_at_once(program: Program, most: int) -> int:
    """The largest number of iterations between two readings of the metrics, if a chunk has at most `most`."""
    limit = _FUSED if program.is_fused else _HOST_DRIVEN
    return min(limit, most, max(1, _METRICS_BYTES // max(program.metrics_bytes, 1)))


@dataclasses.dataclass(frozen=True)
class RunEvaluation:
    """The evaluation of a run, with the same keys every time and for every member, so that differences come from the policy.

    Attributes:
      play: plays the episodes.
      key: the initial key of the run, or the keys `[M]` of its members.
    """

    play: Evaluator
    key: jax.Array

    @functools.cached_property
    def keys(self) -> jax.Array:
        """The key, or the keys `[M]` of the members."""
        fold = lambda key: jax.random.fold_in(key, 1)  # noqa: E731
        return (jax.vmap(fold) if self.key.ndim else fold)(self.key)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of `Evaluation.means`."""
        return ("eval_return", "eval_length", *(f"eval_return/{team}" for team in self.play.teams))

    def begin(self, state: Any) -> None:
        """Has another thread compile the program."""
        self.play.begin(state, self.keys)

    def __call__(self, state: Any) -> Evaluation:
        """Evaluates a state of the run."""
        return self.play(state, self.keys)


def make_evaluation(setup: Setup, episodes: int) -> RunEvaluation | None:
    """Makes the evaluation of a run.

    Args:
      setup: the run.
      episodes: number of episodes; 0 gives no evaluation.

    Returns:
      The evaluation.
    """
    if episodes == 0:
        return None
    return RunEvaluation(make_evaluator(setup.behavior, episodes, members=setup.has_members), setup.key)
