"""Training: `train` checks its arguments, the hooks do the work of the host, and the loop runs the chunks."""

import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from msrl_jax import policies
from msrl_jax._compat import is_tracing
from msrl_jax._files import as_path
from msrl_jax.agents.replay_ratio import replay_ratio
from msrl_jax.envs import Environment
from msrl_jax.envs.base import close_simulators, is_on_host
from msrl_jax.envs.images import unseen_images
from msrl_jax.envs.params import GivenParams
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.support import compiling
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.naming import check_trust
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.policies.helpers import policy_text
from msrl_jax.run import processes, recipes
from msrl_jax.run.auto_policy import is_auto, resolve_policy
from msrl_jax.run.disk import folder, store
from msrl_jax.run.evaluation.history import stack_rows
from msrl_jax.run.experiment.experiment import Experiment, GuardPolicy
from msrl_jax.run.experiment.pbt import GivenPBT
from msrl_jax.run.experiment.trust import code_of
from msrl_jax.run.loop.callbacks import Callback, Callbacks, ProgressDisplay, check_callbacks, choose_display, is_hook
from msrl_jax.run.loop.execution import EXECUTIONS, Execution, InProcess
from msrl_jax.run.loop.guard import DivergedError, Guard, StopOrRollBack, again
from msrl_jax.run.loop.hooks import (
    Checkpoints,
    Evaluating,
    LostSteps,
    RunFileWriter,
    parse_checkpoint_interval,
    parse_duration,
    stop_requests,
    with_recording,
)
from msrl_jax.run.loop.loop import ChunkScheduler, Hook, Run, StopReason, finish, loop
from msrl_jax.run.prepare import check_resumes, make_experiment, open_folder, saved_experiment
from msrl_jax.run.result import Result

_LONGEST = 500  # maximum number of characters of an error that is passed to hooks


