"""Compares training speed, and the time to a return, with Ray RLlib on the same processor, with equal settings.

    python3.11 -m venv /tmp/rllib
    /tmp/rllib/bin/pip install 'ray[rllib]==2.60.0' torch==2.14.1 'gymnasium[mujoco]==1.2.2'
    python benchmarks/compare_rllib.py --rllib /tmp/rllib/bin/python \\
        --json benchmarks/results/rllib.json --docs benchmarks/README.md

They alternate: msrl_jax with the environment on the device (where JAX has it), msrl_jax with Gymnasium's environment on the
host, and RLlib with Gymnasium's. `--returns 0` measures no times to a return, and `--repeats 0` no steps per second;
what the record has of them stays.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from comparison import Peer, Setting, chosen, in_turns, machine, merge, our_versions, rewrite, spread, versions_of

import msrl_jax as msrl
from msrl_jax.fragments.program import Program
from msrl_jax.report.bench import calibrated_chunk, interleave, program_runner
from msrl_jax.report.provenance import commit
from msrl_jax.run import Experiment
from msrl_jax.run.prepare import make_experiment

DEVICE, HOST, PEER = "msrl_jax, on the device", "msrl_jax, Gymnasium", "Ray RLlib, Gymnasium"
COLUMNS = (DEVICE, HOST, PEER)
SHARED = {
    "num_envs": 16,
    "hidden_sizes": (64, 64),
    "activation": "tanh",
    "shared_torso": False,
    "discount": 0.99,
    "value_coef": 0.5,
    "entropy_coef": 0.01,
    "learning_rate": 3e-3,
}
PPO = SHARED | {
    "unroll_length": 128,
    "num_epochs": 4,
    "num_minibatches": 8,
    "gae_lambda": 0.95,
    "clip_ratio": 0.2,
    "max_grad_norm": 0.5,
}
IMPALA = SHARED | {"unroll_length": 32, "max_grad_norm": 40.0}
OURS = {"ppo": {"normalize_values": False}, "impala": {"optimizer": "adam", "epsilon": 1e-8, "vtrace_lambda": 1.0}}
SETTINGS = [
    Setting("ppo", "gymnasium:CartPole-v1:num_workers=1", PPO, only_ours=OURS["ppo"]),
    Setting("impala", "gymnasium:CartPole-v1:num_workers=1", IMPALA | {"learning_rate": 1e-3}, only_ours=OURS["impala"]),
    Setting("ppo", "gymnasium:HalfCheetah-v5", PPO | {"learning_rate": 3e-4, "entropy_coef": 0.0}, only_ours=OURS["ppo"]),
]
TARGETS = {"gymnasium:CartPole-v1:num_workers=1": 475.0, "gymnasium:HalfCheetah-v5": 250.0}
IN_JAX = {"gymnasium:CartPole-v1:num_workers=1": "CartPole-v1"}
# The fastest of those tried on this machine; see the page.
OPTIONS: dict[str, Any] = {"runners": 0, "learners": 0, "vectorize": "sync", "threads": 1}

Row = Mapping[str, Any]


def made(setting: Setting, env: str, seed: int = 0) -> tuple[Experiment, Program]:
    """A setting of msrl_jax in one of the two environments, planned for one device."""
    experiment = make_experiment(setting.algo, env, **setting.config | setting.only_ours, seed=seed)
    policy = "MultiLearner" if env.startswith("gymnasium:") else "GPUOnly"
    return experiment, experiment.compile(msrl.policies.get(policy), jax.devices()[:1])


def environments(setting: Setting) -> dict[str, str]:
    """The environments of msrl_jax by column."""
    found = {HOST: setting.env}
    return {DEVICE: IN_JAX[setting.env]} | found if setting.env in IN_JAX else found


def peer(command: Sequence[str | Path], setting: Setting, *, continuing: bool) -> Peer:
    """A process of RLlib, which starts one run that continues, or none."""
    return Peer([*command, "--options", json.dumps(OPTIONS | {"continuing": continuing})], setting)


def speeds(setting: Setting, command: Sequence[str | Path], repeats: int, seconds: float) -> dict[str, Any]:
    """Environment steps per second by column, of all rounds, and the versions of RLlib."""
    with contextlib.ExitStack() as stack:
        runners: dict[str, Any] = {}
        for column, env in environments(setting).items():
            experiment, program = made(setting, env)
            runners[column] = program_runner(experiment, program, calibrated_chunk(experiment, program))
        runners[PEER] = other = stack.enter_context(peer(command, setting, continuing=True))
        load = os.getloadavg()[0]
        runs = dict(zip(runners, interleave(list(runners.values()), seconds, repeats), strict=True))
        return {"runs": runs, "load": load, "peer_versions": other.about["versions"]}


def last_episodes(totals: np.ndarray, counts: np.ndarray, episodes: int = 100) -> float:
    """The mean return of whole iterations, the newest ones that hold at least so many episodes; nan if there are fewer.

    Args:
      totals: sum of the returns of the episodes that ended in an iteration, `[N]`.
      counts: number of these episodes, `[N]`.
      episodes: the least number of episodes.
    """
    ended = np.cumsum(counts[::-1])
    if not len(ended) or ended[-1] < episodes:
        return float("nan")
    first = int(np.searchsorted(ended, episodes)) + 1
    return float(totals[-first:].sum() / ended[first - 1])


def reach(
    experiment: Experiment, program: Program, target: float, max_steps: int, max_seconds: float, chunk: int = 1
) -> dict[str, Any]:
    """Trains from the start until the mean return of the last 100 episodes is at least `target`, or a limit is reached.

    The program is compiled before the clock starts.
    """
    start = time.perf_counter()
    program.run(experiment.start(program), chunk, chunk=chunk, donate=True)
    state, totals, counts = experiment.start(program), [], []
    begun, steps, found = time.perf_counter(), 0, float("nan")
    while not found >= target and steps < max_steps and time.perf_counter() - begun < max_seconds:
        state, metrics = program.run(state, chunk, chunk=chunk, donate=True)
        steps += chunk * experiment.steps_per_iteration
        totals.append(metrics["episode_return"].total)
        counts.append(metrics["episode_return"].count)
        found = last_episodes(np.concatenate(totals), np.concatenate(counts))
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "steps": steps, "return": found, "reached": found >= target, "start_seconds": begun - start}


def returns(setting: Setting, command: Sequence[str | Path], seeds: Sequence[int], limits: Mapping[str, Any]) -> dict[str, Any]:
    """The times to a return by column, for each seed; the order of the columns is reversed for every other seed."""
    target = TARGETS[setting.env]
    with peer(command, setting, continuing=False) as other:
        turns: dict[str, Callable[[int], dict[str, Any]]] = {}
        for column, env in environments(setting).items():
            turns[column] = lambda seed, env=env: reach(*made(setting, env, seed), target, **limits)
        turns[PEER] = lambda seed: other.ask(json.dumps({"seed": seed, "target": target} | dict(limits)))
        return {"returns": in_turns(setting.label, turns, seeds), "target": target, "peer_versions": other.about["versions"]}


def _ratios(own: Sequence[float], others: Sequence[float]) -> str:
    return spread([a / b for a, b in zip(own, others, strict=True)], ",.2f")


def _reached(runs: Sequence[Row], seconds: Sequence[float]) -> str:
    steps, start = (statistics.median(run[name] for run in runs) for name in ("steps", "start_seconds"))
    within = sum(run["reached"] for run in runs)
    return f"{spread(seconds, ',.2f')} after {start:.0f} to start; {steps / 1000:,.0f} k steps; {within} of {len(runs)}"


def tables(record: Mapping[str, Any]) -> str:
    """The tables of a record as Markdown, and what it was measured on."""
    rows = record["rows"]
    lines = [
        f"| steps/s | {' | '.join(COLUMNS)} | device : RLlib | host : RLlib | load |",
        "|---" + "|---:" * (len(COLUMNS) + 3) + "|",
    ]
    for row in (row for row in rows if "runs" in row):
        runs = row["runs"]
        cells = [spread(runs[c], ",.0f") if c in runs else "-" for c in COLUMNS]
        cells += [_ratios(runs[c], runs[PEER]) if c in runs else "-" for c in (DEVICE, HOST)]
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {row['load']:.1f} |")
    lines += [
        "",
        f"| seconds to the return | {' | '.join(COLUMNS)} | RLlib : device | RLlib : host |",
        "|---" + "|---:" * (len(COLUMNS) + 2) + "|",
    ]
    for row in (row for row in rows if "returns" in row):
        runs = row["returns"]
        seconds = {c: [run["seconds"] for run in runs[c]] for c in runs}
        cells = [_reached(runs[c], seconds[c]) if c in runs else "-" for c in COLUMNS]
        cells += [_ratios(seconds[PEER], seconds[c]) if c in runs else "-" for c in (DEVICE, HOST)]
        lines.append(f"| {row['label']}, {row['target']:g} | {' | '.join(cells)} |")
    about = record["machine"]
    versions = versions_of(record, "RLlib")
    note = (
        "Medians, with the least and the greatest: of rounds, and of seeds from 0 up. "
        f"{about['cores']} cores of {about['cpu']}, commit {', '.join(sorted({row['commit'] for row in rows}))}. {versions}."
    )
    return "\n".join([*lines, "", note])


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and writes the record and the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rllib", required=True, help="the Python of an environment with Ray RLlib")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="measure the settings with a WORD in their label")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of measuring steps per second")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate length of a round")
    parser.add_argument("--returns", type=int, default=5, help="seeds of times to a return, from 0 up")
    parser.add_argument("--max-steps", type=int, default=600_000, help="environment steps after which a run gives up")
    parser.add_argument("--max-seconds", type=float, default=90.0, help="time after which a run gives up")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the tables in this page")
    args = parser.parse_args(argv)
    try:
        selected = chosen(SETTINGS, args.only)
    except ValueError as error:
        parser.error(str(error))
    command = [args.rllib, Path(__file__).with_name("rllib_worker.py")]
    limits = {"max_steps": args.max_steps, "max_seconds": args.max_seconds}
    record: dict[str, Any] = {"peer": "Ray RLlib", "machine": machine(), "versions": our_versions(), "rows": []}
    if args.json.exists():
        try:
            record = merge(json.loads(args.json.read_text()), record)
        except ValueError as error:
            parser.error(f"{args.json}: {error}")
    for setting in selected:
        row: dict[str, Any] = {"label": setting.label, "setting": dataclasses.asdict(setting), "options": OPTIONS}
        row |= {"commit": commit(), "seconds": args.seconds, "limits": limits}
        if args.repeats:
            row |= speeds(setting, command, args.repeats, args.seconds)
        if args.returns and setting.env in TARGETS:
            row |= returns(setting, command, range(args.returns), limits)
        # What was not measured now stays as it was.
        row = next((old for old in record["rows"] if old["label"] == row["label"]), {}) | row
        record = merge(record, record | {"rows": [row]})
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "rllib", tables(record)))
    print(tables(record))


if __name__ == "__main__":
    main()
