"""What PPO learns on tasks of Brax and MuJoCo Playground: here, and by the trainer that both suites use, Brax's own.

    pip install '.[brax,playground]'
    python3.11 -m venv /tmp/brax && /tmp/brax/bin/pip install 'jax[cpu]==0.8.3' brax playground
    python benchmarks/suite_trainers.py --brax /tmp/brax/bin/python \\
        --json benchmarks/results/suite_trainers.json --docs benchmarks/README.md

Both train with equal sizes and for equally many environment steps. Seeds take turns, each in a separate run that compiles
again; Brax's run in a separate process, because its trainer needs an older JAX. Compared are the mean return of 128 greedy
episodes after training, and the seconds of the whole run.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from comparison import Peer, chosen, in_turns, machine, merge, our_versions, rewrite, spread, versions_of

import msrl_jax as msrl
from msrl_jax.report.provenance import commit

SHARED = {
    "num_envs": 128,
    "unroll_length": 32,
    "num_minibatches": 4,
    "num_epochs": 4,
    "hidden_sizes": (64, 64),
    "activation": "silu",
    "discount": 0.99,
    "gae_lambda": 0.95,
    "clip_ratio": 0.2,
    "entropy_coef": 1e-3,
    "max_grad_norm": 0.5,
    "normalize_observations": True,
    "learning_rate": 1e-3,
}


@dataclasses.dataclass(frozen=True)
class Task:
    """What both train.

    Attributes:
      env: the name here.
      total_steps: environment steps of a run.
      settings: of both, by the names of msrl_jax's config.
      reward_scaling: what Brax multiplies rewards by; here, the critic learns values over their size.
      episodes: greedy episodes after training.
    """

    env: str
    total_steps: int
    settings: dict[str, Any]
    reward_scaling: float = 1.0
    episodes: int = 128

    @property
    def label(self) -> str:
        """The name of the environment."""
        return self.env


TASKS = [
    Task("brax:inverted_pendulum", 204_800, SHARED),
    Task("playground:CartpoleBalance", 409_600, SHARED, reward_scaling=10.0),
]


def ours(task: Task, seed: int) -> dict[str, float]:
    """One run of msrl_jax: the greedy return and the seconds of all of it."""
    start = time.perf_counter()
    result = msrl.train(
        "ppo", task.env, total_steps=task.total_steps, seed=seed, eval_episodes=task.episodes, progress=False, **task.settings
    )
    seconds = time.perf_counter() - start
    assert result.evaluation is not None
    greedy, steps = float(result.evaluation.means["eval_return"]), int(result.history["step"][-1])
    return {"return": greedy, "steps": steps, "seconds": seconds}


def compare(task: Task, command: Sequence[str | Path], seeds: Sequence[int]) -> dict[str, Any]:
    """A row of the record: the alternating runs of both."""
    with Peer(command, task) as peer:
        runs = in_turns(task.label, {"ours": lambda seed: ours(task, seed), "theirs": peer.ask}, seeds)
        about = {"commit": commit(), "peer_versions": peer.about["versions"]}
    return {"label": task.label, **dataclasses.asdict(task)} | runs | about


def tables(record: Mapping[str, Any]) -> str:
    """The record as Markdown."""
    lines = [
        "| task | steps | learning rate | return, msrl_jax | return, Brax's PPO | seconds, msrl_jax | seconds, Brax's PPO |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in record["rows"]:
        cells = [
            spread([run[of] for run in row[who]], form)
            for of, form in (("return", ",.0f"), ("seconds", ",.0f"))
            for who in ("ours", "theirs")
        ]
        steps = f"{np.median([run['steps'] for run in row['ours']]):,.0f}"
        lines.append(f"| {row['label']} | {steps} | {row['settings']['learning_rate']:g} | {' | '.join(cells)} |")
    about = record["machine"]
    versions = versions_of(record, "Brax")
    seeds = len(record["rows"][0]["ours"])
    note = (
        f"Medians of the seeds 0 to {seeds - 1}, with the least and the greatest. {about['cores']} cores of {about['cpu']}, "
        f"commit {', '.join(sorted({row['commit'] for row in record['rows']}))}. {versions}."
    )
    return "\n".join([*lines, "", note])


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, trains, and writes the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brax", required=True, help="the Python of an environment with Brax")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="train the tasks with a WORD in their name")
    parser.add_argument("--seeds", type=int, default=5, help="seeds from 0 up")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args(argv)
    record: dict[str, Any] = {"peer": "Brax's PPO", "machine": machine(), "versions": our_versions(), "rows": []}
    try:
        selected = chosen(TASKS, args.only)
        if args.seeds < 1:
            raise ValueError(f"--seeds {args.seeds}: use 1 or more")
        if args.json.exists():
            record = merge(json.loads(args.json.read_text()), record)
    except ValueError as error:
        parser.error(str(error))
    command = [args.brax, Path(__file__).with_name("brax_worker.py")]
    for task in selected:
        record = merge(record, record | {"rows": [compare(task, command, range(args.seeds))]})
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "suite_trainers", tables(record)))
    print(tables(record))


if __name__ == "__main__":
    main()
