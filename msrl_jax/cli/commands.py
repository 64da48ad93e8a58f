"""Implements the commands. Their options come from the library functions that they name, and from the Args of their docstrings.

Slow imports are inside the functions, so that devices can be configured before JAX starts.
"""

import contextlib
import dataclasses
import hashlib
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msrl_jax import _rooms
from msrl_jax.cli import launch, listing
from msrl_jax.cli.command import Command, Output, command
from msrl_jax.cli.config_file import recipe_file
from msrl_jax.cli.options import TRAIN, OptionGroup, UsageError
from msrl_jax.fragments.support.checks import whole
from msrl_jax.fragments.support.compiling import use_cpu_devices
from msrl_jax.run import recipes

DIVERGED = DOES_NOT_CONFORM = DOES_NOT_AGREE = 1
NOT_SAVED, OUT_OF_TIME = 3, 75


def _print_note(text: object) -> None:
    """Prints a line on what is now standard error."""
    print(text, file=sys.stderr, flush=True)


def run_of(run: Path, *, checkpoint: Literal["newest", "best"] | int = "newest", trust: bool = False) -> Any:
    """Loads the result of a run.

    Args:
      run: folder of a run.
      checkpoint: newest, best, or the number of iterations after which it was written.
    """
    from msrl_jax.run import Result

    return Result.load(run, checkpoint=checkpoint, trust=trust)


def _default_folder(place: str, arguments: Mapping[str, Any], *parts: Any) -> Path:
    """Returns the path of a new folder, named after the arguments."""
    from msrl_jax import algorithms

    name: str = algorithms.get(arguments.get("algo", "ppo")).name  # type: ignore[attr-defined]
    words = [name, arguments.get("env", "CartPole-v1"), *parts]
    return Path(place) / re.sub(r"[^\w.-]+", "_", "-".join(str(word) for word in words if word is not None))


def check_train(arguments: dict[str, Any]) -> None:
    """Raises the error of `train` for arguments that are wrong for any environment, data and devices."""
    from msrl_jax import policies
    from msrl_jax.run.prepare import ARGUMENTS, make_experiment

    if not arguments.get("resume"):  # otherwise the folder supplies the arguments that are not given
        not_of_experiment = TRAIN_COMMAND.options().keys() - {"algo", "env", *ARGUMENTS}
        make_experiment(**{name: value for name, value in arguments.items() if name not in not_of_experiment})
    if arguments.get("policy") is not None:
        policies.get(arguments["policy"])


@command(OptionGroup(TRAIN, without=("devices", "callbacks")), extra=(launch.start, recipe_file), check=check_train)
def train(
    arguments: dict[str, Any],
    *,
    out: Path | None = None,
    resume: bool = False,
    video_every: int | None = None,
    tensorboard: bool = False,
    wandb: str | None = None,
) -> Output:
    """Train an agent; without arguments, PPO on CartPole-v1.

    Args:
      out: folder of the run; by default runs/<algo>-<env>-<policy>-<seed>-<time>.
      resume: resume the run in the folder, or start a new run if there is none. You need not repeat its settings; policy and
        devices may change (give cpu_devices again), and more total_steps extend the run.
      video_every: steps between videos of an episode, written to videos/STEPS.gif in the folder of the run.
      tensorboard: also log to TensorBoard, in the folder of the run.
      wandb: also log to Weights & Biases, in the project with this name.
    """
    if video_every is not None:
        _can_draw()
    from msrl_jax import run
    from msrl_jax.run import processes

    is_first, timestamp = processes.is_first(), time.strftime("%Y%m%d-%H%M%S")
    out = out or _default_folder(
        "runs", arguments, arguments.get("policy"), arguments.get("seed", 0), processes.gathered(timestamp)[0]
    )
    with contextlib.ExitStack() as stack:
        loggers: list[Any] = []
        if tensorboard and is_first:
            loggers.append(stack.enter_context(contextlib.closing(run.TensorBoard(out))))
        if wandb and is_first:
            # The same folder maps to the same run in W&B, so that a resumed run appends to it.
            number = hashlib.sha256(str(out.absolute()).encode()).hexdigest()[:16]
            logger = run.WandB(project=wandb, name=out.name, id=number, resume="allow", config=arguments)
            loggers.append(stack.enter_context(contextlib.closing(logger)))
        if video_every is not None:
            loggers.append(run.Filming(whole("video_every", video_every)))
        arguments |= {"out": out, "callbacks": loggers}
        result = run.train(**arguments)
    code = NOT_SAVED if result.save_error else exit_code(result)
    return Output(result, result.summary() | {"folder": result.folder}, code) if is_first else Output(code=code)


