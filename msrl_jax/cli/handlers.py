"""What the commands do: each takes its options and the given fields of the config, and returns the exit code.

Slow imports are inside the functions, so that help is quick and devices can be configured before JAX starts.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msrl_jax import _rooms
from msrl_jax.cli import launch
from msrl_jax.cli.commands import (
    Bench,
    CheckEnv,
    Copy,
    Evaluate,
    Explain,
    Export,
    List,
    Plot,
    Profile,
    Record,
    Report,
    Reproduce,
    Sweep,
    Train,
    Video,
)
from msrl_jax.cli.flags import UsageError
from msrl_jax.cli.listing import list_names
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.compiling import use_cpu_devices
from msrl_jax.run import recipes

DIVERGED = DOES_NOT_CONFORM = DOES_NOT_AGREE = 1
NOT_SAVED, OUT_OF_TIME = 3, 75


def print_json(value: Any) -> None:
    """Prints a value as one line of JSON."""
    from msrl_jax.run.experiment.plain_data import to_json

    print(json.dumps(to_json(value)))


def show(args: Any, data: Any, text: object) -> None:
    """Prints data as JSON if `--json` asks for it, and the text if not."""
    if args.json:
        print_json(data)
    else:
        print(text)


def options_of(args: Any, *others: str) -> dict[str, Any]:
    """The options that are arguments of the function of the same name."""
    left_out = ("config", "given", "json", "cpu_devices", "trust", *others)
    options = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.name not in left_out}
    return {name: False if (name, value) == ("progress", "none") else value for name, value in options.items()}


def _folder(place: str, algo: str, *parts: str | None) -> Path:
    from msrl_jax import algorithms

    name: str = algorithms.get(algo).name  # type: ignore[attr-defined]
    return Path(place) / re.sub(r"[^\w.-]+", "_", "-".join(filter(None, (name, *parts))))


def check(args: Train, config: dict[str, Any]) -> None:
    """Raises the error of `train` for what is wrong whatever the environment, the data and the devices are."""
    from msrl_jax import policies
    from msrl_jax.run.prepare import experiment_of

    if not args.resume:  # else the folder has what is not given
        names = ("algo", "env", "env_params", "total_steps", "seed", "seeds", "pbt", "rank_by", "guard")
        experiment_of(**{name: getattr(args, name) for name in names}, overrides=config)
    if args.policy is not None:
        policies.get(args.policy)


def _train(args: Train, config: dict[str, Any]) -> int:
    from msrl_jax import run
    from msrl_jax.run import processes

    if args.video_every is not None:
        _can_draw()
    first, now = processes.is_first(), time.strftime("%Y%m%d-%H%M%S")
    out = args.out or _folder("runs", args.algo, args.env, args.policy, str(args.seed), processes.gathered(now)[0])
    options = options_of(args, "out", "tensorboard", "wandb", "video_every", "processes", "distributed", "recipe")
    # The defaults of `train` depend on what is given, and the folder of a run that goes on knows what is not.
    options = {name: value for name, value in options.items() if name in args.given or name == "progress"}
    with contextlib.ExitStack() as stack:
        loggers: list[Any] = []
        if args.tensorboard and first:
            loggers.append(stack.enter_context(contextlib.closing(run.TensorBoard(out))))
        if args.wandb and first:
            # The same folder is the same run there, so that a run that goes on appends to it.
            number = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:16]
            names = [f.name for f in dataclasses.fields(args) if f.name not in ("given", "config", "recipe")]
            about = {name: getattr(args, name) for name in names}
            wandb = run.WandB(project=args.wandb, name=out.name, id=number, resume="allow", config=about | config)
            loggers.append(stack.enter_context(contextlib.closing(wandb)))
        if args.video_every is not None:
            loggers.append(run.Filming(whole("video_every", args.video_every)))
        result = run.train(**options, out=out, callbacks=loggers, trust=args.trust, **config)
    if first:
        print(result)
    if first and args.json:
        print_json(result.summary() | {"folder": result.folder})
    return NOT_SAVED if result.save_error else _exit_code(result)


def _sweep(args: Sweep, config: dict[str, Any]) -> int:
    from msrl_jax import search

    if args.resume and args.out is None:
        raise UsageError("--resume needs --out, the folder of the sweep")
    out = args.out or _folder("sweeps", args.algo, args.env, args.method, str(args.seed), time.strftime("%Y%m%d-%H%M%S"))
    result = search.sweep(**options_of(args, "out", "plot"), out=out, **config)
    print(result)
    if any(trial.mean == trial.mean for trial in result.trials):  # not all are nan
        print(f"the best setting again: {result.command()}")
        if args.plot is not None:
            result.plot(args.plot)
    if args.json:
        print_json(result.summary())
    return _exit_code(result)


def _exit_code(result: Any) -> int:
    return _code_of(result.stop_reason) if result.interrupted else 0


def _code_of(stop_reason: str) -> int:
    return 128 + getattr(signal, stop_reason) if stop_reason.startswith("SIG") else OUT_OF_TIME


def launched(args: Train, argv: Sequence[str]) -> int | None:
    """Starts the processes of a run, or makes this one a part of it; the exit code if it has been run."""
    if args.resume and args.out is None:
        raise UsageError("--resume needs --out, the folder of the run")
    child = os.environ.get(launch.INDEX)
    if args.processes is not None and args.distributed:
        raise UsageError("--processes starts processes on this machine, and --distributed joins those of a cluster; give one")
    if args.processes is not None and args.processes < 1:
        raise UsageError(f"--processes {args.processes}: use at least 1")
    if args.processes is not None and child is None:
        return launch.launch(argv, args.processes)
    if child is not None:
        launch.end_with_parent()
        use_cpu_devices(args.cpu_devices or 1)
    if child is not None or args.distributed:
        from msrl_jax.run import processes

        if child is None:
            processes.start()
        else:
            processes.start(os.environ[launch.ADDRESS], int(os.environ[launch.COUNT]), int(child))
    return None


def about_agent(result: Any, member: int | None) -> dict[str, Any]:
    """What the JSON of a command says of an agent; prints the member that it is, if there are several."""
    from msrl_jax.run.evaluation.history import in_words

    number = result.member(member) if result.has_members else None
    if number is not None:
        chosen = ", the best one" * (member is None)
        print(f"member {number} ({in_words(result.settings[number])}{chosen})")
    return {key: result.description[key] for key in ("algorithm", "env")} | {"member": number}


def _evaluate(args: Evaluate, config: dict[str, Any]) -> int:
    from msrl_jax.data.check_spaces import agents_of
    from msrl_jax.run import Result

    result = Result.load(args.run, checkpoint=args.checkpoint, trust=args.trust)
    played = result.evaluate(args.episodes, args.seed, member=args.member, max_steps=args.max_steps, env_params=args.env_params)
    about = about_agent(result, args.member)
    print(played)
    if args.json:
        print_json(about | agents_of(result.behavior.env) | played.means | dataclasses.asdict(played))
    return 0


def _record(args: Record, config: dict[str, Any]) -> int:
    from msrl_jax import data
    from msrl_jax.run import Result

    options = options_of(args, "run", "steps", "out")
    dataset = data.record(Result.load(args.run, trust=args.trust), args.steps, args.out, **options)
    print(dataset)
    if args.json:
        print_json(dataset.describe() | {"file": args.out})
    return 0


def _explain(args: Explain, config: dict[str, Any]) -> int:
    if args.devices and args.cpu_devices is not None:
        raise UsageError(f"--devices and --cpu-devices both choose devices; --devices cpu:{args.cpu_devices} is enough")
    if args.envs_per_device is not None and not args.devices:
        raise UsageError("--envs-per-device needs --devices")
    if args.devices:
        from msrl_jax.fragments.plan.topologies import cpus_of

        use_cpu_devices(max(1, *map(cpus_of, args.devices)))
    from msrl_jax import policies
    from msrl_jax.fragments.plan.picture import page_of
    from msrl_jax.policies.base import spec
    from msrl_jax.report.scaling import format_table, plans
    from msrl_jax.run.auto_policy import choose_policy, is_auto
    from msrl_jax.run.disk.folder import write_text
    from msrl_jax.run.prepare import make_experiment

    common = {"seeds": args.seeds, "env_params": args.env_params}
    experiment = make_experiment(args.algo, args.env, overrides=config, **common)
    names = list(dict.fromkeys(name or experiment.usual_policy for name in (args.policy, *args.beside)))
    if args.out is not None:
        _check_picture(args.out, max(1, len(args.devices)) * len(names))
    rows, reasons, placed = [], [], []
    if args.devices:
        for name in names:
            rows += plans(args.algo, args.env, name, args.devices, args.envs_per_device, **common, **config)
    else:
        note = functools.partial(print, file=sys.stderr)
        reasons = [choose_policy(experiment, note=note)] if any(map(is_auto, names)) else []
        each = [reasons[0].policy if is_auto(name) else policies.get(name) for name in names]
        placed = {spec(policy): policy for policy in each}.values()
    found = [row.plan for row in rows] + [experiment.compile(policy).explain() for policy in placed]
    if args.out is not None:
        page = found[0].svg() if args.out.suffix == ".svg" else page_of(found, f"{args.algo} on {args.env}")
        write_text(args.out, page)
    if len(rows) > 1:
        show(args, [row.to_dict() for row in rows], format_table(rows))
        return 0
    parts = experiment.parameters
    lines = [f"parameters ({sum(parts.values()):,})", *(f"  {name} {number:,}" for name, number in parts.items())]
    chosen = {"choice": reasons[0].to_dict()} if reasons else {}
    data = [plan.to_dict() | {"parameters": parts} | chosen for plan in found]
    show(args, data if len(data) > 1 else data[0], "\n\n".join([*map(str, reasons), *map(str, found), "\n".join(lines)]))
    return 0


def _check_picture(out: Path, number: int) -> None:
    """Raises UsageError if a picture of so many plans cannot be written."""
    if out.suffix not in (".html", ".svg"):
        raise UsageError(f"--out {out}: name a page, such as plan.html, or a picture, such as plan.svg")
    if out.suffix == ".svg" and number > 1:
        raise UsageError(f"--out {out}: a picture has one plan, and there are {number}; name a page, such as {out.stem}.html")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.absolute().parent}; make it first")


def _can_draw() -> None:
    """Lets MuJoCo draw where there are no windows."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


