"""Benchmarks: environment steps and learner updates per second without compilation, as the median of repeated runs."""

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.measure import dispatch_time
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.program import Program
from msrl_jax.fragments.runtime.cpu_lowering import lower_jitted
from msrl_jax.fragments.support.terminal import paragraph, table
from msrl_jax.policies import get as get_policy
from msrl_jax.policies.helpers import policy_text
from msrl_jax.run.disk.folder import describe_devices
from msrl_jax.run.evaluation.history import first_non_finite
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.prepare import make_experiment

_CHUNK_SECONDS = 0.25  # long enough to hide the host's work between chunks, short enough for slow settings


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The training speed of one setting."""

    algorithm: str
    env: str
    policy: str
    platform: str
    devices: int  # in use
    num_envs: int
    unroll_length: int  # steps of every environment per iteration
    compile_seconds: float  # to trace and compile the initial state and the first chunk, or to load them from disk
    steps_per_second: float  # environment steps per second, median of `runs`
    updates_per_second: float  # gradient steps per second at that rate, skipped steps (`target_kl`) included
    runs: tuple[float, ...]  # environment steps per second of every timed run
    # The same for the plain `jax.jit(jax.lax.scan(...))`, in the order of `runs`; None if not measured.
    jit_steps_per_second: float | None = None
    jit_runs: tuple[float, ...] = ()
    ratio: float | None = None  # `steps_per_second / jit_steps_per_second`
    # Floating point operations and bytes accessed in one iteration, from XLA's cost analysis, and those of the plain program;
    # None if the policy does not fuse the loop.
    flops: float | None = None
    jit_flops: float | None = None
    bytes: float | None = None
    jit_bytes: float | None = None
    # Programs, transfers and allocations that the host dispatches per iteration. Then times: host processor time per
    # instruction, the part of it outside of JAX calls, and the time of one call of a jitted function, averaged over the
    # programs. All are None if the policy fuses the loop.
    instructions: int | None = None
    instruction_microseconds: float | None = None
    python_microseconds: float | None = None
    call_microseconds: float | None = None

    def __str__(self) -> str:
        place = f"{self.policy} on {self.devices} {self.platform} device{'s' * (self.devices > 1)}"
        setting = f"{self.algorithm} {self.env}, {self.num_envs} envs x {self.unroll_length} steps"
        ratio = "" if self.ratio is None else f", {self.ratio:.3f} x jax.jit"
        rates = f"{self.steps_per_second:,.0f} steps/s, {_format_rate(self.updates_per_second)} updates/s"
        dispatch = (
            ""
            if self.instructions is None
            else (
                f"; dispatch: {self.instructions} instructions per iteration, {self.instruction_microseconds:.0f} us each, of "
                f"which Python {self.python_microseconds:.0f} us (a jitted call: {self.call_microseconds:.0f} us)"
            )
        )
        return f"{setting}, {place}: {rates} (compile {self.compile_seconds:.1f} s){ratio}{dispatch}"


class Runner:
    """Trains in this process in chunks of iterations; every call resumes where the last one ended."""

    def __init__(self, step: Callable[[PyTree], PyTree], state: PyTree, steps: int):
        """Runs two chunks of `steps` environment steps: one to compile and warm up, and one to measure their length."""
        self._step, self._state, self._steps = step, state, steps
        self._run_chunks(1)
        self.rate = self._run_chunks(1)

    def _run_chunks(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            self._state = self._step(self._state)
        jax.block_until_ready(self._state)
        return count * self._steps / (time.perf_counter() - start)

    def run(self, seconds: float) -> float:
        """Runs whole chunks for about `seconds` and returns environment steps per second."""
        return self._run_chunks(max(1, round(seconds * self.rate / self._steps)))


def interleave(runners: Sequence[Runner], seconds: float, repeats: int) -> list[tuple[float, ...]]:
    """Calls `run(seconds)` of each runner in `repeats` rounds; returns their results, steps per second.

    Reverses the order in every other round, so that changes in the speed of the machine affect all runners.
    """
    rates: list[list[float]] = [[] for _ in runners]
    for repeat in range(repeats):
        for i in range(len(runners))[:: -1 if repeat % 2 else 1]:
            rates[i].append(runners[i].run(seconds))
    return [tuple(r) for r in rates]


def program_runner(experiment: Experiment, program: Program, chunk: int) -> Runner:
    """Makes a runner of a compiled program, with `chunk` iterations per chunk."""
    steps = experiment.steps_per_iteration * experiment.members
    iterations_done = 0

    def step(state):
        nonlocal iterations_done
        state, metrics = program.run(state, chunk, chunk=chunk, donate=True)
        if non_finite := first_non_finite(metrics):
            metric, offset, _ = non_finite
            raise FloatingPointError(
                f"{experiment.name} on {experiment.env_name}: {metric!r} is not finite in iteration "
                f"{iterations_done + offset + 1}, so there is nothing to measure. Use a smaller "
                "learning rate; msrl-jax train says where it comes from"
            )
        iterations_done += chunk
        return state

    return Runner(step, experiment.start(program), chunk * steps)


def plain_program(experiment: Experiment, program: Program, iterations: int) -> tuple[jax.stages.Compiled, PyTree]:
    """Compiles the same iterations as a plain `jax.jit(jax.lax.scan(...))` with donated inputs; also returns its state."""
    iteration = experiment.agent.iteration
    scan = jax.jit(lambda s: jax.lax.scan(lambda s, _: iteration(s), s, None, iterations), donate_argnums=0)
    state = program.unwrap(experiment.start(program))
    # Use the same random generator, so that the difference is the cost of fragments.
    return lower_jitted(scan, state)(), state


def plain_runner(experiment: Experiment, program: Program, chunk: int) -> Runner:
    """Makes a runner of the plain program; it also reads the metrics of each chunk."""
    compiled, state = plain_program(experiment, program, chunk)

    def step(state):
        state, metrics = compiled(state)
        jax.device_get(metrics)
        return state

    return Runner(step, state, chunk * experiment.steps_per_iteration * experiment.members)


def calibrated_chunk(experiment: Experiment, program: Program) -> int:
    """Returns a number of iterations per chunk that hides the host's work between chunks."""
    rate = program_runner(experiment, program, 1).run(_CHUNK_SECONDS)
    return max(1, round(_CHUNK_SECONDS * rate / (experiment.steps_per_iteration * experiment.members)))