TRAIN_COMMAND = train


@command(OptionGroup("msrl_jax.search.sweep:sweep", without=("devices", "guard", "pbt")), sweeps=True)
def sweep(arguments: dict[str, Any], *, out: Path | None = None, plot: Path | None = None) -> Output:
    """Train an algorithm with many settings at the same time, and rank them.

    A config flag that takes a number also takes several, such as 1e-4,3e-4, uniform:0.9:1 or log:1e-4:1e-2. A flag that takes
    text also takes several values, such as --activation tanh,relu. For sequences, separate the values by spaces:
    --hidden-sizes 64,64 128.

    Args:
      out: folder of the sweep; by default sweeps/<algo>-<env>-<method>-<seed>-<time>.
      plot: file for a figure, such as sweep.png
    """
    from msrl_jax import search

    name_parts = arguments.get("method", "random"), arguments.get("seed", 0), time.strftime("%Y%m%d-%H%M%S")
    arguments["out"] = out or _default_folder("sweeps", arguments, *name_parts)
    result = search.sweep(**arguments)
    text = str(result)
    if any(trial.mean == trial.mean for trial in result.trials):  # skipped if all means are nan
        text += f"\nthe best setting again: {result.command()}"
        if plot is not None:
            search.plot_sweep(result, plot)
    return Output(text, result.summary(), exit_code(result))


def exit_code(result: Any) -> int:
    """Returns the exit code of a run or a sweep that has ended."""
    return _exit_code_of(result.stop_reason) if result.interrupted else 0


def _exit_code_of(stop_reason: str) -> int:
    return 128 + getattr(signal, stop_reason) if stop_reason.startswith("SIG") else OUT_OF_TIME


def about_agent(result: Any, member: int | None) -> tuple[str, dict[str, Any]]:
    """Describes the agent that acts, as a line of text (empty if its run has one member) and as data."""
    from msrl_jax.run.evaluation.history import in_words

    number = result.member(member) if result.has_members else None
    suffix = ", the best one" * (member is None)
    line = "" if number is None else f"member {number} ({in_words(result.settings[number])}{suffix})\n"
    return line, {key: result.description[key] for key in ("algorithm", "env")} | {"member": number}


@command(run_of, "msrl_jax.run.result:Result.evaluate")
def evaluate(run: dict[str, Any], arguments: dict[str, Any]) -> Output:
    """Play greedy episodes with a trained agent."""
    from msrl_jax.data.check_spaces import agents_of

    result = run_of(**run)
    evaluation = result.evaluate(**arguments)
    line, about = about_agent(result, arguments.get("member"))
    data = about | agents_of(result.behavior.env) | evaluation.means | dataclasses.asdict(evaluation)
    return Output(f"{line}{evaluation}", data)


@command(OptionGroup(run_of, without=("checkpoint",)), OptionGroup("msrl_jax.data.rollout:record", without=("result", "path")))
def record(run: dict[str, Any], arguments: dict[str, Any], *, steps: int, out: Path) -> Output:
    """Run a trained agent, and write its steps to a data set.

    Args:
      steps: number of rows of the data set.
      out: file of the data set, such as medium.npz
    """
    from msrl_jax import data

    dataset = data.record(run_of(**run), path=out, **arguments)
    return Output(dataset, dataset.describe() | {"file": out})


