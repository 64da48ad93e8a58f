"""The command line: `msrl-jax train | evaluate | record | replay | explain | bench | list`.

Names may have parameters after a colon, as in `--policy SingleLearnerCoarse:learners=2,staleness=1` and
`--env CartPole-v1:max_steps_in_episode=200`. Every field of the chosen algorithm's config is a flag. Slow imports are inside
the commands, so that help is quick and devices can be configured before JAX starts.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro

from msrl_jax import _flags, _launch, _streams
from msrl_jax._flags import UsageError
from msrl_jax._spelling import suggestion

PROG = "msrl-jax"
DIVERGED, BAD_INPUT, NOT_SAVED, OUT_OF_TIME, INTERRUPTED = 1, 2, 3, 75, 130


PerAlgorithm = Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: each algorithm's own)")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    """The devices of a command.

    Attributes:
      cpu_devices: compute on this many virtual CPU devices.
    """

    cpu_devices: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Where):
    """Train an agent; with no arguments, PPO on CartPole-v1.

    Attributes:
      algo: name of the algorithm (see `msrl-jax list`); the fields of its config are flags too.
      env: environment, NAME or NAME:param=value,...
      policy: distribution policy, NAME or NAME:param=value,... such as SingleLearnerCoarse:learners=2,staleness=1
      total_steps: environment steps per seed.
      seed: the seed of all randomness.
      seeds: number of runs to train at once, with the seeds seed, seed + 1, ...
      out: folder of the run; runs/<algo>-<env>-<policy>-<seed>-<time> if not given.
      resume: go on with the run in the folder, or start it if there is none. Its settings need not be given again; policy and
        devices may change (give cpu_devices again), and more total_steps extend it.
      chunk: iterations between two updates of the progress display; they grow to about a second if not given.
      eval_episodes: episodes per greedy evaluation; 0 never evaluates.
      eval_every: environment steps between evaluations; if not given, there is one evaluation at the end.
      checkpoint_every: steps between checkpoints, or their time such as 10m; about a minute if not given.
      keep_checkpoints: number of checkpoints to keep, besides the best one.
      time_limit: time after which the run is saved and ends, such as 5h50m; the exit code is then 75.
      guard: what to do about nan and infinities: halt, skip (drop the update) or rollback (to the last good state, with half
        the learning rate); halt if not given.
      record: file for a data set of all environment steps, such as experience.npz
      tensorboard: also log to TensorBoard, in the run's folder.
      wandb: also log to Weights & Biases, in the project with this name.
      progress: kind of progress display on stderr.
      processes: start this many processes on this machine; each has one CPU device, or --cpu-devices.
      distributed: this is one of the processes of a cluster, which JAX finds by itself: SLURM, Open MPI, GKE, a TPU pod.
      json: print the summary as one line of JSON, the last on stdout.
    """

    algo: str = "ppo"
    env: str = "CartPole-v1"
    policy: str = "GPUOnly"
    total_steps: int = 500_000
    seed: int = 0
    seeds: int = 1
    out: Path | None = None
    resume: bool = False
    chunk: int | None = None
    eval_episodes: int = 32
    eval_every: int | None = None
    checkpoint_every: str | None = None
    keep_checkpoints: int = 2
    time_limit: str | None = None
    guard: Literal["halt", "skip", "rollback"] = "halt"
    record: Path | None = None
    tensorboard: bool = False
    wandb: str | None = None
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    processes: int | None = None
    distributed: bool = False
    json: bool = False
    given: Annotated[frozenset[str], tyro.conf.Suppress] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Where):
    """Play greedy episodes with a trained agent.

    Attributes:
      run: folder of a run.
      episodes: number of episodes.
      seed: the seed of the environments' randomness.
      member: number of the member that plays, in a run of several seeds; the best one if not given.
      max_steps: maximum length of an episode, in steps.
      json: print the results as one line of JSON, the last on stdout.
    """

    run: tyro.conf.Positional[Path]
    episodes: int = 128
    seed: int = 0
    member: int | None = None
    max_steps: int = 10_000
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Where):
    """Let a trained agent act, and write its steps to a data set.

    Attributes:
      run: folder of a run.
      steps: number of rows of the data set.
      out: file of the data set, such as medium.npz
      epsilon: probability of a random action; other actions are the most probable ones. If not given, actions are sampled
        from the policy.
      seed: the seed of all randomness.
      member: number of the member that acts, in a run of several seeds; the best one if not given.
      num_envs: number of parallel environments.
      json: print a summary of the data set as one line of JSON, the last on stdout.
    """

    run: tyro.conf.Positional[Path]
    steps: int
    out: Path
    epsilon: float | None = None
    seed: int = 0
    member: int | None = None
    num_envs: int = 16
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay(Where):
    """Compute the first step of a run with a nan or infinity again, outside of jax.jit, and say where it comes from.

    Attributes:
      file: the file non_finite.npz in the folder of the run.
      json: print the report as one line of JSON, the last on stdout.
    """

    file: tyro.conf.Positional[Path]
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain(Where):
    """Print the plan of an algorithm under a distribution policy: programs, placements and transfers.

    Attributes:
      algo: name of the algorithm; the fields of its config are flags too.
      env: environment, NAME or NAME:param=value,...
      policy: distribution policy, NAME or NAME:param=value,...
      devices: plan for these devices, whether or not they are there: tpu:v5e:8x8, gpu:h100:8 or cpu:8. Several are compared
        in a table.
      envs_per_device: environments for each of these devices, instead of num_envs.
      seeds: number of runs to train at once.
      json: print the plan as one line of JSON instead.
    """

    algo: str = "ppo"
    env: str = "CartPole-v1"
    policy: str = "GPUOnly"
    devices: tuple[str, ...] = ()
    envs_per_device: int | None = None
    seeds: int = 1
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Where):
    """Measure environment steps and learner updates per second, over a grid of all options with several values.

    Attributes:
      algo: names of algorithms; the fields that all their configs have are flags too.
      env: environments, each NAME or NAME:param=value,...
      policy: distribution policies, each NAME or NAME:param=value,...
      num_envs: numbers of environments.
      unroll_length: lengths of an unroll.
      repeats: timed runs per setting; the median counts.
      seconds: approximate length of a timed run.
      against: compare with the same iteration in a plain jax.jit(jax.lax.scan(...)); the timed runs alternate.
      json: print the measurements as one line of JSON, the last on stdout.
    """

    algo: tuple[str, ...] = ("ppo",)
    env: tuple[str, ...] = ("CartPole-v1",)
    policy: tuple[str, ...] = ("GPUOnly",)
    num_envs: PerAlgorithm = ()
    unroll_length: PerAlgorithm = ()
    repeats: int = 3
    seconds: float = 1.0
    against: Literal["jit"] | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """List the algorithms, environments and distribution policies.

    Attributes:
      json: print them as one line of JSON instead.
    """

    json: bool = False


def _overview() -> str:
    lines = [f"usage: {PROG} COMMAND [OPTIONS], or {PROG} --version", ""]
    lines += [f"  {name:<10}{(command.__doc__ or '').splitlines()[0]}" for name, (command, _) in COMMANDS.items()]
    return "\n".join([*lines, "", f"{PROG} COMMAND --help lists the options of a command."])


MOST_CPU_DEVICES = 1024
"""Virtual CPU devices that start within seconds; each has threads of its own."""


def _use_cpu_devices(count: int | None) -> None:
    if count is None:
        return
    if not 1 <= count <= MOST_CPU_DEVICES:
        raise UsageError(f"--cpu-devices {count}: use 1 to {MOST_CPU_DEVICES}")
    # Many devices on few cores may reach a collective late; this is not a deadlock.
    limits = {"warn_stuck": 300, "terminate": 1200}
    patience = [f"--xla_cpu_collective_call_{name}_timeout_seconds={seconds}" for name, seconds in limits.items()]
    os.environ["XLA_FLAGS"] = " ".join([*patience, os.environ.get("XLA_FLAGS", "")])
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _print_json(value: Any) -> None:
    from msrl_jax.training.folder import to_json

    print(json.dumps(to_json(value)))


def _default_folder(args: Train, now: str) -> Path:
    parts = (args.algo, args.env, args.policy, str(args.seed), now)
    return Path("runs") / re.sub(r"[^\w.-]+", "_", "-".join(parts))


def _train(args: Train, config: dict[str, Any]) -> int:
    from msrl_jax import training
    from msrl_jax.training import processes

    first = processes.is_first()
    out = args.out or _default_folder(args, processes.gathered(time.strftime("%Y%m%d-%H%M%S"))[0])
    names = ("algo", "env", "policy", "total_steps", "seed", "seeds", "eval_episodes", "guard")
    settings = {name: getattr(args, name) for name in names}
    if args.resume:  # the folder knows what is not given
        settings = {name: value for name, value in settings.items() if name in args.given}
    with contextlib.ExitStack() as stack:
        loggers: list[training.Callback] = []
        if args.tensorboard and first:
            loggers.append(stack.enter_context(contextlib.closing(training.TensorBoard(out))))
        if args.wandb and first:
            about = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in ("given", "config")}
            # The same folder is the same run there, so that a run that goes on appends to it.
            number = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:16]
            wandb = training.WandB(
                project=args.wandb, name=out.name, id=number, resume="allow", config=about | config
            )  # fmt: skip
            loggers.append(stack.enter_context(contextlib.closing(wandb)))
        result = training.train(
            **settings, out=out, resume=args.resume, chunk=args.chunk, eval_every=args.eval_every,
            checkpoint_every=args.checkpoint_every, keep_checkpoints=args.keep_checkpoints,
            time_limit=args.time_limit, record=args.record, callbacks=loggers,
            progress=False if args.progress == "none" else args.progress, **config,
        )  # fmt: skip
    if first:
        print(result)
    if first and args.json:
        _print_json(result.summary() | {"folder": result.folder})
    return _exit_code(result, out)


def _exit_code(result: Any, out: Path) -> int:
    if result.folder != out.absolute():
        return NOT_SAVED
    if not result.interrupted:
        return 0
    return 128 + getattr(signal, result.stop_reason) if result.stop_reason.startswith("SIG") else OUT_OF_TIME


def _launched(args: Train, argv: Sequence[str]) -> int | None:
    """Starts the processes of a run, or makes this one a part of it; the exit code if it has been run."""
    if args.resume and args.out is None:
        raise UsageError("--resume needs --out, the folder of the run")
    child = os.environ.get(_launch.INDEX)
    if args.processes is not None and args.distributed:
        raise UsageError("--processes starts processes on this machine, and --distributed joins those of a cluster; give one")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"--processes {args.processes}: use at least 1")
    if args.processes is not None and child is None:
        return _launch.launch(argv, args.processes)
    if child is not None:
        _launch.end_with_parent()
        _use_cpu_devices(args.cpu_devices or 1)
    if child is not None or args.distributed:
        from msrl_jax.training import processes

        if child is None:
            processes.start()
        else:
            processes.start(os.environ[_launch.ADDRESS], int(os.environ[_launch.COUNT]), int(child))
    return None


def _with_saved_algo(command: str, argv: list[str]) -> list[str]:
    """Adds the algorithm of a run that goes on, because it decides which other flags there are."""
    if command != "train" or "--resume" not in argv or _flags.values_of(argv, "--algo"):
        return argv
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        config = Path(_flags.values_of(argv, "--out")[0]) / "config.json"
        return [*argv, "--algo", json.loads(config.read_text())["algorithm"]]
    return argv


def _evaluate(args: Evaluate, config: dict[str, Any]) -> int:
    from msrl_jax.training import Result

    result = Result.load(args.run)
    played = result.evaluate(args.episodes, args.seed, member=args.member, max_steps=args.max_steps)
    print(played)
    if args.json:
        about = {key: result.description[key] for key in ("algorithm", "env")}
        about |= {"member": (result.best if args.member is None else args.member) if result.seeds > 1 else None}
        outcome = {"eval_return": played.mean_return, "eval_length": played.mean_length}
        _print_json(about | outcome | dataclasses.asdict(played))
    return 0


def _record(args: Record, config: dict[str, Any]) -> int:
    from msrl_jax import data
    from msrl_jax.training import Result

    dataset = data.record(
        Result.load(args.run), args.steps, args.out, epsilon=args.epsilon, seed=args.seed, member=args.member,
        num_envs=args.num_envs,
    )  # fmt: skip
    print(dataset)
    if args.json:
        _print_json(dataset.describe() | {"file": args.out})
    return 0


def _replay(args: Replay, config: dict[str, Any]) -> int:
    from msrl_jax.training import replay_step

    failure = replay_step(args.file)
    if failure is None:
        print("all results of this step are finite here")
        return DIVERGED
    print(failure)
    if args.json:
        origin = failure.origin
        fields = {f.name: getattr(origin, f.name) for f in dataclasses.fields(origin) if f.name != "operands"}
        _print_json({"iteration": failure.iteration, "member": failure.member, **fields})
    return 0


def _explain(args: Explain, config: dict[str, Any]) -> int:
    if args.devices and args.cpu_devices is not None:
        raise UsageError(f"--devices and --cpu-devices both choose devices; --devices cpu:{args.cpu_devices} is enough")
    if args.envs_per_device is not None and not args.devices:
        raise UsageError("--envs-per-device needs --devices")
    if args.devices:
        from msrl_jax.fragments.topologies import cpus_of

        _use_cpu_devices(max(1, *map(cpus_of, args.devices)))
    from msrl_jax.training.scaling import format_table, plans
    from msrl_jax.training.setup import resolve, resolve_policy

    if not args.devices:
        setup = resolve(args.algo, args.env, seeds=args.seeds, overrides=config)
        plan = setup.compile(resolve_policy(args.policy)).explain()
        _show(args, plan.to_dict(), plan)
        return 0
    rows = plans(args.algo, args.env, args.policy, args.devices, args.envs_per_device, seeds=args.seeds, **config)
    if len(rows) == 1:
        _show(args, rows[0].plan.to_dict(), rows[0].plan)
    else:
        _show(args, [row.to_dict() for row in rows], format_table(rows))
    return 0


def _show(args: Any, data: Any, text: object) -> None:
    if args.json:
        _print_json(data)
    else:
        print(text)


def _bench(args: Bench, config: dict[str, Any]) -> int:
    from msrl_jax.training.benchmark import bench, format_table

    measurements = bench(
        args.algo, args.env, args.policy, args.num_envs, args.unroll_length, repeats=args.repeats,
        seconds=args.seconds, against=args.against, on_stage=_note, on_measurement=_note, **config,
    )  # fmt: skip
    print(format_table(measurements))
    if args.json:
        _print_json(measurements)
    return 0


def _note(what: Any) -> None:
    print(f"{what}", file=sys.stderr, flush=True)


def _list(args: List, config: dict[str, Any]) -> int:
    from msrl_jax import algorithms, envs, policies

    names = {"algorithms": algorithms.names(), "environments": sorted(envs.names()), "policies": policies.names()}
    if args.json:
        _print_json(names)
    else:
        print("\n\n".join(f"{kind}\n" + "\n".join(f"  {name}" for name in found) for kind, found in names.items()))
    return 0


COMMANDS: dict[str, tuple[type, Callable[[Any, dict[str, Any]], int]]] = {
    "train": (Train, _train),
    "evaluate": (Evaluate, _evaluate),
    "record": (Record, _record),
    "replay": (Replay, _replay),
    "explain": (Explain, _explain),
    "bench": (Bench, _bench),
    "list": (List, _list),
}


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised the error itself. Other errors are bugs, and need their traceback."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__", "").startswith("msrl_jax.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; it continues if an output stream closes or its disk is full.

    Args:
      argv: the arguments without the program's name; those of the process if None.

    Returns:
      The exit code. 0 is success; 1, a run diverged; 2, bad input, with one line on stderr, or a command that only prints
      cannot write its output; 3, the run could not be saved in its folder; 75, the time limit ended the run; 76, another
      process of the run ended; 128 and the number of a signal (130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP), the signal
      ended it.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    with _streams.lasting() as out, _short_warnings():
        try:
            code = _run(argv)
        except Exception:
            if not _is_one_of_several():
                raise
            traceback.print_exc()
            _end(1)
        out.flush()
        lost = out.error is not None and not isinstance(out.error, BrokenPipeError)  # `| head -1` has read enough
        if lost and code == 0 and argv[0] not in ("train", "record"):
            code = _complain(f"cannot write to standard output: {out.error}")
    if code and _is_one_of_several():
        _end(code)
    return code


def _is_one_of_several() -> bool:
    """Whether this process has joined others."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _end(code: int) -> NoReturn:
    """Ends the process at once, so that the others notice; JAX would wait for them at the usual end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Shows the warnings of this package in one line on stderr."""
    show = warnings.showwarning

    def ours(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if category.__module__.startswith("msrl_jax."):
            print(f"{PROG}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
        else:
            show(message, category, *args, **kwargs)

    warnings.showwarning = ours
    try:
        yield
    finally:
        warnings.showwarning = show


def _complain(message: object) -> int:
    print(f"{PROG}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return BAD_INPUT


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else BAD_INPUT
    if argv[0] == "--version":
        print(f"{PROG} {importlib.metadata.version(PROG)}")
        return 0
    name, *rest = argv
    try:
        if name not in COMMANDS:
            raise UsageError(f"unknown command {name!r}{suggestion(name, COMMANDS)}; {PROG} --help lists them")
        args, config = _flags.parse(f"{PROG} {name}", COMMANDS[name][0], _with_saved_algo(name, rest))
        if name != "train" or args.processes is None or _launch.INDEX in os.environ:
            _use_cpu_devices(getattr(args, "cpu_devices", None))
        if isinstance(args, Train) and (code := _launched(args, argv)) is not None:
            return code
        return COMMANDS[name][1](args, config)
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except RuntimeError as error:
        if type(error).__name__ != "ProcessError":
            raise
        _complain(error)
        return _launch.LOST
    except FloatingPointError as error:
        _complain(error)
        return DIVERGED
    except OSError as error:
        return _complain(error)
    except (ValueError, TypeError, ImportError) as error:
        if not _is_ours(error):
            raise
        return _complain(error)