def measure(
    experiment: Experiment,
    policy: DistributionPolicy,
    *,
    repeats: int,
    seconds: float,
    against: Literal["jit"] | None,
    devices: Sequence[Device] | None,
    note: Callable[[str | Measurement], object],
) -> Measurement:
    """Measures one setting; see `bench` for the other arguments."""
    program, agent = experiment.compile(policy, devices), experiment.behavior.agent
    num_envs, unroll_length = agent.env.num_envs, agent.steps_per_iteration // agent.env.num_envs
    setting = f"{experiment.name} {experiment.env_name}, {num_envs} envs x {unroll_length} steps"
    note(f"compiling {setting}, {policy_text(policy)} ...")
    chunk = calibrated_chunk(experiment, program)
    compile_seconds = program.compile_seconds
    runners = [program_runner(experiment, program, chunk)]
    if against == "jit":
        runners.append(plain_runner(experiment, program, chunk))
    note(f"measuring {repeats} runs of about {seconds:g} s{' and the same number of jax.jit' if against else ''} ...")
    runs, *plain_runs = interleave(runners, seconds, repeats)
    used_devices, rate = describe_devices(program.devices), statistics.median(runs)
    about = {
        "algorithm": experiment.name,
        "env": experiment.env_name,
        "policy": policy_text(policy),
        "platform": used_devices["platform"],
        "devices": used_devices["count"],
        "num_envs": num_envs,
        "unroll_length": unroll_length,
        "compile_seconds": compile_seconds,
        "steps_per_second": rate,
        "updates_per_second": rate * agent.updates_per_iteration / agent.steps_per_iteration,
        "runs": runs,
    }
    if dispatch := dispatch_time(program, experiment.start(program)):
        about |= {
            "instructions": dispatch.instructions,
            "instruction_microseconds": dispatch.microseconds,
            "python_microseconds": dispatch.python_microseconds,
            "call_microseconds": dispatch.call_microseconds,
        }
    if plain_runs:
        # XLA counts the body of a loop once and removes a loop of length 1.
        plain = plain_program(experiment, program, 2)[0].cost_analysis() or {}
        fused = (program.compiled(2)[0].cost_analysis() or {}) if program.is_fused else {}
        jit_rate = statistics.median(plain_runs[0])
        about |= {
            "jit_steps_per_second": jit_rate,
            "jit_runs": plain_runs[0],
            "ratio": rate / jit_rate,
            "flops": fused.get("flops"),
            "jit_flops": plain.get("flops"),
            "bytes": fused.get("bytes accessed"),
            "jit_bytes": plain.get("bytes accessed"),
        }
    return Measurement(**about)