def _video(args: Video, config: dict[str, Any]) -> int:
    _can_draw()
    from msrl_jax.run import Result

    options = options_of(args, "run", "out", "checkpoint")
    made = Result.load(args.run, checkpoint=args.checkpoint, trust=args.trust).video(args.out, **options)
    about = {"file": str(args.out), "returns": list(made.returns), "lengths": [len(x) - 1 for x in made.episodes]}
    show(args, about, f"{made}\n{args.out}")
    return 0


def _export(args: Export, config: dict[str, Any]) -> int:
    from msrl_jax.run import Result

    options = options_of(args, "run", "file", "checkpoint")
    file = Result.load(args.run, checkpoint=args.checkpoint, trust=args.trust).export(args.file, **options)
    show(args, {"file": str(file)}, file)
    return 0


def _report(args: Report, config: dict[str, Any]) -> int:
    from msrl_jax import report

    page = report.runs_page(args.runs, args.out, metrics=args.metrics, title=args.title, plans=args.plans, trust=args.trust)
    show(args, {"page": str(page)}, page)
    return 0


def _plot(args: Plot, config: dict[str, Any]) -> int:
    from msrl_jax import report

    report.plot_runs(args.runs, args.out, metrics=args.metrics, x=args.x)
    show(args, {"figure": str(args.out)}, args.out)
    return 0


