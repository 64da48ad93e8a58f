"""The command line: `msrl-jax train | evaluate | record | explain | bench | list`.

Names may carry parameters behind a colon, as in `--policy SingleLearnerCoarse:learners=2,staleness=1` and
`--env CartPole-v1:max_steps_in_episode=200`. Every field of the chosen algorithm's config is a flag. Heavy imports
happen inside the commands, so that help is quick and devices can be configured before JAX starts.
"""

import contextlib
import dataclasses
import json
import os
import re
import sys
import time
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from msrl_jax._spelling import suggestion

PROG = "msrl-jax"
DIVERGED, BAD_INPUT, INTERRUPTED = 1, 2, 130


class UsageError(ValueError):
    """Bad input that is found while the command line is read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    """Where a command computes.

    Attributes:
      cpu_devices: compute on this many virtual CPU devices.
    """

    cpu_devices: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(Where):
    """Train an agent; with no arguments, PPO on CartPole-v1.

    Attributes:
      algo: name of the algorithm (`msrl-jax list`); its config's fields are flags too.
      env: environment, NAME or NAME:param=value,...
      policy: distribution policy, NAME or NAME:param=value,... such as SingleLearnerCoarse:learners=2,staleness=1
      total_steps: environment steps, per seed.
      seed: where all randomness starts.
      seeds: how many runs to train at once, from seed, seed + 1, ...
      out: folder of the run; runs/<algo>-<env>-<policy>-<seed>-<time> if not given.
      chunk: iterations between two ticks of the host; chosen if not given.
      eval_episodes: episodes per greedy evaluation; 0 never evaluates.
      eval_every: environment steps between evaluations; one at the end only if not given.
      record: file for every step of every environment, a data set to learn from, such as experience.npz
      tensorboard: log to TensorBoard too, in the run's folder.
      wandb: log to Weights & Biases too, in the project of this name.
      progress: display of the progress, on stderr.
      json: print the summary as one line of JSON, the last on stdout.
    """

    algo: str = "ppo"
    env: str = "CartPole-v1"
    policy: str = "GPUOnly"
    total_steps: int = 500_000
    seed: int = 0
    seeds: int = 1
    out: Path | None = None
    chunk: int | None = None
    eval_episodes: int = 32
    eval_every: int | None = None
    record: Path | None = None
    tensorboard: bool = False
    wandb: str | None = None
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Where):
    """Play greedy episodes with a trained agent.

    Attributes:
      run: folder of a run.
      episodes: how many episodes.
      seed: where the environments' randomness starts.
      member: which seed of a run of several plays; the best one if not given.
      max_steps: cap on the steps of an episode.
      json: print the outcome as one line of JSON, the last on stdout.
    """

    run: tyro.conf.Positional[Path]
    episodes: int = 128
    seed: int = 0
    member: int | None = None
    max_steps: int = 10_000
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Where):
    """Let a trained agent act, and write a data set of what happens.

    Attributes:
      run: folder of a run.
      steps: rows of the data set.
      out: file of the data set, such as medium.npz
      epsilon: probability of a random action, the most probable one is taken otherwise; actions are sampled from the policy if
        not given.
      seed: where all randomness starts.
      member: which seed of a run of several acts; the best one if not given.
      num_envs: how many environments run side by side.
      json: print what the data set is as one line of JSON, the last on stdout.
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
class Explain(Where):
    """Print what a distribution policy makes of an algorithm: programs, placements, what crosses between them.

    Attributes:
      algo: name of the algorithm; its config's fields are flags too.
      env: environment, NAME or NAME:param=value,...
      policy: distribution policy, NAME or NAME:param=value,...
      seeds: how many runs to train at once.
      json: print the plan as one line of JSON instead.
    """

    algo: str = "ppo"
    env: str = "CartPole-v1"
    policy: str = "GPUOnly"
    seeds: int = 1
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Where):
    """Measure environment steps and learner updates per second; every option that takes several values spans a grid.

    Attributes:
      algo: names of algorithms; the fields that their configs share are flags too.
      env: environments, each NAME or NAME:param=value,...
      policy: distribution policies, each NAME or NAME:param=value,...
      num_envs: numbers of environments.
      unroll_length: lengths of an unroll.
      repeats: timed runs per setting; the median counts.
      seconds: how long a timed run is, about.
      against: compare with the same iteration in a plain jax.jit(jax.lax.scan(...)), runs interleaved.
      json: print the measurements as one line of JSON, the last on stdout.
    """

    algo: tuple[str, ...] = ("ppo",)
    env: tuple[str, ...] = ("CartPole-v1",)
    policy: tuple[str, ...] = ("GPUOnly",)
    num_envs: tuple[int, ...] = (64,)
    unroll_length: tuple[int, ...] = (128,)
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
    lines = [f"usage: {PROG} COMMAND [OPTIONS]", ""]
    lines += [f"  {name:<10}{(command.__doc__ or '').splitlines()[0]}" for name, (command, _) in COMMANDS.items()]
    return "\n".join([*lines, "", f"{PROG} COMMAND --help lists the options of a command."])