@entry
@processes.in_words()
def train(
    algo: Any = None,
    env: str | Environment | None = None,
    *,
    policy: str | DistributionPolicy | None = None,
    total_steps: int | None = None,
    seed: int | None = None,
    seeds: int | None = None,
    devices: Sequence[Device] | None = None,
    out: str | os.PathLike | None = None,
    resume: bool | str | os.PathLike = False,
    actors_at: str | None = None,
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
    rank_by: str | None = None,
    trust: bool = False,
    callbacks: Sequence[Callback] = (),
    progress: ProgressDisplay = "auto",
    **overrides: Any,
) -> Result:
    """Trains an agent.

    If several processes run the program (`jax.distributed`), all of them must call this with the same arguments. Process 0
    shows progress and writes files. A request to stop, on any process, stops all of them after the same chunk.

    Args:
      algo: an algorithm: its name, by default `"ppo"`; a file, such as `"my_ppo.py"`; `"MODULE:CLASS"`; or, in Python, a
        config, such as `PPO(learning_rate=3e-4)`, or a config class. An `Experiment` replaces all arguments that determine what
        is computed.
      env: an environment, or the name of one; parameters follow a colon (`"CartPole-v1:max_steps_in_episode=200"`). By
        default `"CartPole-v1"`.
      policy: a distribution policy, or the name of one (`"SingleLearnerCoarse:learners=2"`). `"auto"` measures the policies
        that perform the same computation and uses the fastest, see `choose_policy`. By default `"GPUOnly"`, or
        `"MultiLearner"` if the host simulates the environment. The policy decides where the parts run; it changes numbers only
        by float rounding, unless it has staleness or a lossy codec.
      total_steps: environment steps per seed, an integer or a float without a fraction, rounded down to whole iterations; by
        default 500,000.
      seed: the seed of all randomness, from 0 to `2**32 - seeds`; by default 0.
      seeds: number of independent runs to train at the same time, vectorized; by default 1. Run `i` equals a single run with
        the seed `seed + i`, up to float tolerance.
      devices: the devices to use; None uses all.
      out: folder of the run (config, metrics and checkpoints during the run, summary at its end); None writes nothing.
      resume: the folder of a run to resume, exactly from its newest checkpoint. Arguments that you leave out are read from
        the folder. Arguments that determine what is computed must not change; policy, devices, `chunk` and evaluations may
        differ, and more `total_steps` extend the run. `True` resumes the run in `out`, or starts a new run if there is none.
      actors_at: `HOST:PORT` at which this process, the learner, listens for actors in other processes (`msrl-jax act`), which
        may join and leave at any time. The policy must then be a `SingleLearnerCoarse`, by default with `staleness=8`; unrolls
        that were made with older parameters are dropped.
      chunk: iterations between two ticks. None chooses about one second per chunk, and at least about 50 ticks in a run; chunks
        then also end when evaluations and checkpoints are due.
      eval_episodes: number of greedy episodes per evaluation, by default 32; 0 disables evaluation.
      eval_every: environment steps between evaluations; each happens at the first tick at or after a multiple of it. A finished
        run always ends with an evaluation.
      checkpoint_every: steps between checkpoints as an integer, or the time between them as text, such as `"10m"`. None uses
        one minute, or longer if saving would take more than 2% of the time. Runs with a folder are always saved at the end.
      keep_checkpoints: number of checkpoints to keep, in addition to the one with the best evaluation (without `eval_every`,
        the best mean return of the last 100 episodes of training; see `rank_by`). Each evaluation that is the best so far
        triggers an additional checkpoint.
      time_limit: time after which the run is saved and ends, in seconds or as text, such as `"5h50m"`.
      guard: what to do when a value is nan or infinite: "halt", the default, ends the run with a `DivergedError`; "skip" drops
        non-finite updates; "rollback" returns to the last good state, with half the learning rate and other random numbers, at
        most 5 times; "ignore" continues, and other members are not affected.
      record: file for a data set of all environment steps, for `msrl.data.load`. The steps of a chunk stay on the devices
        until the chunk ends, so they must fit there. Recording does not change the run.
      env_params: distributions from which parameters of the environment are drawn at each reset: text, such as
        `"length=uniform:0.25:1,gravity=9.8"`, or a value as in `envs.RandomizeParams`: a mapping from names to numbers or to
        distributions such as `envs.uniform(low, high)`; a function `key -> mapping`; or an `envs.Curriculum`. Callbacks may
        change them (`Tick.set_env_params`), because they are data. Evaluations use the same distributions.
      pbt: trains a population: `"members=8,every=20,learning_rate=log_uniform:1e-5:1e-2"`, or the same as an `msrl.PBT`.
        Members copy better members, and change the hyperparameters that they copy.
      rank_by: the score that selects the best checkpoint, the best member (`Result.best`), and the members that others of a
        population copy: `"return"`, the default, or the name of a metric of the environment; higher must be better.
      trust: whether a resumed run may run the code that its folder names: modules (`my_module:MyEnv`) and files of
        algorithms. Names that you pass again (`env="my_module:MyEnv"`) do not need it.
      callbacks: functions to call with a `Tick` after every chunk; return `True` from one to stop the run. Each process calls
        its own callbacks. Hooks, as described in `msrl_jax.run.loop.loop`, are also accepted.
      progress: "auto", "bar", "lines", "notebook" or False (`none` on the command line); the display is on stderr.
      **overrides: fields of the algorithm's config. A tunable number, such as `learning_rate`, may be a list of values: each
        value is a setting, which has one member per seed.

    Returns:
      The result. Ctrl-C, SIGTERM, SIGHUP and the time limit end the run after the current chunk; the run is saved, and the
      result so far has `interrupted` True. A second signal ends the process immediately.

    Raises:
      ValueError: if a name or field is unknown, or a value is invalid; raised before anything is compiled.
      RunFolderError: a ValueError, if the folder holds no run to resume, another run, or a damaged one.
      TrustError: a ValueError, if the folder of a resumed run names code to run and is not trusted.
      DivergedError: if a metric, a parameter or an observation is nan or infinite; it carries the result so far.
      ProcessError: if another process of the run ended.
      Exception: the first exception that `end` of a hook raised, after all hooks have ended and the run is saved; a note names
        the hook, and the `result` attribute of the exception is the result.
    """
    start = time.perf_counter()
    if is_tracing():
        raise TypeError(
            "train runs on the host, and cannot be traced by jax.jit, vmap or grad. seeds=8 and learning_rate=[1e-4, 3e-4] "
            "train many runs in one program; algorithms.build(config, env).iteration is the pure function of one iteration"
        )
    # Arguments that do not determine what is computed.
    limit = None if time_limit is None else parse_duration("time_limit", time_limit)
    save_every, callbacks, keep = (
        parse_checkpoint_interval(checkpoint_every),
        check_callbacks(callbacks),
        whole("keep_checkpoints", keep_checkpoints),
    )
    watching = {"eval_episodes": eval_episodes, "eval_every": eval_every, "chunk": chunk}
    watching = {
        n: None if value is None else whole(n, value, 0 if n == "eval_episodes" else 1) for n, value in watching.items()
    }
    display = choose_display(progress if processes.is_first() else False)
    say = functools.partial(print, file=sys.stderr) if progress is not False else lambda line: None
    if policy is not None and not is_auto(policy):
        policy = policies.get(policy)  # before building an algorithm, which may take long
    execution: Execution = InProcess() if actors_at is None else EXECUTIONS["actors_at"](actors_at)
    record = None if record is None else as_path("record", record).absolute()  # a callback may change the working directory
    arguments = {
        "total_steps": total_steps,
        "seed": seed,
        "seeds": seeds,
        "env_params": env_params,
        "pbt": pbt,
        "rank_by": rank_by,
    }
    arguments = {name: value for name, value in (arguments | {"guard": guard}).items() if value is not None}
    with contextlib.ExitStack() as stack:
        stack.enter_context(compiling.on_disk())
        requests = stack.enter_context(stop_requests(limit))
        # What the run computes, new or resumed; then where.
        with processes.together("setting up the run"):
            path, saved = stack.enter_context(open_folder(out, resume))
            defaults = {"eval_episodes": 32, "eval_every": None, "chunk": None} if saved is None else saved.description
            watching = {name: defaults[name] if value is None else value for name, value in watching.items()}
            if saved is None or isinstance(algo, Experiment):
                experiment = make_experiment(algo, env, **arguments, **overrides)
            else:
                experiment = saved_experiment(saved, algo, env, arguments, overrides, trust=trust)
            if saved is not None:
                check_resumes(experiment, saved)
            _check_names(experiment.algorithm)
            experiment.check_length(watching["chunk"])
            if saved is not None and saved.iteration == experiment.iterations:
                return _finished_result(saved, experiment)
            execution.check(experiment, policy, record)
            default_policy = saved.description["policy"] if saved else execution.default_policy(experiment)
            if saved and policy is None:
                check_trust(f"the run in {saved.path}", code_of({"policy": default_policy}), trust)
            resolved_policy = resolve_policy(
                default_policy if policy is None else policy, experiment, devices, say, lambda: requests.reason(0.0)
            )
            experiment, recording, max_iterations = with_recording(
                experiment, record, watching["chunk"], policy_text(resolved_policy), saved
            )
            program = stack.enter_context(execution.program(experiment, resolved_policy, devices, path, requests, say))
            saver = None if path is None else Checkpoints(path, save_every, keep, recording)
        stack.callback(close_simulators, experiment.agent.env)
        # What observes it.
        if processes.is_first():
            has_defaults = saved is None and not overrides and isinstance(algo, str | None)
            for note in _notes(experiment, resolved_policy if saved is None and policy is None else None, has_defaults):
                say(note)
        total, unit = experiment.iterations * experiment.steps_per_iteration, experiment.agent.unit.removeprefix("environment ")
        show = stack.enter_context(display(f"{experiment.name} {experiment.env_name}", total, unit, experiment.members))
        evaluating = None
        if watching["eval_episodes"]:
            evaluating = Evaluating(experiment, watching["eval_episodes"], watching["eval_every"])
            stack.callback(close_simulators, evaluating.env)
        guarding = None if experiment.guard == "ignore" else Guard()
        hooks = [
            requests,
            recording,
            guarding,
            LostSteps(),
            evaluating,
            RunFileWriter() if path and processes.is_first() else None,
            *filter(is_hook, callbacks),
            Callbacks([show, *filter(callable, callbacks)]),
            guarding and StopOrRollBack(guarding, saver),
            saver,
        ]
        hooks = execution.hooks([hook for hook in hooks if hook is not None])
        about = watching | {"record": recording and str(recording.writer.path)}
        deployment = _describe_deployment(program, experiment.agent.unit, resolved_policy, saved) | about
        # The run itself, and its end.
        chunk_scheduler = ChunkScheduler(max_iterations, fixed=watching["chunk"] is not None)
        run = Run(experiment, resolved_policy, devices, path, deployment, program, chunk_scheduler, start)
        _begin_run(run, saved)
        errors = _run_loop(run, hooks)
        result = _make_result(run)
        if path is not None and processes.is_first():
            result = store.complete_folder(result, path, next(iter(_save_errors(hooks)), None))
        processes.gathered("")  # no process ends while another one writes
    if run.finding is not None:
        assert guarding is not None
        errors.insert(0, DivergedError(guarding.locate(run), result))
    if errors:
        raise _first_error(errors, result)
    return result