def _bench(args: Bench, config: dict[str, Any]) -> int:
    from msrl_jax.report import bench as report

    grid = (args.algo, args.env, args.policy, args.num_envs, args.unroll_length)
    options = options_of(args, "algo", "env", "policy", "num_envs", "unroll_length")
    note = functools.partial(print, file=sys.stderr, flush=True)
    measurements = report.bench(*grid, **options, on_stage=note, on_measurement=note, **config)
    print(report.format_table(measurements))
    if args.json:
        print_json(measurements)
    return 0


def _profile(args: Profile, config: dict[str, Any]) -> int:
    if args.run is not None and (more := sorted({"algo", "env", "env_params", "policy"} & args.given | set(config))):
        raise UsageError(f"--run {args.run} says what is measured; leave out {', '.join(more)}")
    from msrl_jax import report
    from msrl_jax.report import profiles
    from msrl_jax.run import Result

    if args.out is not None:
        profiles.check_profile(args.out)
    options = {"iterations": args.iterations, "repeats": args.repeats}
    options["on_stage"] = functools.partial(print, file=sys.stderr, flush=True)
    if args.run is None:
        made = report.profile(args.algo, args.env, policy=args.policy, env_params=args.env_params, **options, **config)
    else:
        made = report.profile(Result.load(args.run, trust=args.trust), trust=args.trust, **options)
        made.save(args.run / profiles.OF_RUN)
    if args.out is not None:
        made.save(args.out)
    show(args, made.to_dict(), made)
    return 0


