"""Training: a run is a sequence of chunks of iterations on the devices; the host calls the callbacks after each chunk."""

import contextlib
import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from msrl_jax._checks import whole
from msrl_jax.data.experience import ExperienceWriter, without_experience
from msrl_jax.envs import Environment
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Delayed, Program
from msrl_jax.policies.base import spec
from msrl_jax.training import folder
from msrl_jax.training.callbacks import Callback, Tick, short_unit
from msrl_jax.training.evaluate import Evaluation, make_evaluator
from msrl_jax.training.history import Row, first_non_finite, reduce_chunk, stack_rows
from msrl_jax.training.members import initial_key
from msrl_jax.training.progress import Progress, choose_display
from msrl_jax.training.result import Result, Status
from msrl_jax.training.setup import Setup, resolve, resolve_policy

TICKS = 50
"""The approximate number of chunks of a run; every chunk ends with a tick."""


class DivergedError(FloatingPointError):
    """A metric was nan or infinite.

    Attributes:
      metric: name of the metric.
      iteration: the first such iteration, counted from 1.
      member: number of the member; None for a run of one seed.
      result: the run up to the end of that chunk.
    """

    def __init__(self, metric: str, iteration: int, member: int | None, result: Result):
        who = "" if member is None else f" of member {member} (seed {result.description['seed'] + member})"
        super().__init__(
            f"{metric!r}{who} is not finite in iteration {iteration}; the history so far is in the error's "
            "`result`. Usual causes: a learning rate that is too high, rewards that need normalize_rewards=True, "
            "an environment that returns nan"
        )
        self.metric, self.iteration, self.member, self.result = metric, iteration, member, result


