"""The commands of the command line and their options; the text of a class is what `--help` shows."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, dataclass_transform

import tyro

T = TypeVar("T")
Progress = Literal["auto", "bar", "lines", "none"]
Checkpoint = Literal["newest", "best"] | int
PerAlgorithm = Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: each algorithm's own)")]


def option(default: Any = dataclasses.MISSING, doc: str = "") -> Any:
    """An option of a command, and its line of text."""
    return dataclasses.field(default=default, metadata={"doc": doc})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(option,))
def command(cls: type[T]) -> type[T]:
    """Makes a class the options of a command."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@command
class Command:
    """What all commands have that compute."""

    cpu_devices: int | None = option(None, "compute on this many virtual CPU devices.")
    json: bool = option(False, "print the outcome as one line of JSON, the last on stdout.")
    trust: bool = option(
        False, "run the code that the folder of a run, a config file or a learner names: modules, and files of algorithms."
    )  # fmt: skip


@command
class What(Command):
    """What a command runs."""

    algo: str = option(
        "ppo", "name of the algorithm (see `msrl-jax list`), file of one such as my_ppo.py, or MODULE:CLASS; the fields of its "
        "config are flags."
    )  # fmt: skip
    env: str = option("CartPole-v1", "environment, NAME or NAME:param=value,...")
    env_params: str | None = option(
        None, "parameters of the environment as data, such as length=uniform:0.25:1,gravity=9.8; drawn in every episode."
    )
    policy: str | None = option(
        None, "distribution policy, NAME or NAME:param=value,... such as SingleLearnerCoarse:learners=2,staleness=1, or "
        "MODULE:CLASS, or auto: the fastest, by a short calibration; GPUOnly if not given, or MultiLearner if the host "
        "simulates the environment."
    )  # fmt: skip


@command
class OfAgent(Command):
    """What a command does with the agent of a run."""

    run: tyro.conf.Positional[Path] = option(doc="folder of a run.")
    seed: int = option(0, "the seed of all randomness.")
    member: int | None = option(None, "number of the member, in a run of several; the best one if not given.")


@command
class Again(OfAgent):
    """What a command does with the agent of a run in its environment."""

    env_params: str | None = option(
        None, "the same with other parameters of the environment, such as length=1.5; those of the run if not given."
    )


@command
class Train(What):
    """Train an agent; with no arguments, PPO on CartPole-v1."""

    recipe: str | None = option(
        None, "take options from a recipe, such as ppo-cartpole (see `msrl-jax list --recipes`); others may be given beside it."
    )
    total_steps: int = option(500_000, "environment steps per seed.")
    seed: int = option(0, "the seed of all randomness.")
    seeds: int = option(1, "number of runs to train at once, with the seeds seed, seed + 1, ...")
    pbt: str | None = option(
        None, "train a population, such as members=8,every=20,learning_rate=log_uniform:1e-5:1e-2; members copy better ones."
    )
    rank_by: str = option(
        "return", "what tells which checkpoint and which member is the best, and whom members of a population copy: return, or "
        "a metric of the environment, of which more is better."
    )  # fmt: skip
    out: Path | None = option(None, "folder of the run; runs/<algo>-<env>-<policy>-<seed>-<time> if not given.")
    resume: bool = option(
        False, "go on with the run in the folder, or start it if there is none. Its settings need not be given again; policy "
        "and devices may change (give cpu_devices again), and more total_steps extend it."
    )  # fmt: skip
    actors_at: str | None = option(
        None, "HOST:PORT at which this learner listens for actors, which `msrl-jax act` starts and which may come and go."
    )  # fmt: skip
    chunk: int | None = option(None, "iterations between updates of the display; they grow to about a second if not given.")
    eval_episodes: int = option(32, "episodes per greedy evaluation; 0 never evaluates.")
    eval_every: int | None = option(None, "environment steps between evaluations; one at the end if not given.")
    video_every: int | None = option(None, "steps between films of an episode, videos/STEPS.gif in the folder of the run.")
    checkpoint_every: str | None = option(None, "steps between checkpoints, or time such as 10m; about a minute if not given.")
    keep_checkpoints: int = option(2, "number of checkpoints to keep, besides the best one.")
    time_limit: str | None = option(
        None, "time after which the run is saved and ends, such as 5h50m; the exit code is then 75."
    )
    guard: Literal["halt", "skip", "rollback", "ignore"] = option(
        "halt", "what to do about nan and infinities: halt, skip (drop the update), rollback (to the last good state, with "
        "half the learning rate) or ignore; halt if not given."
    )  # fmt: skip
    record: Path | None = option(None, "file for a data set of all environment steps, such as experience.npz")
    tensorboard: bool = option(False, "also log to TensorBoard, in the run's folder.")
    wandb: str | None = option(None, "also log to Weights & Biases, in the project with this name.")
    progress: Progress = option("auto", "kind of progress display on stderr.")
    processes: int | None = option(None, "start this many processes here; each has one CPU device, or --cpu-devices.")
    distributed: bool = option(False, "be one of the processes of a cluster, which JAX finds: SLURM, Open MPI, GKE, a TPU pod.")
    given: Annotated[frozenset[str], tyro.conf.Suppress] = frozenset()