@command("msrl_jax.run.prepare:make_experiment")
def explain(
    arguments: dict[str, Any],
    *,
    policy: str | None = None,
    devices: tuple[str, ...] = (),
    envs_per_device: int | None = None,
    beside: tuple[str, ...] = (),
    out: Path | None = None,
    cpu_devices: int | None = None,
) -> Output:
    """Print the plan of an algorithm under a distribution policy: programs, placements and transfers.

    Args:
      policy: a distribution policy, by default that of train; auto measures the policies and takes the fastest.
      devices: plan for these devices, even if you do not have them: tpu:v5e:8x8, gpu:h100:8 or cpu:8. Give several to compare
        them in a table.
      envs_per_device: environments per device, instead of num_envs.
      beside: other distribution policies to compare in a table.
      out: file for pictures of the plans: FILE.html for a page, or FILE.svg for one plan.
    """
    if devices and cpu_devices is not None:
        raise UsageError(f"--devices and --cpu-devices both choose devices; --devices cpu:{cpu_devices} is enough")
    if envs_per_device is not None and not devices:
        raise UsageError("--envs-per-device needs --devices")
    if devices:
        from msrl_jax.fragments.plan.topologies import cpus_of

        use_cpu_devices(max(1, *map(cpus_of, devices)))
    from msrl_jax import policies
    from msrl_jax.fragments.plan.picture import page_of
    from msrl_jax.policies.helpers import policy_text
    from msrl_jax.report.scaling import format_plans, plans
    from msrl_jax.run.auto_policy import choose_policy, is_auto
    from msrl_jax.run.disk.folder import write_text
    from msrl_jax.run.prepare import make_experiment

    experiment = make_experiment(**arguments)
    names = list(dict.fromkeys(name or experiment.usual_policy for name in (policy, *beside)))
    if out is not None:
        _check_picture(out, max(1, len(devices)) * len(names))
    rows, reasons, placed = [], [], []
    if devices:
        for name in names:
            rows += plans(**arguments, policy=name, devices=devices, envs_per_device=envs_per_device)
    else:
        reasons = [choose_policy(experiment, note=_print_note)] if any(map(is_auto, names)) else []
        candidates = [reasons[0].policy if is_auto(name) else policies.get(name) for name in names]
        placed = {policy_text(policy): policy for policy in candidates}.values()
    compared_plans = [row.plan for row in rows] + [experiment.compile(policy).explain() for policy in placed]
    if out is not None:
        title = f"{experiment.name} on {experiment.env_name}"
        write_text(out, compared_plans[0].svg() if out.suffix == ".svg" else page_of(compared_plans, title))
    if len(rows) > 1:
        return Output(format_plans(rows), [row.to_dict() for row in rows])
    parts = experiment.parameters
    lines = [f"parameters ({sum(parts.values()):,})", *(f"  {name} {number:,}" for name, number in parts.items())]
    choice = {"choice": reasons[0].to_dict()} if reasons else {}
    data = [plan.to_dict() | {"parameters": parts} | choice for plan in compared_plans]
    return Output(
        "\n\n".join([*map(str, reasons), *map(str, compared_plans), "\n".join(lines)]), data if len(data) > 1 else data[0]
    )


def _check_picture(out: Path, number: int) -> None:
    """Raises UsageError if a picture of this number of plans cannot be written."""
    if out.suffix not in (".html", ".svg"):
        raise UsageError(f"--out {out}: use a page, such as plan.html, or a picture, such as plan.svg")
    if out.suffix == ".svg" and number > 1:
        raise UsageError(f"--out {out}: a picture shows one plan, but there are {number}; use a page, such as {out.stem}.html")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: the folder {out.absolute().parent} does not exist; create it first")


def _can_draw() -> None:
    """Lets MuJoCo render on machines without a display."""
    if sys.platform == "linux" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")


@command(run_of, OptionGroup("msrl_jax.run.outputs.video:video", without=("result", "path")))
def video(run: dict[str, Any], arguments: dict[str, Any], *, out: Path = Path("video.gif")) -> Output:
    """Write a video of a trained agent: greedy episodes.

    Args:
      out: the file: .gif, .mp4 or .html
    """
    _can_draw()
    from msrl_jax.run import video

    recording = video(run_of(**run), out, **arguments)
    lengths = [len(episode) - 1 for episode in recording.episodes]
    return Output(f"{recording}\n{out}", {"file": str(out), "returns": list(recording.returns), "lengths": lengths})


@command(run_of, OptionGroup("msrl_jax.run.outputs.export:export", without=("result",)))
def export(run: dict[str, Any], arguments: dict[str, Any]) -> Output:
    """Export the policy of a run to one file that acts without this package: a program for jax.export, or an ONNX model."""
    from msrl_jax.run import export

    file = export(run_of(**run), **arguments)
    return Output(file, {"file": str(file)})


