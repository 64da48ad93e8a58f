"""The command line: `msrl-jax train | sweep | compete | evaluate | record | replay | explain | bench | list | check-env`.

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
from typing import Any, NoReturn

from msrl_jax import _background, _compile_cache, _flags, _launch, _names, _streams, _suites
from msrl_jax._commands import Bench, CheckEnv, Compete, Evaluate, Explain, List, Record, Replay, Sweep, Train
from msrl_jax._flags import UsageError
from msrl_jax._spelling import suggestion

PROG = "msrl-jax"
DIVERGED = DOES_NOT_CONFORM = 1
BAD_INPUT, NOT_SAVED, OUT_OF_TIME, INTERRUPTED = 2, 3, 75, 130


def _overview() -> str:
    lines = [f"usage: {PROG} COMMAND [OPTIONS], or {PROG} --version", ""]
    lines += [f"  {name:<10}{(command.__doc__ or '').splitlines()[0]}" for name, (command, _) in COMMANDS.items()]
    about = [
        f"{PROG} COMMAND --help lists the options of a command.",
        f"Compiled programs are kept in the user's cache folder; {_compile_cache.VARIABLE} is another folder, or off.",
    ]
    return "\n".join([*lines, "", *about])


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
    return Path("runs") / re.sub(r"[^\w.-]+", "_", "-".join(filter(None, parts)))


def _train(args: Train, config: dict[str, Any]) -> int:
    from msrl_jax import training
    from msrl_jax.training import processes

    first = processes.is_first()
    out = args.out or _default_folder(args, processes.gathered(time.strftime("%Y%m%d-%H%M%S"))[0])
    names = ("algo", "env", "policy", "total_steps", "seed", "seeds", "eval_episodes", "guard", "env_params", "pbt")
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


def _sweep(args: Sweep, config: dict[str, Any]) -> int:
    from msrl_jax import training

    if args.resume and args.out is None:
        raise UsageError("--resume needs --out, the folder of the sweep")
    parts = (args.algo, args.env, args.method, str(args.seed), time.strftime("%Y%m%d-%H%M%S"))
    out = args.out or Path("sweeps") / re.sub(r"[^\w.-]+", "_", "-".join(parts))
    ours = ("config", "out", "plot", "progress", "json", "cpu_devices")
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in ours}
    result = training.sweep(**given, out=out, progress=False if args.progress == "none" else args.progress, **config)
    print(result)
    if any(trial.mean == trial.mean for trial in result.trials):  # not all are nan
        print(f"the best setting again: {result.command()}")
        if args.plot is not None:
            result.plot(args.plot)
    if args.json:
        _print_json(result.summary())
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
    from msrl_jax.data.spaces import agents_of
    from msrl_jax.training import Result
    from msrl_jax.training.hyperparameters import in_words

    result = Result.load(args.run, checkpoint=args.checkpoint)
    played = result.evaluate(args.episodes, args.seed, member=args.member, max_steps=args.max_steps, env_params=args.env_params)
    member = result.member(args.member) if result.has_members else None
    if member is not None:
        chosen = ", the best one" * (args.member is None)
        print(f"member {member} ({in_words(result.settings[member])}{chosen})")
    print(played)
    if args.json:
        about = {key: result.description[key] for key in ("algorithm", "env")} | {"member": member}
        about |= agents_of(result.behavior.env)
        _print_json(about | played.means | dataclasses.asdict(played))
    return 0


def _record(args: Record, config: dict[str, Any]) -> int:
    from msrl_jax import data
    from msrl_jax.training import Result

    dataset = data.record(
        Result.load(args.run), args.steps, args.out, epsilon=args.epsilon, seed=args.seed, member=args.member,
        num_envs=args.num_envs, env_params=args.env_params,
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
        from msrl_jax.fragments.plan.topologies import cpus_of

        _use_cpu_devices(max(1, *map(cpus_of, args.devices)))
    from msrl_jax.training.scaling import format_table, plans
    from msrl_jax.training.setup import resolve, resolve_policy

    if not args.devices:
        setup = resolve(args.algo, args.env, seeds=args.seeds, overrides=config, env_params=args.env_params)
        plan = setup.compile(resolve_policy(args.policy)).explain()
        _show(args, plan.to_dict(), plan)
        return 0
    rows = plans(
        args.algo, args.env, args.policy, args.devices, args.envs_per_device, seeds=args.seeds,
        env_params=args.env_params, **config,
    )  # fmt: skip
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
        seconds=args.seconds, against=args.against, env_params=args.env_params, on_stage=_note, on_measurement=_note, **config,
    )  # fmt: skip
    print(format_table(measurements))
    if args.json:
        _print_json(measurements)
    return 0


def _note(what: Any) -> None:
    print(f"{what}", file=sys.stderr, flush=True)


def _compete(args: Compete, config: dict[str, Any]) -> int:
    from msrl_jax.training import compete

    own = ("leaderboard", "json", "cpu_devices", "progress", "config")
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in own}
    board = compete(args.leaderboard, **given, progress=False if args.progress == "none" else args.progress, **config)
    _show(args, board.entries, board)
    return 0


def _list(args: List, config: dict[str, Any]) -> int:
    if "msrl_jax.training" in sys.modules:  # what this process has registered is listed too
        from msrl_jax import algorithms, envs, policies

        names = {"algorithms": algorithms.names(), "environments": sorted(envs.names()), "policies": policies.names()}
    else:
        environments = sorted([*_names.ENVIRONMENTS, *_suites.names()])
        names = {"algorithms": list(_names.ALGORITHMS), "environments": environments, "policies": list(_names.POLICIES)}
    if args.envs:
        names = {"environments": names["environments"]}
    if args.json:
        known = _suites.SUITES.items()
        print(json.dumps(names | {"suites": {x: {"version": s.version(), "install": s.install} for x, s in known}}))
        return 0
    suites = {"suites": [f"{prefix:12}{_state(suite)}" for prefix, suite in _suites.SUITES.items()]}
    for kind, lines in (names | suites).items():
        print(f"{kind}\n" + "".join(f"  {line}\n" for line in lines))
    return 0


def _state(suite: _suites.Suite) -> str:
    """Whether a suite of environments is installed, or how to install it."""
    if (version := suite.version()) is None:
        return f"not installed: {suite.install} brings the environments of {suite.title}"
    if not suite.files:
        return f"{suite.package} {version}; {suite.package}.list_all_envs() lists its environments"
    return f"{suite.package} {version}, {len(suite.own_names)} environments"


def _check_env(args: CheckEnv, config: dict[str, Any]) -> int:
    from msrl_jax.envs import check

    report = check(args.env, steps=args.steps, num_envs=args.num_envs, seed=args.seed)
    _show(args, dataclasses.asdict(report) | {"ok": report.ok}, report)
    return 0 if report.ok else DOES_NOT_CONFORM


COMMANDS: dict[str, tuple[type, Callable[[Any, dict[str, Any]], int]]] = {
    "train": (Train, _train),
    "sweep": (Sweep, _sweep),
    "compete": (Compete, _compete),
    "evaluate": (Evaluate, _evaluate),
    "record": (Record, _record),
    "replay": (Replay, _replay),
    "explain": (Explain, _explain),
    "bench": (Bench, _bench),
    "list": (List, _list),
    "check-env": (CheckEnv, _check_env),
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
      The exit code. 0 is success; 1, a run diverged, or an environment does not conform; 2, bad input, with one line on stderr,
      or a command that only prints cannot write its output; 3, the run could not be saved in its folder; 75, the time limit
      ended the run; 76, another process of the run ended; 128 and the number of a signal (130 for Ctrl-C, 143 for SIGTERM, 129
      for SIGHUP), the signal ended it.
    """
    is_whole_process = argv is None
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
        if lost and code == 0:
            complaint = _complain(f"cannot write to standard output: {out.error}")
            code = 0 if argv[0] in ("train", "record") else complaint  # which have written their files
    if (code and _is_one_of_several()) or (is_whole_process and _background.is_busy()):
        _end(code)
    return code