def _reproduce(args: Reproduce, config: dict[str, Any]) -> int:
    if not args.names and args.pages is None:
        raise UsageError("name recipes, such as ppo-cartpole or 'ppo-*'; msrl-jax list --recipes has them")
    names = recipes.matching(args.names)
    from msrl_jax.report import pages, reproduce
    from msrl_jax.run.loop.hooks import seconds

    folder = recipes.records_folder(args.records)
    if folder is None:
        if args.update or args.pages is not None:
            raise UsageError(recipes.NO_RECORDS)
        print(recipes.NO_RECORDS, file=sys.stderr)
    elif args.update and not os.access(folder, os.W_OK):
        raise UsageError(f"--update cannot write to {folder}; leave it out, and take the record from {args.out}")
    if args.pages is not None:  # what is refused is told before anything is trained
        pages.check_pages(args.pages)
        for name in set(recipes.names()) - set(names):
            recipes.record_of(recipes.find(name), folder)
    compared = {name: _can_compare(args, name, folder) for name in names}
    found, code = [], 0
    ends = None if args.time_limit is None else time.monotonic() + seconds("time_limit", args.time_limit)
    for name in names:
        options = options_of(args, "names", "update", "pages", "out", "time_limit")
        left = None if ends is None else max(1e-3, ends - time.monotonic())
        each = reproduce(name, **options, compare=compared[name], out=args.out / name, time_limit=left)
        print(each, flush=True)
        found.append(each.summary())
        if each.record is None:
            code = _code_of(each.stop_reason)
            break
        if args.update and folder is not None:
            each.record.write(recipes.record_path(name, folder))
        code = DOES_NOT_AGREE if each.verdict == "does not agree" else code
    if args.pages is not None:
        print(f"{len(pages.write_pages(args.pages, folder))} files in {args.pages}")
    if args.json:
        print_json(found)
    return code


def _can_compare(args: Reproduce, name: str, folder: Path | None) -> bool:
    """Whether a recipe has a record to compare with; says if the seeds are too few for that. With `--update`, one that is
    damaged or of other settings is no error."""
    from msrl_jax.report.reproduction import comparable, seeds_of
    from msrl_jax.report.statistics import fewest

    try:
        recorded = comparable(recipes.find(name), folder)
    except recipes.RecordError as error:
        if not args.update:
            raise
        print(f"the old record is not compared with: {error}", file=sys.stderr)
        return False
    if args.update and folder and recorded and not set(recorded.seeds) <= set(seeds_of(recorded, args.seeds, args.seed)):
        raise UsageError(
            f"--update would replace the record of {name}, of seeds {recorded.seeds[0]} to {recorded.seeds[-1]}, by one "
            f"without some of them; leave --seed and --seeds out, or delete {recipes.record_path(name, folder)} first"
        )
    if recorded:
        count, least = len(seeds_of(recorded, args.seeds, args.seed)), fewest(len(recorded.seeds))
        if least is None or count < least:
            remedy = "write one of more seeds (--update)" if least is None else f"with --seeds {least} they can"
            fact = f"{count} of them cannot be told from the {len(recorded.seeds)} of its record"
            print(f"{name}: {fact}; {remedy}", file=sys.stderr)
    return recorded is not None


def _copy(args: Copy, config: dict[str, Any]) -> int:
    from msrl_jax import algorithms

    path = algorithms.copy(args.algorithm, args.file)
    lines = len(path.read_text("utf-8").splitlines())
    print(f"{path} has {args.algorithm} in {lines} lines; msrl-jax train --algo {shlex.quote(str(path))} trains it")
    return 0


def _check_env(args: CheckEnv, config: dict[str, Any]) -> int:
    from msrl_jax.envs import check

    report = check(args.env, **options_of(args, "env"))
    show(args, dataclasses.asdict(report) | {"ok": report.ok}, report)
    return 0 if report.ok else DOES_NOT_CONFORM


COMMANDS: _rooms.Registry[tuple[type, Callable[[Any, dict[str, Any]], int]]] = _rooms.Registry(
    "commands",
    {
        "train": (Train, _train),
        "sweep": (Sweep, _sweep),
        "evaluate": (Evaluate, _evaluate),
        "record": (Record, _record),
        "explain": (Explain, _explain),
        "bench": (Bench, _bench),
        "profile": (Profile, _profile),
        "video": (Video, _video),
        "export": (Export, _export),
        "report": (Report, _report),
        "plot": (Plot, _plot),
        "reproduce": (Reproduce, _reproduce),
        "copy": (Copy, _copy),
        "list": (List, list_names),
        "check-env": (CheckEnv, _check_env),
    },
)
