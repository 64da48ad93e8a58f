"""The commands of the command line and their options; the text of a class is what `--help` shows."""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

PerAlgorithm = Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint="(default: each algorithm's own)")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Where:
    """The devices of a command.

    Attributes:
      cpu_devices: compute on this many virtual CPU devices.
    """

    cpu_devices: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class What(Where):
    """What a command runs.

    Attributes:
      algo: name of the algorithm (see `msrl-jax list`) or MODULE:CLASS; the fields of its config are flags too.
      env: environment, NAME or NAME:param=value,...
      env_params: parameters of the environment as data, such as length=uniform:0.25:1,gravity=9.8; drawn in every episode.
      policy: distribution policy, NAME or NAME:param=value,... such as SingleLearnerCoarse:learners=2,staleness=1;
        GPUOnly if not given, or MultiLearner if the host simulates the environment.
      json: print the outcome as one line of JSON, the last on stdout.
    """

    algo: str = "ppo"
    env: str = "CartPole-v1"
    env_params: str | None = None
    policy: str | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Again(Where):
    """What a command does with the agent of a run.

    Attributes:
      run: folder of a run.
      seed: the seed of all randomness.
      member: number of the member, in a run of several; the best one if not given.
      env_params: the same with other parameters of the environment, such as length=1.5; those of the run if not given.
      json: print the outcome as one line of JSON, the last on stdout.
    """

    run: tyro.conf.Positional[Path]
    seed: int = 0
    member: int | None = None
    env_params: str | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train(What):
    """Train an agent; with no arguments, PPO on CartPole-v1.

    Attributes:
      total_steps: environment steps per seed.
      seed: the seed of all randomness.
      seeds: number of runs to train at once, with the seeds seed, seed + 1, ...
      pbt: train a population, such as members=8,every=20,learning_rate=log_uniform:1e-5:1e-2; members copy better ones.
      out: folder of the run; runs/<algo>-<env>-<policy>-<seed>-<time> if not given.
      resume: go on with the run in the folder, or start it if there is none. Its settings need not be given again; policy and
        devices may change (give cpu_devices again), and more total_steps extend it.
      chunk: iterations between two updates of the progress display; they grow to about a second if not given.
      eval_episodes: episodes per greedy evaluation; 0 never evaluates.
      eval_every: environment steps between evaluations; if not given, there is one evaluation at the end.
      checkpoint_every: steps between checkpoints, or their time such as 10m; about a minute if not given.
      keep_checkpoints: number of checkpoints to keep, besides the best one.
      time_limit: time after which the run is saved and ends, such as 5h50m; the exit code is then 75.
      guard: what to do about nan and infinities: halt, skip (drop the update), rollback (to the last good state, with half
        the learning rate) or ignore; halt if not given.
      record: file for a data set of all environment steps, such as experience.npz
      tensorboard: also log to TensorBoard, in the run's folder.
      wandb: also log to Weights & Biases, in the project with this name.
      progress: kind of progress display on stderr.
      processes: start this many processes on this machine; each has one CPU device, or --cpu-devices.
      distributed: this is one of the processes of a cluster, which JAX finds by itself: SLURM, Open MPI, GKE, a TPU pod.
    """

    total_steps: int = 500_000
    seed: int = 0
    seeds: int = 1
    pbt: str | None = None
    out: Path | None = None
    resume: bool = False
    chunk: int | None = None
    eval_episodes: int = 32
    eval_every: int | None = None
    checkpoint_every: str | None = None
    keep_checkpoints: int = 2
    time_limit: str | None = None
    guard: Literal["halt", "skip", "rollback", "ignore"] = "halt"
    record: Path | None = None
    tensorboard: bool = False
    wandb: str | None = None
    progress: Literal["auto", "bar", "lines", "none"] = "auto"
    processes: int | None = None
    distributed: bool = False
    given: Annotated[frozenset[str], tyro.conf.Suppress] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep(What):
    """Train many settings of an algorithm, side by side, and rank them.

    A flag of the config that takes a number takes several, such as 1e-4,3e-4, uniform:0.9:1 or log:1e-4:1e-2; one of words
    or sequences does too, such as --activation tanh,relu --hidden-sizes 64 64,128.

    Attributes:
      num: number of trials; of a grid, the points of each field between bounds.
      method: how trials are chosen; grid takes all combinations, optuna asks Optuna's TPE sampler.
      total_steps: environment steps of every member.
      seed: the seed of the choice of trials, and the first seed of each.
      seeds: members of each trial, with the seeds seed, seed + 1, ...
      out: folder of the sweep; sweeps/<algo>-<env>-<method>-<seed>-<time> if not given.
      resume: go on with the sweep in the folder, or start it if there is none; give the same options.
      halving: successive halving with this factor: the best 1/FACTOR of the trials go on for FACTOR times as many steps.
      rungs: number of comparisons of successive halving; as many as leave one trial if not given.
      min_steps: steps up to the first comparison, in place of rungs.
      members_at_once: members that are trained side by side; as many as memory holds if not given.
      eval_episodes: greedy episodes of each member, whose mean return ranks it; 0 takes the training return.
      checkpoint_every: steps between checkpoints of a run, or their time such as 10m; about a minute if not given.
      time_limit: time after which the sweep is saved and ends, such as 5h50m; the exit code is then 75.
      plot: file for a figure, such as sweep.png
      progress: kind of progress display on stderr.
    """

    SWEEPS: ClassVar[bool] = True

    num: int | None = None
    method: Literal["random", "grid", "sobol", "optuna"] = "random"
    total_steps: int = 500_000
    seed: int = 0
    seeds: int = 1
    out: Path | None = None
    resume: bool = False
    halving: int | None = None
    rungs: int | None = None
    min_steps: int | None = None
    members_at_once: int | None = None
    eval_episodes: int = 32
    checkpoint_every: str | None = None
    time_limit: str | None = None
    plot: Path | None = None
    progress: Literal["auto", "bar", "lines", "none"] = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compete(What):
    """Work on a leaderboard: draw a member, train it for a round, put back what is better. Any number of workers may.

    Attributes:
      leaderboard: folder of the leaderboard, which is made if there is none.
      round_steps: environment steps of a round.
      total_steps: environment steps after which a member is trained no further, and over which schedules go.
      rounds: rounds of this worker; it does not end if not given.
      time_limit: time after which this worker ends, such as 5h50m.
      target: the worker ends when the best score is as high.
      fresh: probability of a new member in place of a drawn one.
      size: largest number of members; that of the board, or 8, if not given.
      seed: the seed of this worker's draws; another one each time if not given.
      eval_episodes: episodes of an evaluation.
      progress: auto, bar, lines or none.
    """

    leaderboard: tyro.conf.Positional[Path]
    round_steps: int = 100_000
    total_steps: int = 10_000_000
    rounds: int | None = None
    time_limit: str | None = None
    target: float | None = None
    fresh: float = 0.2
    size: int | None = None
    seed: int | None = None
    eval_episodes: int = 64
    progress: Literal["auto", "bar", "lines", "none"] = "lines"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Again):
    """Play greedy episodes with a trained agent.

    Attributes:
      episodes: number of episodes.
      checkpoint: newest, best, or the number of iterations after which it was written.
      max_steps: maximum length of an episode, in steps.
    """

    episodes: int = 128
    checkpoint: Literal["newest", "best"] | int = "newest"
    max_steps: int = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record(Again):
    """Let a trained agent act, and write its steps to a data set.

    Attributes:
      steps: number of rows of the data set.
      out: file of the data set, such as medium.npz
      epsilon: probability of a random action; other actions are the most probable ones. If not given, actions are sampled
        from the policy.
      num_envs: number of parallel environments.
    """

    steps: int
    out: Path
    epsilon: float | None = None
    num_envs: int = 16


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
class Explain(What):
    """Print the plan of an algorithm under a distribution policy: programs, placements and transfers.

    Attributes:
      devices: plan for these devices, whether or not they are there: tpu:v5e:8x8, gpu:h100:8 or cpu:8. Several are compared
        in a table.
      envs_per_device: environments for each of these devices, instead of num_envs.
      seeds: number of runs to train at once.
    """

    devices: tuple[str, ...] = ()
    envs_per_device: int | None = None
    seeds: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench(Where):
    """Measure steps, updates and, where the host drives the loop, its time per instruction, over a grid of several values.

    Attributes:
      algo: names of algorithms; the fields that all their configs have are flags too.
      env: environments, each NAME or NAME:param=value,...
      env_params: parameters of the environment as data, such as length=uniform:0.25:1,gravity=9.8; drawn in every episode.
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
    env_params: str | None = None
    policy: tuple[str, ...] = ("GPUOnly",)
    num_envs: PerAlgorithm = ()
    unroll_length: PerAlgorithm = ()
    repeats: int = 3
    seconds: float = 1.0
    against: Literal["jit"] | None = None
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class List:
    """List the algorithms, environments, distribution policies, and the suites of environments that can be installed.

    Attributes:
      envs: only the environments and their suites.
      json: print the names as one line of JSON instead.
    """

    envs: bool = False
    json: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckEnv(Where):
    """Try an environment out with random actions, and say where it breaks the protocol.

    Attributes:
      env: NAME or NAME:param=value,...; one of your own is MODULE:CLASS.
      steps: steps of each copy.
      num_envs: number of copies.
      seed: seed of keys and actions.
      json: print the report as one line of JSON, the last on stdout.
    """

    env: tyro.conf.Positional[str]
    steps: int = 200
    num_envs: int = 4
    seed: int = 0
    json: bool = False