def _is_one_of_several() -> bool:
    """Whether this process has joined others."""
    return "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()


def _end(code: int) -> NoReturn:
    """Ends the process at once: at the usual end, JAX would wait for other processes, and Python for what is being compiled."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _short_warnings() -> Iterator[None]:
    """Shows the warnings of this package in one line on stderr, and the first of JAX's about its programs on disk."""
    show, said = warnings.showwarning, False

    def ours(message: Any, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        nonlocal said
        is_of_cache = "persistent compilation cache" in str(message)
        if category.__module__.startswith("msrl_jax.") or (is_of_cache and not said):
            print(f"{PROG}: warning: {' '.join(str(message).split())}", file=sys.stderr, flush=True)
        elif not is_of_cache:
            show(message, category, *args, **kwargs)
        said = said or is_of_cache

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
            known = [*COMMANDS, "--help", "--version"]
            raise UsageError(f"unknown command {name!r}{suggestion(name, known)}; {PROG} --help lists them")
        args, config = _flags.parse(f"{PROG} {name}", COMMANDS[name][0], _with_saved_algo(name, rest))
        if name != "train" or args.processes is None or _launch.INDEX in os.environ:
            _use_cpu_devices(getattr(args, "cpu_devices", None))
        if isinstance(args, Train) and (code := _launched(args, argv)) is not None:
            return code
        with contextlib.nullcontext() if name == "list" else _compile_cache.on():
            return COMMANDS[name][1](args, config)
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except RuntimeError as error:
        if type(error).__name__ == "ProcessError":
            _complain(error)
            return _launch.LOST
        if not _is_ours(error):
            raise
        return _complain(error)
    except FloatingPointError as error:
        _complain(error)
        return DIVERGED
    except OSError as error:
        return _complain(error)
    except (ValueError, TypeError, ImportError) as error:
        if not _is_ours(error):
            raise
        return _complain(error)