@command
class Sweep(What):
    """Train many settings of an algorithm, side by side, and rank them.

    A flag of the config that takes a number takes several, such as 1e-4,3e-4, uniform:0.9:1 or log:1e-4:1e-2; one of words
    or sequences does too, such as --activation tanh,relu --hidden-sizes 64 64,128.
    """

    SWEEPS: ClassVar[bool] = True

    num: int | None = option(None, "number of trials; of a grid, the points of each field between bounds.")
    method: Literal["random", "grid", "sobol", "optuna"] = option(
        "random", "how trials are chosen; grid takes all combinations, optuna asks Optuna's TPE sampler."
    )
    total_steps: int = option(500_000, "environment steps of every member.")
    seed: int = option(0, "the seed of the choice of trials, and the first seed of each.")
    seeds: int = option(1, "members of each trial, with the seeds seed, seed + 1, ...")
    out: Path | None = option(None, "folder of the sweep; sweeps/<algo>-<env>-<method>-<seed>-<time> if not given.")
    resume: bool = option(False, "go on with the sweep in the folder, or start it if there is none; give the same options.")
    halving: int | None = option(
        None, "successive halving with this factor: the best 1/FACTOR of the trials go on for FACTOR times as many steps."
    )
    rungs: int | None = option(None, "number of comparisons of successive halving; as many as leave one trial if not given.")
    min_steps: int | None = option(None, "steps up to the first comparison, in place of rungs.")
    members_at_once: int | None = option(None, "members that are trained side by side; as many as memory holds if not given.")
    eval_episodes: int = option(32, "greedy episodes of each member, whose mean return ranks it; 0 takes the training return.")
    rank_by: str = option("return", "what ranks the trials: return, or a metric of the environment, of which more is better.")
    checkpoint_every: str | None = option(
        None, "steps between checkpoints of a run, or time such as 10m; a minute if not given."
    )
    time_limit: str | None = option(
        None, "time after which the sweep is saved and ends, such as 5h50m; the exit code is then 75."
    )
    plot: Path | None = option(None, "file for a figure, such as sweep.png")
    progress: Progress = option("auto", "kind of progress display on stderr.")


@command
class Evaluate(Again):
    """Play greedy episodes with a trained agent."""

    episodes: int = option(128, "number of episodes.")
    checkpoint: Checkpoint = option("newest", "newest, best, or the iterations after which it was written.")
    max_steps: int = option(10_000, "maximum length of an episode, in steps.")


@command
class Record(Again):
    """Let a trained agent act, and write its steps to a data set."""

    steps: int = option(doc="number of rows of the data set.")
    out: Path = option(doc="file of the data set, such as medium.npz")
    epsilon: float | None = option(
        None, "probability of a random action; other actions are the most probable ones. If not given, actions are sampled "
        "from the policy."
    )  # fmt: skip
    num_envs: int = option(16, "number of parallel environments.")


@command
class Explain(What):
    """Print the plan of an algorithm under a distribution policy: programs, placements and transfers."""

    devices: tuple[str, ...] = option(
        (), "plan for these devices, whether or not they are there: tpu:v5e:8x8, gpu:h100:8 or cpu:8. Several are compared in "
        "a table."
    )  # fmt: skip
    envs_per_device: int | None = option(None, "environments for each of these devices, instead of num_envs.")
    beside: tuple[str, ...] = option((), "other distribution policies; a table compares their plans.")
    seeds: int = option(1, "number of runs to train at once.")
    out: Path | None = option(None, "write pictures of the plans: a page, FILE.html, or one plan, FILE.svg.")


@command
class Bench(Command):
    """Measure steps, updates and, where the host drives the loop, its time per instruction, over a grid of several values."""

    algo: tuple[str, ...] = option(("ppo",), "names of algorithms; the fields that all their configs have are flags too.")
    env: tuple[str, ...] = option(("CartPole-v1",), "environments, each NAME or NAME:param=value,...")
    env_params: str | None = option(
        None, "parameters of the environment as data, such as length=uniform:0.25:1,gravity=9.8; drawn in every episode."
    )
    policy: tuple[str, ...] = option(("GPUOnly",), "distribution policies, each NAME or NAME:param=value,...")
    num_envs: PerAlgorithm = option((), "numbers of environments.")
    unroll_length: PerAlgorithm = option((), "lengths of an unroll.")
    repeats: int = option(3, "timed runs per setting; the median counts.")
    seconds: float = option(1.0, "approximate length of a timed run.")
    against: Literal["jit"] | None = option(
        None, "compare with the same iteration in a plain jax.jit(jax.lax.scan(...)); the timed runs alternate."
    )