def _values(argv: Sequence[str], flag: str) -> list[str]:
    """The values that follow a flag, before the command line is parsed: they decide which other flags there are."""
    values: list[str] = []
    for i, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            values = [word.partition("=")[2]]
        elif word == flag:
            rest = argv[i + 1 :]
            end = next((j for j, w in enumerate(rest) if w.startswith("-")), len(rest))
            values = list(rest[:end])
    return values


def _with_config_flags(command: type, algos: Sequence[str]) -> type:
    """`command` with a flag for every field that the configs of all `algos` have and that it does not set itself."""
    from msrl_jax import algorithms
    from msrl_jax.algorithms.configs.base import field_docs

    configs = [algorithms.get(name).config for name in algos]
    taken = {f.name for f in dataclasses.fields(command)} | {"total_steps"}
    shared = set.intersection(*({f.name for f in dataclasses.fields(c)} for c in configs))
    hints, texts = typing.get_type_hints(configs[0]), field_docs(configs[0])
    fields = [
        (f.name, Annotated[hints[f.name], tyro.conf.arg(help=texts.get(f.name))], dataclasses.field(default=f.default))
        for f in dataclasses.fields(configs[0])
        if f.name in shared - taken
    ]
    # Not the config itself: it would be checked before the run fills in what it knows, such as total_steps.
    summary = (configs[0].__doc__ or "").partition("Attributes:")[0]
    flags = dataclasses.make_dataclass(configs[0].__name__, fields, namespace={"__doc__": summary}, frozen=True)
    unprefixed = Annotated[flags, tyro.conf.arg(name="")]
    return dataclasses.make_dataclass(
        command.__name__, [("config", unprefixed, dataclasses.field(default=flags()))],
        bases=(command,), frozen=True, kw_only=True,
    )  # fmt: skip


