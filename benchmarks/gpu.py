"""Measures training on one GPU, and writes its page: populations, single runs, recurrent cores, suites, and peers.

    python benchmarks/gpu.py --json benchmarks/results/gpu.json --docs benchmarks/README.md
    python benchmarks/gpu.py --only Breakout --rejax /tmp/rejax/bin/python --json gpu.json

Rows whose suite is not installed are named and left out. A peer is measured alternately, on the rows that it has, if its
Python is given; `compare_rejax.py` says how to install it. The rates exclude the time to compile, which has its own column.
Most of a run is compiling: with `--processes 12`, 12 processes compile at once, into the compilation cache of JAX,
before the rows are measured one by one.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import compare_rejax
import jax
from comparison import Setting, chosen, compare, machine, our_versions, rewrite

import msrl_jax as msrl
from msrl_jax.envs.suites import catalog
from msrl_jax.fragments.plan.text import size
from msrl_jax.report.bench import calibrated_chunk, program_runner
from msrl_jax.report.provenance import commit
from msrl_jax.run.prepare import make_experiment

PPO = compare_rejax.PPO | compare_rejax.OURS
MINATAR = PPO | {"activation": "relu", "num_envs": 64, "unroll_length": 128}
OFF_POLICY = {"num_envs": 128, "unroll_length": 1, "num_updates": 8, "batch_size": 256}
RECURRENT = {"core.size": 128, "hidden_sizes": (128,), "num_envs": 256, "unroll_length": 64, "num_minibatches": 4}
BRAX = {"num_envs": 2048, "unroll_length": 16, "num_minibatches": 8, "num_epochs": 4}
PBT = msrl.PBT(search={"learning_rate": msrl.envs.log_uniform(1e-5, 1e-2)}, every=20)


@dataclasses.dataclass(frozen=True)
class Row(Setting):
    """What is measured: a setting, or a population of this many members if `members` is not 0."""

    members: int = 0

    @property
    def label(self) -> str:
        """The label of the setting, and the members."""
        own = Setting(self.algo, self.env, self.config, self.seeds).label
        return own + f", PBT of {self.members} members" * (self.members > 0)

    @property
    def experiment(self) -> Any:
        """The experiment."""
        pbt = dataclasses.replace(PBT, members=self.members) if self.members else None
        config, options = self.config | self.only_ours, {} if pbt is None else {"pbt": pbt}
        config = {name: value for name, value in config.items() if pbt is None or name not in pbt.search}
        return make_experiment(self.algo, self.env, **config, seeds=self.seeds, total_steps=10**12, **options)


def _small(**fields: Any) -> dict[str, Any]:
    return PPO | {"num_envs": 4, "unroll_length": 128} | fields


ROWS = [
    *(Row("ppo", "CartPole-v1", _small(), seeds) for seeds in (1, 64, 2048)),
    *(Row("ppo", "Breakout-MinAtar", MINATAR, seeds) for seeds in (1, 16, 256)),
    *(Row("dqn", env, OFF_POLICY, seeds) for env in ("CartPole-v1", "Breakout-MinAtar") for seeds in (1, 50)),
    *(Row("sac", env, OFF_POLICY) for env in ("Pendulum-v1", "Breakout-MinAtar")),
    Row("td3", "Pendulum-v1", OFF_POLICY),
    Row("recurrent_ppo", "CartPole-v1", RECURRENT),
    Row("ppo", "craftax:Craftax-Symbolic-v1", PPO | {"num_envs": 1024, "unroll_length": 64, "hidden_sizes": (512, 512)}),
    Row("recurrent_ppo", "craftax:Craftax-Symbolic-v1", RECURRENT | {"num_envs": 1024}),
    Row("ppo", "brax:ant", BRAX),
    Row("ppo", "playground:CartpoleBalance", BRAX),
    Row("ppo", "playground:Go1JoystickFlatTerrain", BRAX),
    *(Row("ppo", "Pendulum-v1", _small(), members=members) for members in (2, 16, 256, 2048)),
    *(Row(s.algo, s.env, s.config, s.seeds, s.only_ours) for s in compare_rejax.SETTINGS),
]


def shrunk(row: Row) -> Row:
    """The same row with the smallest sizes, to try it out anywhere."""
    least = {"num_envs": 8, "unroll_length": 8, "num_minibatches": 2, "hidden_sizes": (8,), "core.size": 8, "batch_size": 8}
    least |= {"num_updates": 1, "num_epochs": 1, "replay.learning_starts": 16, "replay.capacity": 64}
    config = {name: least.get(name, value) for name, value in row.config.items()}
    if row.algo in ("dqn", "sac", "td3"):
        config["unroll_length"] = 1
    if isinstance(config.get("learning_rate"), list):
        config["learning_rate"] = config["learning_rate"][:2]
    return dataclasses.replace(row, config=config, seeds=min(row.seeds, 2), members=min(row.members, 4))


def missing(row: Row) -> str | None:
    """How to install the suite of a row's environment; None if it is there."""
    suite = catalog.suite_of(row.env)
    return suite.install if suite is not None and suite.version() is None else None