def chunk_length(iterations: int, ticks: int = TICKS) -> int:
    """Chooses the number of iterations of a chunk.

    Args:
      iterations: iterations of the whole run.
      ticks: wanted number of chunks.

    Returns:
      The divisor of `iterations` that gives the number of chunks closest to `ticks`, between 2/5 and twice `ticks`, so that
      one program runs every chunk. If there is none, a length with a shorter last chunk.
    """
    if iterations <= ticks:
        return 1
    lengths = range(math.ceil(iterations / (2 * ticks)), iterations * 5 // (2 * ticks) + 1)
    divisors = [length for length in lengths if iterations % length == 0]
    return min(divisors, key=lambda n: abs(iterations / n - ticks)) if divisors else round(iterations / ticks)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a flag, so that the current chunk finishes; a second Ctrl-C raises KeyboardInterrupt.

    Yields:
      A function that tells whether Ctrl-C was pressed; always False outside of the main thread, which gets no Ctrl-C.
    """
    pressed = False

    def on_interrupt(signum, frame):
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@dataclasses.dataclass
class _Run:
    """The host's view of a run in progress."""

    setup: Setup
    program: Program
    run_state: Any
    evaluate: Callable[[Any], Evaluation] | None
    eval_every: int | None
    started: float
    experience: ExperienceWriter | None = None
    rows: list[Row] = dataclasses.field(default_factory=list)
    iteration: int = 0
    evaluation: Evaluation | None = None
    non_finite: tuple[str, int, int | None] | None = None
    train_seconds: float = 0.0
    evaluation_seconds: float = 0.0

    @property
    def steps_per_iteration(self) -> int:
        return self.setup.behavior.agent.steps_per_iteration

    @property
    def step(self) -> int:
        return self.iteration * self.steps_per_iteration

    def state(self) -> Any:
        return without_experience(self.program.unwrap(self.run_state))

    def advance(self, iterations: int) -> None:
        """Runs a chunk and adds a row to the history."""
        compiling, start = self.program.compile_seconds, time.perf_counter()
        self.run_state, metrics = self.program.run(self.run_state, iterations, chunk=iterations, donate=True)
        jax.block_until_ready(self.run_state)
        seconds = time.perf_counter() - start - (self.program.compile_seconds - compiling)
        self.iteration += iterations
        self.train_seconds += seconds
        if self.experience is not None:
            steps = iterations * self.steps_per_iteration // self.setup.behavior.agent.env.num_envs
            self.experience.add(self.program.unwrap(self.run_state), steps)
        if bad := first_non_finite(metrics):
            metric, within, member = bad
            self.non_finite = metric, self.iteration - iterations + within + 1, member
        self.rows.append({
            "step": self.step,
            "iteration": self.iteration,
            "seconds": time.perf_counter() - self.started,
            "steps_per_second": iterations * self.steps_per_iteration * self.setup.seeds / seconds,
            **reduce_chunk(metrics),
        })  # fmt: skip
        if self.evaluate is not None:
            unknown = np.full(self.setup.seeds, np.nan) if self.setup.seeds > 1 else np.nan
            self.rows[-1] |= {"eval_return": unknown, "eval_length": unknown}
            before = self.step - iterations * self.steps_per_iteration
            if self.eval_every is not None and self.step // self.eval_every > before // self.eval_every:
                self.evaluate_now()

    def evaluate_now(self) -> None:
        """Evaluates, unless it has evaluated since the last chunk or a metric is not finite."""
        if self.evaluate is None or self.non_finite or not np.isnan(self.rows[-1]["eval_return"]).all():
            return
        start = time.perf_counter()
        self.evaluation = self.evaluate(self.state())
        self.evaluation_seconds += time.perf_counter() - start
        self.rows[-1] |= {"eval_return": self.evaluation.mean_return, "eval_length": self.evaluation.mean_length}


def _evaluator(setup: Setup, episodes: int) -> Callable[[Any], Evaluation] | None:
    """Evaluates every member with the same keys every time, so that differences come from the policy."""
    if episodes == 0:
        return None
    play = make_evaluator(setup.behavior, episodes, members=setup.seeds > 1)
    keys = initial_key(setup.seed, setup.seeds)
    fold = lambda key: jax.random.fold_in(key, 1)  # noqa: E731
    keys = jax.vmap(fold)(keys) if setup.seeds > 1 else fold(keys)
    return lambda state: play(state, keys)


def train(
    algo: str = "ppo",
    env: str | Environment = "CartPole-v1",
    *,
    policy: str | DistributionPolicy = "GPUOnly",
    total_steps: int = 500_000,
    seed: int = 0,
    seeds: int = 1,
    config: Any = None,
    devices: Sequence[Device] | None = None,
    out: str | os.PathLike | None = None,
    chunk: int | None = None,
    eval_episodes: int = 32,
    eval_every: int | None = None,
    record: str | os.PathLike | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = "auto",
    **overrides: Any,
) -> Result:
    """Trains an agent.

    Args:
      algo: name of an algorithm, such as `"ppo"`.
      env: an environment, or the name of one; parameters follow a colon (`"CartPole-v1:max_steps_in_episode=200"`).
      policy: a distribution policy, or the name of one (`"SingleLearnerCoarse:learners=2"`). It decides where the parts run
        and does not change the computation.
      total_steps: environment steps per seed, an integer or a float without a fraction, rounded down to whole iterations.
      seed: the seed of all randomness, from 0 to `2**32 - seeds`.
      seeds: number of independent runs to train at once, vectorized. Run `i` equals a single run with the seed `seed + i`, up
        to float tolerance.
      config: the algorithm's config; its defaults if None. The run sets its `total_steps`.
      devices: the devices to use; all if None.
      out: folder of the run (config, metrics during the run, checkpoint, summary); None writes nothing.
      chunk: iterations between two ticks; None chooses a number that gives 20 to 100 ticks.
      eval_episodes: number of greedy episodes per evaluation; 0 never evaluates.
      eval_every: environment steps between evaluations; each happens at the first tick at or after a multiple of it. A
        finished run always ends with an evaluation.
      record: file for a data set of all environment steps, for `msrl.data.load`. The steps of a chunk stay on the devices
        until its end, so they must fit there. Recording does not change the run.
      callbacks: called with a `Tick` after every chunk; the run stops if one returns True.
      progress: "auto", "bar", "lines", "notebook" or False; the display is on stderr.
      **overrides: fields of the algorithm's config.

    Returns:
      The result. Ctrl-C ends the run after the current chunk, and the result so far has `interrupted` True; a second Ctrl-C
      raises KeyboardInterrupt at once.

    Raises:
      ValueError: before anything compiles, on an unknown name or field, or an invalid value.
      DivergedError: if a metric is nan or infinite; it carries the result so far.
    """
    started = time.perf_counter()
    display, distribution = choose_display(progress), resolve_policy(policy)
    total_steps, eval_episodes = whole("total_steps", total_steps), whole("eval_episodes", eval_episodes, least=0)
    chunk = None if chunk is None else whole("chunk", chunk)
    eval_every = None if eval_every is None else whole("eval_every", eval_every)
    if out is not None:
        folder.check_free(Path(out))
    setup = resolve(algo, env, seed=seed, seeds=seeds, config=config, overrides=overrides | {"total_steps": total_steps})
    per_iteration = setup.behavior.agent.steps_per_iteration
    iterations = total_steps // per_iteration
    if not iterations:
        raise ValueError(
            f"total_steps={total_steps} is less than the {per_iteration} steps of one iteration; use at least "
            f"{per_iteration}, or fewer environments or shorter unrolls"
        )
    if chunk is None:
        chunk = chunk_length(iterations)
        if eval_every is not None and eval_episodes:
            chunk = min(chunk, max(1, eval_every // per_iteration))

    chunk = min(chunk, iterations)
    experience = None
    if record is not None:
        if setup.behavior.agent.unit != "environment steps":
            raise ValueError(f"record={os.fspath(record)!r}: {setup.algorithm.name} takes no environment steps; leave it out")
        experience = ExperienceWriter(record, setup.about() | {"policy": spec(distribution)})
        setup = setup.record(chunk * per_iteration // setup.behavior.agent.env.num_envs)
    program = setup.compile(distribution, devices)
    description = {
        "algorithm": setup.algorithm.name,
        "env": setup.env_name,
        "env_spec": setup.env_spec,
        "policy": spec(distribution),
        "seed": seed,
        "seeds": seeds,
        "total_steps": total_steps,
        "chunk": chunk,
        "eval_episodes": eval_episodes,
        "eval_every": eval_every,
        "config": folder.to_json(setup.config),
        "versions": folder.versions(),
        "devices": folder.describe_devices(program.devices),
        "registers": program.registers,
    }
    path = None if out is None else Path(out)
    if path is not None:
        callbacks = (folder.RowWriter(path, description), *callbacks)
    title = f"{setup.algorithm.name} {setup.env_name}"
    unit = short_unit(setup.behavior.agent.unit)
    with display(title, iterations * per_iteration, unit) as show, _interruptible() as interrupted:
        run_state = jax.block_until_ready(setup.start(program))
        setup_seconds = time.perf_counter() - started - program.compile_seconds
        run = _Run(setup, program, run_state, _evaluator(setup, eval_episodes), eval_every, started, experience)
        del run_state  # the run donates its memory
        try:
            status = _loop(run, iterations, chunk, (show, *callbacks), interrupted)
        finally:
            if experience is not None:
                experience.finish()
    result = Result(
        history=stack_rows(run.rows),
        config=setup.config,
        state=run.state(),
        status=status,
        compile_seconds=program.compile_seconds,
        wall_seconds=time.perf_counter() - started,
        timings={
            "setup_seconds": setup_seconds,
            "train_seconds": run.train_seconds,
            "evaluation_seconds": run.evaluation_seconds,
        },
        evaluation=run.evaluation,
        description=description,
        behavior=setup.behavior,
        registers=run.run_state.registers if isinstance(run.run_state, Delayed) else (),
        folder=path,
    )
    if path is not None:
        result.finish(path)
    if run.non_finite:
        raise DivergedError(*run.non_finite, result)
    return result


def _is_true(answer: Any) -> bool:
    """Whether a callback returned True (of Python, NumPy or JAX); other results have no effect."""
    return np.ndim(answer) == 0 and np.asarray(answer).dtype == bool and bool(answer)


def _loop(run: _Run, iterations: int, chunk: int, callbacks: Sequence[Callback], interrupted: Callable[[], bool]) -> Status:
    """Runs chunk after chunk; a KeyboardInterrupt from a callback ends the run like Ctrl-C."""
    while True:
        run.advance(min(chunk, iterations - run.iteration))
        if run.iteration == iterations:
            run.evaluate_now()
        total = iterations * run.steps_per_iteration
        tick = Tick(run.step, run.iteration, total, run.rows[-1], run.state, run.setup.behavior.agent.unit)
        try:
            stops = [_is_true(callback(tick)) for callback in callbacks]
        except KeyboardInterrupt:
            return "interrupted"
        if run.non_finite:
            return "diverged"
        if run.iteration == iterations:
            return "finished"
        if interrupted():
            return "interrupted"
        if any(stops):
            return "stopped"