def _parse(name: str, argv: list[str]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a command, and the config fields among them that were given."""
    base = COMMANDS[name][0]
    command: Any = base
    if any(f.name == "algo" for f in dataclasses.fields(base)):
        command = _with_config_flags(base, _values(argv, "--algo") or ["ppo"])
    description = (base.__doc__ or "").splitlines()[0]
    args, unknown = tyro.cli(
        command, args=argv, prog=f"{PROG} {name}", description=description, return_unknown_args=True
    )
    if unknown:
        flags = [f"--{f.name}" for f in dataclasses.fields(args) if f.name != "config"]
        flags += [f"--{f.name}" for f in dataclasses.fields(getattr(args, "config", List()))]
        flags = [flag.replace("_", "-") for flag in flags]
        what = "unknown option" if unknown[0].startswith("-") else "unexpected argument"
        raise UsageError(f"{what} {unknown[0]!r}{suggestion(unknown[0], flags)}; {PROG} {name} --help lists the options")
    given = getattr(args, "config", None)
    fields = dataclasses.fields(given) if given is not None else ()
    return args, {f.name: getattr(given, f.name) for f in fields if getattr(given, f.name) != f.default}


def _use_cpu_devices(count: int | None) -> None:
    if count is None:
        return
    if count < 1:
        raise UsageError(f"--cpu-devices {count}: use at least 1")
    # Many devices on few cores may reach a collective late; that is no deadlock.
    limits = {"warn_stuck": 300, "terminate": 1200}
    patience = [f"--xla_cpu_collective_call_{name}_timeout_seconds={seconds}" for name, seconds in limits.items()]
    os.environ["XLA_FLAGS"] = " ".join([*patience, os.environ.get("XLA_FLAGS", "")])
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _print_json(value: Any) -> None:
    from msrl_jax.training.folder import to_json

    print(json.dumps(to_json(value)))


def _default_folder(args: Train) -> Path:
    parts = (args.algo, args.env, args.policy, str(args.seed), time.strftime("%Y%m%d-%H%M%S"))
    return Path("runs") / re.sub(r"[^\w.-]+", "_", "-".join(parts))


def _train(args: Train, config: dict[str, Any]) -> int:
    from msrl_jax import training

    out = args.out or _default_folder(args)
    with contextlib.ExitStack() as stack:
        loggers: list[training.Callback] = []
        if args.tensorboard:
            loggers.append(stack.enter_context(contextlib.closing(training.TensorBoard(out))))
        if args.wandb:
            settings = dataclasses.asdict(args) | config
            wandb = training.WandB(project=args.wandb, name=out.name, config=settings)
            loggers.append(stack.enter_context(contextlib.closing(wandb)))
        result = training.train(
            args.algo, args.env, policy=args.policy, total_steps=args.total_steps, seed=args.seed, seeds=args.seeds,
            out=out, chunk=args.chunk, eval_episodes=args.eval_episodes, eval_every=args.eval_every, record=args.record,
            callbacks=loggers, progress=False if args.progress == "none" else args.progress, **config,
        )  # fmt: skip
    print(result)
    if args.json:
        _print_json(result.summary() | {"folder": out})
    return INTERRUPTED if result.interrupted else 0


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


def _explain(args: Explain, config: dict[str, Any]) -> int:
    from msrl_jax.training.setup import resolve, resolve_policy

    setup = resolve(args.algo, args.env, seeds=args.seeds, overrides=config)
    plan = setup.compile(resolve_policy(args.policy)).explain()
    if args.json:
        _print_json(plan.to_dict())
    else:
        print(plan)
    return 0


def _bench(args: Bench, config: dict[str, Any]) -> int:
    from msrl_jax.training.benchmark import bench, format_table

    measurements = bench(
        args.algo, args.env, args.policy, args.num_envs, args.unroll_length, repeats=args.repeats,
        seconds=args.seconds, against=args.against, on_measurement=_note_measurement, **config,
    )  # fmt: skip
    print(format_table(measurements))
    if args.json:
        _print_json(measurements)
    return 0


def _note_measurement(measurement: Any) -> None:
    print(f"{measurement}", file=sys.stderr, flush=True)


def _list(args: List, config: dict[str, Any]) -> int:
    from msrl_jax import algorithms, envs, policies

    names = {
        "algorithms": sorted(algorithms.ALGORITHMS),
        "environments": sorted(envs.names()),
        "policies": sorted(policies.POLICIES),
    }
    if args.json:
        _print_json(names)
    else:
        print("\n\n".join(f"{kind}\n" + "\n".join(f"  {name}" for name in found) for kind, found in names.items()))
    return 0


COMMANDS: dict[str, tuple[type, Callable[[Any, dict[str, Any]], int]]] = {
    "train": (Train, _train),
    "evaluate": (Evaluate, _evaluate),
    "record": (Record, _record),
    "explain": (Explain, _explain),
    "bench": (Bench, _bench),
    "list": (List, _list),
}


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised the error itself: a refusal in words, rather than a bug that needs its traceback."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and last.tb_frame.f_globals.get("__name__", "").startswith("msrl_jax.")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the arguments, without the program's name; those of the process if None.

    Returns:
      The exit code: 0; 1 if a run diverged; 2 on bad input, after one line on stderr; 130 if Ctrl-C ended the run.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else BAD_INPUT
    name, *rest = argv
    try:
        if name not in COMMANDS:
            raise UsageError(f"unknown command {name!r}{suggestion(name, COMMANDS)}; {PROG} --help lists them")
        args, config = _parse(name, rest)
        _use_cpu_devices(getattr(args, "cpu_devices", None))
        return COMMANDS[name][1](args, config)
    except KeyboardInterrupt:
        code, message = INTERRUPTED, "interrupted"
    except FloatingPointError as error:
        code, message = DIVERGED, error
    except BrokenPipeError:  # a reader such as `head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        code, message = BAD_INPUT, error
    except (ValueError, TypeError, ImportError) as error:
        if not _is_ours(error):
            raise
        code, message = BAD_INPUT, error
    print(f"{PROG}: error: {' '.join(str(message).split())}", file=sys.stderr)
    return code