def _notes(experiment: Experiment, usual: DistributionPolicy | None, has_defaults: bool) -> Iterator[str]:
    """Yields what to know about a run; `usual` is the policy of a new run if the user named none."""
    agent = experiment.behavior.agent
    tuned = recipes.of_pair(experiment.name, experiment.env_name) if has_defaults else None
    if tuned is not None and tuned.fields:
        yield f"using defaults; the recipe {tuned.name} has hyperparameters for this environment"
    if isinstance(getattr(experiment.algorithm, "network", "auto"), str):
        yield from unseen_images(experiment.environment)
    if agent.learning_starts:
        yield replay_ratio(agent, experiment.algorithm)
    if usual is not None and is_on_host(experiment.environment):
        yield f"policy {policy_text(usual)}: the host simulates {experiment.env_name}"


def _save_errors(hooks: Sequence[Hook]) -> list[OSError]:
    """Returns why a checkpoint or rows could not be written."""
    return [hook.error for hook in reversed(hooks) if isinstance(hook, Checkpoints | RunFileWriter) and hook.error is not None]


def _first_error(errors: Sequence[Exception], result: Result) -> Exception:
    """Returns the first error, with the result, and a note for each of the others."""
    error, *later_errors = errors
    for other in later_errors:
        error.add_note("\n".join([f"then {type(other).__name__}: {other}", *other.__notes__]))
    vars(error)["result"] = result
    return error