@command
class Profile(What):
    """Measure where the time of training goes: simulation, inference, learning, transfers, Python, and every fragment."""

    run: Path | None = option(
        None, "folder of a run, whose training is measured in place of --algo and --env; reports about it show the profile."
    )
    iterations: int | None = option(None, "iterations of each measurement; about two seconds if not given.")
    repeats: int = option(3, "measurements that calibrate, and as many that count.")
    out: Path | None = option(None, "a file: a figure, FILE.svg, the numbers, FILE.json, or the trace, FILE.trace.json.gz.")
    given: Annotated[frozenset[str], tyro.conf.Suppress] = frozenset()


@command
class Video(Again):
    """Show what a trained agent does: a film of greedy episodes."""

    out: Path = option(Path("video.gif"), "the file: .gif, .mp4 or .html")
    episodes: int = option(1, "number of episodes, one after another.")
    max_steps: int = option(1000, "steps after which an episode is cut.")
    fps: float | None = option(None, "pictures per second; those of the environment if not given.")
    checkpoint: Literal["newest", "best"] | int = option(
        "newest", "newest, best, or the iterations after which it was written."
    )


@command
class Export(Command):
    """Write the policy of a run to one file that acts without this package: a program for jax.export, or an ONNX model."""

    run: tyro.conf.Positional[Path] = option(doc="folder of a run.")
    file: tyro.conf.Positional[Path] = option(doc="the file: policy.jaxexport or policy.onnx")
    member: int | None = option(None, "number of the member, in a run of several; the best one if not given.")
    checkpoint: Literal["newest", "best"] | int = option(
        "newest", "newest, best, or the iterations after which it was written."
    )
    sample: bool = option(False, "sample actions, by the data of a key; the most probable ones if not given.")
    batch: int | None = option(None, "observations per call; any number if not given.")


@command
class Report(Command):
    """Write a page about runs: returns and curves of each setting, what they differ in, times, and how to repeat each."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = option(doc="folders of runs.")
    out: Path = option(Path("report.html"), "the page, one file that loads nothing.")
    metrics: tuple[str, ...] = option((), "columns of the histories to draw; returns if not given.")
    title: str | None = option(None, "its title.")
    plans: bool = option(False, "draw the plan of each run; it needs as many devices as the run had (--cpu-devices).")


@command
class Plot(Command):
    """Draw a curve for each setting of each run with its interval over seeds, as a figure for a paper."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = option(doc="folders of runs.")
    out: Path = option(Path("curves.pdf"), "the figure: .pdf, .svg or .png")
    metrics: tuple[str, ...] = option((), "columns of the histories to draw; returns if not given.")
    x: Literal["steps", "time"] = option("steps", "draw against steps, or against seconds of training.")


@command
class Reproduce(Command):
    """Train recipes on several seeds, and say whether their scores agree with the recorded ones."""

    names: tyro.conf.Positional[tuple[str, ...]] = option((), doc="names of recipes, or patterns such as 'ppo-*'.")
    seeds: int | None = option(None, "number of seeds; as many as the record has if not given, or 10.")
    seed: int | None = option(None, "the first seed; that of the record if not given.")
    policy: str | None = option(None, "distribution policy; as in train.")
    records: Path | None = option(None, "folder of the records; benchmarks/records of the clone if not given.")
    out: Path = option(Path("reproduced"), "folder in which each recipe has one, with which the same command goes on.")
    time_limit: str | None = option(
        None, "time after which what runs is saved and ends, such as 5h50m; the exit code is then 75."
    )
    update: bool = option(False, "write the new records to the folder of the records, in place of those there.")
    pages: Path | None = option(None, "folder to write the pages of all records to; names may then be left out.")
    progress: Progress = option("auto", "kind of progress display on stderr.")


@command
class Copy:
    """Copy the file of an algorithm under a new name, to change it; `--algo FILE` then trains it."""

    algorithm: tyro.conf.Positional[str] = option(doc="name of the algorithm (see `msrl-jax list`), or a file of one.")
    file: tyro.conf.Positional[Path] = option(doc="a new file, such as my_ppo.py, after which the copy is named.")


@command
class List:
    """List the algorithms, environments, distribution policies, and the suites of environments that can be installed."""

    recipes: bool = option(False, "the recipes instead, with what they reach.")
    records: Path | None = option(None, "with --recipes, folder of the records; benchmarks/records of the clone if not given.")
    envs: bool = option(False, "only the environments and their suites.")
    json: bool = option(False, "print the names as one line of JSON instead.")


@command
class CheckEnv(Command):
    """Try an environment out with random actions, and say where it breaks the protocol."""

    env: tyro.conf.Positional[str] = option(doc="NAME or NAME:param=value,...; one of your own is MODULE:CLASS.")
    steps: int = option(200, "steps of each copy.")
    num_envs: int = option(4, "number of copies.")
    seed: int = option(0, "seed of keys and actions.")