def bench(
    algo: Sequence[Any] = ("ppo",),
    env: Sequence[Any] = (),
    policy: Sequence[str | DistributionPolicy] = ("GPUOnly",),
    num_envs: Sequence[int] = (),
    unroll_length: Sequence[int] = (),
    *,
    repeats: int = 3,
    seconds: float = 1.0,
    against: Literal["jit"] | None = None,
    devices: Sequence[Device] | None = None,
    note: Callable[[str | Measurement], object] = lambda line: None,
    **overrides: Any,
) -> list[Measurement]:
    """Measures environment steps and learner updates per second over a grid of settings, in this process.

    Args:
      algo: algorithms, each as in `train`, or experiments.
      env: environments, each as in `train`; that of each experiment, or `"CartPole-v1"`, if empty.
      policy: distribution policies, or their names.
      num_envs: numbers of environments; each algorithm's default if empty.
      unroll_length: unroll lengths; each algorithm's default if empty.
      repeats: timed runs per setting; the result is their median.
      seconds: approximate length of a timed run.
      against: "jit" compares with a plain `jax.jit(jax.lax.scan(...))` of the same iteration; the timed runs alternate.
      devices: the devices for the policies; all if None.
      note: called with a line of text before a setting is compiled, and before it is timed, and with each measurement.
      **overrides: arguments of `train` that determine what is computed, such as `seeds`; and other fields of the configs.

    Returns:
      One measurement per combination.

    Raises:
      ValueError: if a combination is invalid, before the first measurement.
    """
    if repeats < 1 or not 0 < seconds < math.inf:
        raise ValueError(f"{repeats=} must be at least 1 and {seconds=} a number above 0")
    for name, values in {"algo": algo, "policy": policy}.items():
        if not values:
            raise ValueError(f"{name} is empty, so there is nothing to measure; name at least one")
    grid_sizes = {"num_envs": num_envs, "unroll_length": unroll_length}
    sizes = [
        dict(pairs)
        for pairs in itertools.product(*([(name, value) for value in values] for name, values in grid_sizes.items() if values))
    ]
    grid = [
        (make_experiment(algorithm, environment, **overrides | size), get_policy(policy_name))
        for algorithm, environment, policy_name, size in itertools.product(algo, env or (None,), policy, sizes)
    ]
    for experiment, _ in grid:
        if experiment.algorithm.offline:
            raise ValueError(
                f"algorithm {experiment.name!r} steps no environment, so it has no environment steps per second; its runs "
                "report updates per second (Result.steps_per_second)"
            )
    for experiment, place in grid:
        experiment.compile(place, devices)
    measurements = []
    for experiment, place in grid:
        measurement = measure(experiment, place, repeats=repeats, seconds=seconds, against=against, devices=devices, note=note)
        measurements.append(measurement)
        note(measurement)
    return measurements


def format_table(measurements: Sequence[Measurement]) -> str:
    """Formats measurements as a table that fits the terminal; shared settings are above the table."""
    compared = any(m.ratio is not None for m in measurements)
    driven = any(m.instructions is not None for m in measurements)
    rows: list[dict[str, str]] = []
    for m in measurements:
        rows.append(
            {
                "algorithm": m.algorithm,
                "env": m.env,
                "policy": m.policy,
                "devices": f"{m.devices} {m.platform}",
                "envs": str(m.num_envs),
                "unroll": str(m.unroll_length),
                "steps/s": f"{m.steps_per_second:,.0f}",
                "updates/s": _format_rate(m.updates_per_second),
                "spread": f"{(max(m.runs) - min(m.runs)) / m.steps_per_second:.0%}",
                "compile s": f"{m.compile_seconds:.1f}",
            }
        )
        if driven:
            rows[-1]["instructions"] = "one program" if m.instructions is None else str(m.instructions)
            times = (m.instruction_microseconds, m.python_microseconds, m.call_microseconds)
            for name, us in zip(("us each", "us Python", "us/call"), times, strict=True):
                rows[-1][name] = "-" if us is None else f"{us:.1f}"
        if compared:
            rows[-1] |= {
                "jit steps/s": "-" if m.jit_steps_per_second is None else f"{m.jit_steps_per_second:,.0f}",
                "ratio": "-" if m.ratio is None else f"{m.ratio:.3f}",
                "FLOPs": _format_ratio(m.flops, m.jit_flops),
                "bytes": _format_ratio(m.bytes, m.jit_bytes),
            }
    settings = ("env", "policy", "devices", "envs", "unroll")
    shared_names = [name for name in settings if len({row[name] for row in rows}) == 1]
    head = [name for name in rows[0] if name not in shared_names]
    shared_lines = paragraph(", ".join(f"{name} {rows[0][name]}" for name in shared_names))
    return "\n".join([*shared_lines, *table(head, [[row[name] for name in head] for row in rows])])


def _format_rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _format_ratio(ours: float | None, plain: float | None) -> str:
    return f"{ours / plain:.3f} x" if ours and plain else "-"