def _run_loop(run: Run, hooks: list[Hook]) -> list[Exception]:
    """Runs the loop and ends the hooks; returns the errors of their ends, and saves what was done before an error elsewhere."""
    try:
        loop(run, hooks)
    except (Exception, SystemExit) as error:  # such as an error of a callback
        run.stop_reason = StopReason("unfinished", " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST])
        lost = [] if processes.is_loss(error) else [*finish(run, hooks), *_save_errors(hooks)]
        for problem in lost:
            text = f"the run ended with an error, and could not be saved: {problem}"
            warnings.warn(text, folder.SaveWarning, stacklevel=3)
        raise
    errors = finish(run, hooks)
    if errors and processes.is_loss(errors[-1]):
        raise errors[-1]
    return errors


def _describe_deployment(program: Program, unit: str, policy: DistributionPolicy, saved: store.Saved | None) -> dict[str, Any]:
    deployment = {
        "format": store.FORMAT,
        "unit": unit,
        "policy": policy_text(policy),
        "versions": folder.versions(),
        "devices": folder.describe_devices(program.devices),
        "registers": program.registers,
        "resumed": [],
        "rollbacks": [],
    }
    if saved is not None:
        previous = {name: saved.description.get(name) for name in ("policy", "devices", "total_steps", "versions")}
        deployment["resumed"] = [*saved.description["resumed"], {"iteration": saved.iteration, "before": previous}]
        deployment["rollbacks"] = list(saved.description["rollbacks"])
    return deployment


def _begin_run(run: Run, saved: store.Saved | None) -> None:
    """Makes the state of a run, or reads it from its folder, during compilation; compiles the programs that a chunk needs."""
    run.program.begin(run.max_at_once)
    if saved is None or saved.checkpoint is None:
        state = run.experiment.start(run.program)
    else:
        state = store.restore_state(saved.checkpoint, run.experiment, run.program)
        # The run may have been killed after a rollback, before its next checkpoint.
        rollbacks, rollbacks_before = len(run.deployment["rollbacks"]), saved.checkpoint.progress["rollbacks"]
        if rollbacks > rollbacks_before:
            state = run.program.place(again(state, rollbacks, rollbacks_before, run.experiment))
    run.run_state = jax.block_until_ready(state)
    run.seconds["setup_seconds"] = time.perf_counter() - run.started - run.program.compile_seconds
    if saved is not None:
        store.take_over(saved, run)
        store.warn_of_schedules(saved, run.experiment, run.step)
    if run.iteration < run.iterations:
        run.compile()


def _make_result(run: Run) -> Result:
    times = run.times
    return Result(
        experiment=run.experiment,
        description=run.description,
        history=stack_rows(run.rows, run.description),
        run_state=processes.to_hosts(run.whole_state()),
        registers=processes.to_hosts(run.registers),
        status=run.stop_reason.status,
        stop_reason=run.stop_reason.reason,
        compile_seconds=times["compile_seconds"],
        wall_seconds=times["wall_seconds"],
        timings=run.seconds,
        evaluation=run.evaluation,
        folder=run.path,
    )


def _check_names(config: Any) -> None:
    """Raises TypeError if a config field cannot be passed to `train` because `train` has an argument of that name."""
    if names := inspect.signature(train).parameters.keys() & {f.name for f in dataclasses.fields(config)}:
        fact = f"the config {type(config).__name__} has the field {min(names)!r}, but that is an argument of msrl.train"
        raise TypeError(f"{fact}; give it another name")


def _finished_result(saved: store.Saved, experiment: Experiment) -> Result:
    """Returns the result of a run that has done all its steps, but may have been killed before its summary was written."""
    result = Result.load(saved.path, **experiment.objects)
    if result.status == "unfinished":
        result = dataclasses.replace(result, status="finished")
        if processes.is_first():
            store.finish(result, saved.path)
    return result