@command(OptionGroup("msrl_jax.report.runs_page:runs_page", without=("path",)))
def report(arguments: dict[str, Any], *, out: Path = Path("report.html")) -> Output:
    """Write a page about runs: returns and curves of each setting, their differences, times, and how to repeat each run.

    Args:
      out: the page, a single file that loads no other files.
    """
    from msrl_jax.report import runs_page

    page = runs_page(**arguments, path=out)
    return Output(page, {"page": str(page)})


@command(OptionGroup("msrl_jax.report.runs_figure:plot_runs", without=("path",)))
def plot(arguments: dict[str, Any], *, out: Path = Path("curves.pdf")) -> Output:
    """Plot a curve with its interval over seeds for each setting of each run, as a figure for a paper.

    Args:
      out: the figure: .pdf, .svg or .png
    """
    from msrl_jax.report import plot_runs

    plot_runs(**arguments, path=out)
    return Output(out, {"figure": str(out)})


@command(OptionGroup("msrl_jax.report.bench:bench", without=("devices", "note")))
def bench(arguments: dict[str, Any]) -> Output:
    """Measure steps, updates and, if the host drives the loop, its time per instruction, over a grid of values."""
    from msrl_jax.report import bench as report

    measurements = report.bench(**arguments, note=_print_note)
    return Output(report.format_table(measurements), measurements)


@command(OptionGroup("msrl_jax.report.profiler:profile", without=("devices", "note")))
def profile(arguments: dict[str, Any], *, run: Path | None = None, out: Path | None = None) -> Output:
    """Measure how the time of training is spent: simulation, inference, learning, transfers, Python, and every fragment.

    Args:
      run: folder of a run to measure, instead of --algo and --env; reports about the run show the profile.
      out: file for the outcome: FILE.svg for a figure, FILE.json for the numbers, or FILE.trace.json.gz for the trace.
    """
    from msrl_jax.report import profile, profile_results

    if run is not None and (conflicting := sorted(arguments.keys() - {"iterations", "repeats", "trust"})):
        raise UsageError(f"--run {run} determines what is measured; leave out {', '.join(conflicting)}")
    if out is not None:
        profile_results.check_profile(out)
    run_argument = {} if run is None else {"algo": run_of(run, trust=arguments.get("trust", False))}
    measured_profile = profile(**arguments, **run_argument, note=_print_note)
    for file in filter(None, (run and run / profile_results.OF_RUN, out)):
        measured_profile.save(file)
    return Output(measured_profile, measured_profile.to_dict())


@command(OptionGroup("msrl_jax.report.reproduction:reproduce", without=("name", "out", "compare", "devices")))
def reproduce(
    arguments: dict[str, Any],
    *names: str,
    out: Path = Path("reproduced"),
    update: bool = False,
    pages: Path | None = None,
    records: Path | None = None,
    time_limit: float | str | None = None,
) -> Output:
    """Train recipes on several seeds, and check whether their scores agree with the recorded ones.

    Args:
      *names: names of recipes, or patterns such as 'ppo-*'.
      out: folder with a subfolder for each recipe; run the same command again to resume.
      update: write the new records to the folder of records, instead of the existing ones.
      pages: folder for the pages of all records; with it, you may leave out the names.
    """
    if not names and pages is None:
        raise UsageError("name recipes, such as ppo-cartpole or 'ppo-*'; msrl-jax list --recipes has them")
    recipe_names = recipes.matching(names)
    from msrl_jax.report import pages as pages_of
    from msrl_jax.report import reproduce
    from msrl_jax.run.loop.hooks import parse_duration

    folder = recipes.records_folder(records)
    if folder is None:
        if update or pages is not None:
            raise UsageError(recipes.NO_RECORDS)
        _print_note(recipes.NO_RECORDS)
    elif update and not os.access(folder, os.W_OK):
        raise UsageError(f"--update cannot write to {folder}; leave it out, and copy the record from {out}")
    if pages is not None:  # report errors before training anything
        pages_of.check_pages(pages)
        for name in set(recipes.names()) - set(recipe_names):
            recipes.record_of(recipes.find(name), folder)
    compared = {name: _can_compare(name, folder, arguments, update=update) for name in recipe_names}
    summaries, code = [], 0
    deadline = None if time_limit is None else time.monotonic() + parse_duration("time_limit", time_limit)
    for name in recipe_names:
        seconds_left = None if deadline is None else max(1e-3, deadline - time.monotonic())
        reproduction = reproduce(name, **arguments | {"compare": compared[name], "out": out / name, "time_limit": seconds_left})
        summaries.append(reproduction.summary())
        print(reproduction, flush=True)
        if reproduction.record is None:
            code = _exit_code_of(reproduction.stop_reason)
            break
        if update and folder is not None:
            reproduction.record.write(recipes.record_path(name, folder))
        code = DOES_NOT_AGREE if reproduction.verdict == "does not agree" else code
    text = "" if pages is None else f"{len(pages_of.write_pages(pages, folder))} files in {pages}"
    return Output(text, summaries, code)


