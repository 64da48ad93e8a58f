"""Training: a run is a sequence of chunks of iterations on the devices; the host calls the callbacks after each chunk."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from msrl_jax import _compile_cache
from msrl_jax._checks import as_path, whole
from msrl_jax.envs import Environment
from msrl_jax.envs.host.base import release
from msrl_jax.envs.params import GivenParams
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.training import checkpoint, folder, processes, stopping, stored
from msrl_jax.training.begin import begin
from msrl_jax.training.callbacks import Callback, Tick, check_callbacks, short_unit
from msrl_jax.training.guard import DivergedError, Finding, GuardPolicy
from msrl_jax.training.history import stack_rows
from msrl_jax.training.pbt import GivenPBT
from msrl_jax.training.progress import Progress, choose_display
from msrl_jax.training.result import Result, Status
from msrl_jax.training.resume import Saved, open_run, read_description, restore_state
from msrl_jax.training.rollback import MOST_ROLLBACKS, roll_back
from msrl_jax.training.run import Run
from msrl_jax.training.saving import Saver, complete_folder, interval, keep_what_there_is
from msrl_jax.training.settings import Settings, check_ticks, run_folder, settle


@processes.in_words()
def train(
    algo: str | None = None,
    env: str | Environment | None = None,
    *,
    policy: str | DistributionPolicy | None = None,
    total_steps: int | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    config: Any = None,
    devices: Sequence[Device] | None = None,
    out: str | os.PathLike | None = None,
    resume: bool | str | os.PathLike = False,
    chunk: int | None = None,
    eval_episodes: int | None = None,
    eval_every: int | None = None,
    checkpoint_every: int | str | None = None,
    keep_checkpoints: int = 2,
    time_limit: float | str | None = None,
    guard: GuardPolicy | None = None,
    record: str | os.PathLike | None = None,
    env_params: GivenParams | None = None,
    pbt: GivenPBT | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress = "auto",
    **overrides: Any,
) -> Result:
    """Trains an agent.

    If several processes run the program (`jax.distributed`), all of them call this with the same arguments. Process 0 shows
    progress and writes files; a request to stop, on any process, stops all after the same chunk.

    Args:
      algo: name of an algorithm, such as `"ppo"`, the default.
      env: an environment, or the name of one; parameters follow a colon (`"CartPole-v1:max_steps_in_episode=200"`). By
        default `"CartPole-v1"`.
      policy: a distribution policy, or the name of one (`"SingleLearnerCoarse:learners=2"`); by default `"GPUOnly"`. It
        decides where the parts run and does not change the computation.
      total_steps: environment steps per seed, an integer or a float without a fraction, rounded down to whole iterations; by
        default 500,000.
      seed: the seed of all randomness, from 0 to `2**32 - seeds`; by default 0.
      seeds: number of independent runs to train at once, vectorized; by default 1. Run `i` equals a single run with the seed
        `seed + i`, up to float tolerance.
      config: the algorithm's config; its defaults if None. The run sets its `total_steps`.
      devices: the devices to use; all if None.
      out: folder of the run (config, metrics and checkpoints during the run, summary at its end); None writes nothing.
      resume: the folder of a run to go on with, exactly where its newest checkpoint is. What is not given comes from the
        folder. What decides what the run computes must be equal if it is given again; policy, devices, `chunk` and
        evaluations may differ, and more `total_steps` extend the run. True goes on with the run in `out`, or starts it
        there if there is none.
      chunk: iterations between two ticks. None chooses about a second, and at least about 50 ticks in a run; chunks then
        also end where evaluations and checkpoints are due.
      eval_episodes: number of greedy episodes per evaluation, by default 32; 0 never evaluates.
      eval_every: environment steps between evaluations; each happens at the first tick at or after a multiple of it. A
        finished run always ends with an evaluation.
      checkpoint_every: steps between checkpoints as an integer, or their time as text, such as `"10m"`; None takes a minute,
        or longer if saving would take more than 2% of the time. Runs with a folder are always saved at their end.
      keep_checkpoints: number of checkpoints to keep, besides the one with the best evaluation (without `eval_every`, the
        best training return).
      time_limit: time after which the run is saved and ends, in seconds or as text, such as `"5h50m"`.
      guard: what the run does about nan and infinities: "halt", the default, ends it with a `DivergedError`; "skip" drops
        updates that are not finite; "rollback" goes back to the last good state, with half the learning rate and other random
        numbers, at most 5 times; "ignore" goes on, which changes no other member.
      record: file for a data set of all environment steps, for `msrl.data.load`. The steps of a chunk stay on the devices
        until its end, so they must fit there. Recording does not change the run.
      env_params: what parameters of the environment are drawn from at each reset, as in `envs.RandomizeParams`: name -> a
        number, `envs.uniform(low, high)` and the like, also as text (`"length=uniform:0.25:1,gravity=9.8"`); a function
        `key -> mapping`; or an `envs.Curriculum`. They are data: callbacks may change them (`Tick.set_env_params`). Evaluations
        draw from the same.
      pbt: trains a population: `msrl.PBT(search={"learning_rate": msrl.envs.log_uniform(1e-5, 1e-2)}, members=8, every=20)`,
        or the same as text. Members copy better ones, and change the hyper-parameters that they copy.
      callbacks: called with a `Tick` after every chunk; the run stops if one returns True. Each process calls its own.
      progress: "auto", "bar", "lines", "notebook" or False; the display is on stderr.
      **overrides: fields of the algorithm's config. A number of the type `Tunable`, such as `learning_rate`, may have a list of
        values: each is a setting, which has a member for every seed.

    Returns:
      The result. Ctrl-C, SIGTERM, SIGHUP and the time limit end the run after the current chunk; it is saved, and the result
      so far has `interrupted` True. A second signal ends the process at once.

    Raises:
      ValueError: before anything compiles, on an unknown name or field, or an invalid value.
      RunFolderError: a ValueError, if the folder holds no run to go on with, another one, or a damaged one.
      DivergedError: if a metric, a parameter or an observation is nan or infinite; it carries the result so far.
      ProcessError: if another process of the run ended.
    """
    started = time.perf_counter()
    limit = None if time_limit is None else stopping.seconds("time_limit", time_limit)
    display = choose_display(progress if processes.is_first() else False)
    every, callbacks, keep = interval(checkpoint_every), check_callbacks(callbacks), whole("keep_checkpoints", keep_checkpoints)
    given = {
        "algo": algo, "env": env, "policy": policy, "total_steps": total_steps, "seed": seed, "seeds": seeds,
        "env_params": env_params, "pbt": pbt,
    }  # fmt: skip
    ticks = check_ticks(eval_episodes=eval_episodes, eval_every=eval_every, chunk=chunk)
    # Absolute, because a callback may change the working directory.
    out, record = (None if x is None else as_path(name, x).absolute() for name, x in (("out", out), ("record", record)))
    path, goes_on = run_folder(out, resume if isinstance(resume, bool) else as_path("resume", resume).absolute())
    with contextlib.ExitStack() as stack:
        stack.enter_context(_compile_cache.on())
        requests = stack.enter_context(stopping.stop_requests(limit))
        with processes.together("setting up the run"):
            saved = stack.enter_context(_opened(path, goes_on))
            settings = settle(given, ticks, config, overrides, guard, record, devices, saved)
            if settings is None:
                assert saved is not None
                return _already_done(saved, env, env_params)
            saver = None if path is None else Saver(path, every, keep)
            writer = folder.RowWriter(path, settings.description) if path is not None and processes.is_first() else None
        agent = settings.setup.behavior.agent
        title = f"{settings.setup.algorithm.name} {settings.setup.env_name}"
        show = stack.enter_context(display(title, settings.iterations * agent.steps_per_iteration, short_unit(agent.unit)))
        run = begin(settings, saved, every, started)
        stack.callback(release, run.setup.agent.env)
        if run.evaluate is not None:
            stack.callback(release, run.evaluate.play.env)
        if writer is not None:
            writer.flush()  # from now on the folder is a run's
            callbacks = (writer, *callbacks)
        try:
            rolls_back = functools.partial(_rolls_back, run, settings, path, saver)
            status, reason = _loop(run, (show, *callbacks), requests, saver, rolls_back)
        except Exception as error:  # such as that of a callback: what was done so far is kept
            if not processes.is_loss(error):
                keep_what_there_is(run, saver)
            raise
        error = None if saver is None else saver.finish(run)
        if run.experience is not None:
            run.experience.finish(goes_on=saver is not None and status in ("interrupted", "stopped"))
        result = _result(run, settings.description, status, reason, path)
        if path is not None and processes.is_first():
            result = complete_folder(result, path, error)
        processes.gathered("")  # no process ends while another one writes
    if run.non_finite:
        finding = run.guard.locate(
            run.non_finite, run.again, settings.description, path, checkpoints=lambda: _saved_states(path, run),
            seconds_per_iteration=run.seconds["train_seconds"] / run.iteration,
        )  # fmt: skip
        raise DivergedError(finding, result)
    return result


@contextlib.contextmanager
def _opened(path: Path | None, goes_on: bool) -> Iterator[Saved | None]:
    """Locks the folder of the run; gives the run in it that goes on."""
    if path is None:
        yield None
        return
    read_description(path) if goes_on else folder.check_free(path)
    with folder.locked(path) if processes.is_first() else contextlib.nullcontext():
        yield open_run(path) if goes_on else None


def _result(run: Run, description: dict[str, Any], status: Status, reason: str, path: Path | None) -> Result:
    return Result(
        history=stack_rows(run.rows),
        config=run.setup.config,
        state=processes.to_hosts(run.state()),
        status=status,
        stop_reason=reason,
        compile_seconds=run.compile_seconds,
        wall_seconds=time.perf_counter() - run.started,
        timings=run.seconds,
        evaluation=run.evaluation,
        description=description,
        behavior=run.setup.behavior,
        registers=processes.to_hosts(run.registers),
        folder=path,
    )


def _rolls_back(run: Run, settings: Settings, path: Path | None, saver: Saver | None, finding: Finding) -> bool:
    """Takes a run back to its last good state, if its guard allows it."""
    if settings.guard != "rollback" or run.rollbacks >= MOST_ROLLBACKS:
        return False
    if saver is not None:
        saver.wait()
    checkpoints = functools.partial(_saved_states, path, run)
    roll_back(run, finding, settings.description, path, checkpoints, settings.distribution, settings.devices)
    if saver is not None:
        saver.goes_on_from(run)
    run.rollbacks += 1
    return True


def _saved_states(path: Path | None, run: Run) -> Iterator[tuple[Any, int]]:
    """The states and iterations of the checkpoints of a run, the newest first."""
    for found in [] if path is None else checkpoint.undamaged(path):
        yield restore_state(found, run.setup, run.program), found.iteration


def _already_done(saved: Saved, env: Any, env_params: GivenParams | None) -> Result:
    """The result of a run that has done all its steps, and may have been killed before its summary."""
    result = Result.load(saved.path, env=None if isinstance(env, str) else env, env_params=env_params)
    if result.status == "unfinished":
        result = dataclasses.replace(result, status="finished")
        if processes.is_first():
            stored.finish(result, saved.path)
    return result


def _is_true(answer: Any) -> bool:
    """Whether a callback returned True (of Python, NumPy or JAX); other results have no effect."""
    return np.ndim(answer) == 0 and np.asarray(answer).dtype == bool and bool(answer)


def _loop(
    run: Run,
    callbacks: Sequence[Callback],
    requests: stopping.StopRequests,
    saver: Saver | None,
    rolls_back: Callable[[Finding], bool],
) -> tuple[Status, str]:
    """Runs chunk after chunk; a KeyboardInterrupt from a callback ends the run like Ctrl-C.

    Returns:
      The status, and why the run was interrupted.
    """
    first = run.step
    if saver is not None:
        saver.goes_on_from(run)
    while True:
        reasons = processes.gathered(requests.reason(run.last_seconds + (saver.seconds if saver else 0.0)))
        if reason := next(filter(None, reasons), ""):
            return "interrupted", reason
        run.advance()
        unit = run.setup.behavior.agent.unit
        state = lambda: processes.to_hosts(run.state())  # noqa: E731
        tick = Tick(run.step, run.iteration, run.total_steps, dict(run.rows[-1]), state, unit, first, run.set_env_params)
        with processes.together("a callback"):
            try:
                stops = [_is_true(callback(tick)) for callback in callbacks]
                answer = "stop" if any(stops) else ""
            except KeyboardInterrupt:
                answer = "SIGINT"
        answers = processes.gathered(answer)
        run.apply_env_params()
        if "SIGINT" in answers:
            return "interrupted", "SIGINT"
        if run.non_finite:
            if not rolls_back(run.non_finite):
                return "diverged", ""
            continue
        if run.iteration == run.iterations:
            return "finished", ""
        if any(answers):
            return "stopped", ""
        if saver is not None and processes.agreed(saver.is_due(run)):
            saver.save(run)
        run.prepare_evaluation()