def measure(row: Row, repeats: int, seconds: float, peer: Sequence[str | Path] | None = None) -> dict[str, Any]:
    """Measures a row: steps per second, time to compile, memory, launches, and the least time that the plan predicts."""
    experiment = row.experiment
    program = experiment.compile(msrl.policies.get("GPUOnly"), jax.devices()[:1])
    chunk = calibrated_chunk(experiment, program)
    runner = program_runner(experiment, program, chunk)
    runs = [runner.run(seconds) for _ in range(repeats)]
    plan, steps = program.explain(), experiment.steps_per_iteration * experiment.members
    rate = statistics.median(runs)
    found = {
        "label": row.label,
        "rate": rate,
        "runs": runs,
        "iteration_seconds": steps / rate,
        "commit": commit(),
        "compile_seconds": program.compile_seconds,
        "bytes": max(plan.memory.values()),
        "least_seconds": max(plan.roofline_seconds.values(), default=None),
        "launches": max(plan.launches.values(), default=0) or None,
    }
    if peer is not None and any(row.label == setting.label for setting in compare_rejax.SETTINGS):
        (setting,) = (s for s in compare_rejax.SETTINGS if s.label == row.label)
        other = compare(setting, peer, max(repeats, 3), seconds)
        found |= {"theirs": other["theirs"], "ratio": other["ratio"], "peer_versions": other["peer_versions"]}
    return found


def compile_at_once(rows: Sequence[Row], processes: int, more: Sequence[str]) -> dict[str, float]:
    """Compiles rows in separate processes, whose programs the compilation cache keeps.

    Returns:
      The seconds of each, by label; nan where a process failed, whose error comes again when the row is measured.
    """

    def seconds(row: Row) -> float:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "row.json")
            times = ["--repeats", "1", "--seconds", "0.01"]
            command = [sys.executable, __file__, "--row", row.label, *times, "--json", str(path), *more]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            return json.loads(path.read_text())["rows"][0]["compile_seconds"] if path.exists() else math.nan

    with ThreadPoolExecutor(processes) as pool:
        return dict(zip([row.label for row in rows], pool.map(seconds, rows), strict=True))


def page(record: dict[str, Any]) -> str:
    """The table of a record, and a paragraph on what it is of."""
    head = ("setting", "steps/s", "ms per iteration", "predicted minimum", "launches", "compile", "memory", "Rejax", "ratio")
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in record["rows"]:
        cells = [
            row["label"],
            f"{row['rate']:,.0f}",
            f"{row['iteration_seconds'] * 1e3:.3g}",
            "-" if row["least_seconds"] is None else f"{row['least_seconds'] * 1e3:.3g}",
            "-" if row["launches"] is None else f"{row['launches']:,}",
            f"{row['compile_seconds']:.0f} s",
            size(row["bytes"]),
            f"{row['theirs']:,.0f}" if "theirs" in row else "-",
            f"{row['ratio']:.2f}" if "ratio" in row else "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    about = record["machine"]
    lines += ["", f"Medians of {record['repeats']} runs of {record['seconds']:g} s on one {about['device']}. {versions}."]
    if record["processes"] > 1:
        lines[-1] += f" Compiled by {record['processes']} processes at once, which wait for each other's processors."
    left_out = [f"{label} ({install})" for label, install in record["left_out"].items()]
    return "\n".join([*lines, *(["", f"Not installed: {', '.join(left_out)}."] if left_out else [])])


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, prints, and writes the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="measure the rows with a WORD in their label")
    parser.add_argument("--row", metavar="LABEL", help="measure the row with this label alone")
    parser.add_argument("--processes", type=int, default=1, help="so many compile at once; needs JAX_COMPILATION_CACHE_DIR")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of a row")
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate length of a timed run")
    parser.add_argument("--rejax", help="the Python of an environment that has Rejax")
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes, on any device, to try the command out")
    parser.add_argument("--json", type=Path, required=True, help="write the record here, after every row")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args(argv)
    if jax.devices()[0].platform != "gpu" and not args.tiny:
        parser.error(f"JAX computes on {jax.devices()[0].device_kind!r}; a GPU is measured here (--tiny runs anywhere)")
    if args.processes > 1 and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        parser.error("--processes compiles into the folder that JAX_COMPILATION_CACHE_DIR names, and it names none; set it")
    try:
        rows: list[Row] = list({row.label: row for row in chosen(ROWS, args.only) if args.row in (None, row.label)}.values())
    except ValueError as error:
        parser.error(str(error))
    if not rows:
        parser.error(f"no row has the label {args.row!r}; --only measures rows with a word in their label")
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions(), "repeats": args.repeats}
    record |= {"seconds": args.seconds, "left_out": {}, "rows": []}
    peer = None if args.rejax is None else [args.rejax, Path(__file__).with_name("rejax_worker.py")]
    record["processes"], compiled = args.processes, dict[str, float]()
    if args.processes > 1:
        more = [*(["--rejax", args.rejax] if args.rejax else []), *(["--tiny"] if args.tiny else [])]
        compiled = compile_at_once([row for row in rows if not missing(row)], args.processes, more)
    for whole in rows:
        row = shrunk(whole) if args.tiny else whole
        if install := missing(row):
            record["left_out"][row.label] = install
            continue
        found = measure(row, args.repeats, args.seconds, peer)
        found["compile_seconds"] = compiled.get(whole.label, found["compile_seconds"])
        print(f"{row.label:<60}{found['rate']:>14,.0f} steps/s, compiled in {found['compile_seconds']:.0f} s", flush=True)
        record["rows"].append(found)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "gpu", page(record)))
    print(page(record), file=sys.stderr)


if __name__ == "__main__":
    main()