def _can_compare(name: str, folder: Path | None, arguments: Mapping[str, Any], *, update: bool) -> bool:
    """Returns whether a recipe has a record to compare with; prints a note if there are too few seeds to compare. With
    `update`, a record that is damaged or has other settings is not an error."""
    from msrl_jax.report.reproduction import comparable, seeds_of
    from msrl_jax.report.statistics import fewest

    try:
        recorded = comparable(recipes.find(name), folder)
    except recipes.RecordError as error:
        if not update:
            raise
        _print_note(f"the old record is ignored: {error}")
        return False
    if recorded is None:
        return False
    seeds = seeds_of(recorded, arguments.get("seeds"), arguments.get("seed"))
    if update and folder and not set(recorded.seeds) <= set(seeds):
        raise UsageError(
            f"--update would replace the record of {name}, of seeds {recorded.seeds[0]} to {recorded.seeds[-1]}, by one "
            f"of fewer seeds; leave --seed and --seeds out, or delete {recipes.record_path(name, folder)} first"
        )
    min_seeds = fewest(len(recorded.seeds))
    if min_seeds is None or len(seeds) < min_seeds:
        remedy = "write a record of more seeds (--update)" if min_seeds is None else f"use --seeds {min_seeds} or more"
        fact = f"seeds: {len(seeds)} are too few to compare with the {len(recorded.seeds)} of its record"
        _print_note(f"{name}: {fact}; {remedy}")
    return True


@command("msrl_jax.registry.copying:copy")
def copy(arguments: dict[str, Any]) -> Output:
    """Copy the file of an algorithm under a new name, so that you can change it; train it with `--algo FILE`."""
    from msrl_jax import algorithms

    path = algorithms.copy(**arguments)
    lines = len(path.read_text("utf-8").splitlines())
    hint = f"train it with msrl-jax train --algo {shlex.quote(str(path))}"
    return Output(f"{path} has {arguments['algorithm']} in {lines} lines; {hint}", {"file": str(path), "lines": lines})


@command()
def list_(*, recipes: bool = False, records: Path | None = None, envs: bool = False) -> Output:
    """List the algorithms, environments, distribution policies, and installable suites of environments.

    Args:
      recipes: list the recipes instead, with their scores.
      records: with --recipes, the folder of the records; by default benchmarks/records of the clone.
      envs: list only the environments and their suites.
    """
    if records is not None and not recipes:
        raise UsageError("--records needs --recipes; give both, or leave it out")
    return Output(*(listing.recipes_in(records) if recipes else listing.names(only_envs=envs)))


@command("msrl_jax.envs.check_values:check")
def check_env(arguments: dict[str, Any]) -> Output:
    """Test an environment with random actions, and report where it breaks the protocol."""
    from msrl_jax.envs import check

    conformance = check(**arguments)
    return Output(
        conformance, dataclasses.asdict(conformance) | {"ok": conformance.ok}, 0 if conformance.ok else DOES_NOT_CONFORM
    )


COMMANDS: _rooms.Registry[Command] = _rooms.Registry(
    "commands",
    {
        "train": train,
        "sweep": sweep,
        "evaluate": evaluate,
        "record": record,
        "explain": explain,
        "bench": bench,
        "profile": profile,
        "video": video,
        "export": export,
        "report": report,
        "plot": plot,
        "reproduce": reproduce,
        "copy": copy,
        "list": list_,
        "check-env": check_env,
    },
)
