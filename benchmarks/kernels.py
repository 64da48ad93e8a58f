"""Counts what msrl_jax and its peers launch on a GPU per iteration, with equal settings; no GPU is needed.

    python benchmarks/kernels.py --rejax /tmp/rejax/bin/python --purejaxrl /tmp/purejaxrl_env/bin/python \\
        --purejaxrl-source CLONE --jaxmarl /tmp/jaxmarl_env/bin/python --jaxmarl-source CLONE \\
        --json benchmarks/results/kernels.json --docs benchmarks/README.md

The environments of the peers are those of `compare_rejax.py`, `compare_purejaxrl.py` and `compare_jaxmarl.py`. Each needs
jax-cuda12-plugin and jax-cuda12-pjrt too, of the version of jaxlib (`pip install --no-deps`), and so does ours. XLA compiles
each program ahead of time for an H100. Counted are the instructions of the loop over iterations that launch something: each
is a fusion, a library call, a copy or another kernel. Inner loops count as often as they run, conditionals as their largest
branch.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compare_jaxmarl
import compare_purejaxrl
import compare_rejax
from comparison import Setting, rewrite

import msrl_jax as msrl
from msrl_jax.fragments.plan.hlo import Module, module_of
from msrl_jax.fragments.plan.kernels import Launches, launches
from msrl_jax.fragments.plan.topologies import gpu_topology
from msrl_jax.run.prepare import make_experiment

HERE = Path(__file__).parent
ITERATIONS = 7  # of a program; a number that no inner loop has
MEMBERS = [compare_rejax.ppo("CartPole-v1", 4, 128, seeds=2048)]  # too many to time them on a CPU
PEERS = {
    "rejax": compare_rejax.SETTINGS + MEMBERS,
    "purejaxrl": compare_purejaxrl.SETTINGS,
    "jaxmarl": compare_jaxmarl.settings(),
}


def per_iteration(found: Sequence[Launches], length: int) -> int:
    """The launches of one repetition of the loop over iterations, the outermost loop that runs `length` times."""
    inside = [x for x in found if x.trips and x.trips[0] == length]
    return sum(x.count * x.times for x in inside) // length


def ours(setting: Setting) -> int:
    """What our program launches per iteration."""
    config = setting.config | setting.only_ours
    experiment = make_experiment(setting.algo, setting.env, **config, seeds=setting.seeds)
    program = experiment.compile(msrl.policies.GPUOnly(), msrl.plan_devices("gpu:h100:1"))
    (compiled,) = program.compiled(ITERATIONS)
    # The number of iterations is an argument, so this loop has no known length, and counts once.
    return per_iteration(launches(module_of(compiled)), 1)


def theirs(command: Sequence[str | Path], setting: Setting) -> int:
    """What a peer's program launches per iteration of ours."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.txt")
        wanted = {"topology": gpu_topology("h100"), "path": str(path), "iterations": ITERATIONS}
        environment = os.environ | {"COMPILE_FOR": json.dumps(wanted), "JAX_PLATFORMS": "cpu"}
        command = [*command, "--setting", json.dumps(dataclasses.asdict(setting))]
        subprocess.run(command, env=environment, check=True, stdin=subprocess.DEVNULL)
        found = per_iteration(launches(Module(path.read_text())), ITERATIONS)
    return found // setting.config.get("policy_period", 1)  # an iteration of Rejax's TD3 takes so many steps


def count(setting: Setting, peer: str, command: Sequence[str | Path]) -> dict[str, Any]:
    """Counts one setting in both libraries."""
    row = {"label": setting.label, "peer": peer, "ours": ours(setting), "theirs": theirs(command, setting)}
    print("{label} ({peer}): {ours:,} and {theirs:,}".format(**row), flush=True)
    return row


def merged(rows: Sequence[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows, with the row of the same setting replaced, in the order of the peers and their settings."""
    order = [(peer, setting.label) for peer, settings in PEERS.items() for setting in settings]
    found = {(row["peer"], row["label"]): row for row in [*rows, new]}
    return [found[key] for key in order if key in found]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    head = ["| setting | peer | ours | theirs | theirs / ours |", "|---|---|---|---|---|"]
    line = "| {label} | {peer} | {ours:,} | {theirs:,} | {ratio:.2f} |"
    return "\n".join(head + [line.format(**row, ratio=row["theirs"] / row["ours"]) for row in rows])


def main() -> None:
    """Counts the settings of all peers that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for peer in PEERS:
        parser.add_argument(f"--{peer}", type=Path, metavar="PYTHON", help="the Python of its environment")
        parser.add_argument(f"--{peer}-source", type=Path, metavar="CLONE", help="a clone of its repository")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="settings with such a word in their label")
    parser.add_argument("--json", type=Path, help="write the rows here; rows of other settings are kept")
    parser.add_argument("--docs", type=Path, metavar="PAGE", help="rewrites the table of this page")
    args = parser.parse_args()
    rows = json.loads(args.json.read_text()) if args.json and args.json.exists() else []
    for peer, settings in PEERS.items():
        python, source = getattr(args, peer), getattr(args, f"{peer}_source")
        command = [python, HERE / f"{peer}_worker.py", *(["--source", source] if source else [])]
        chosen = [s for s in settings if any(word in s.label for word in args.only)] if python else []
        for setting in chosen:
            rows = merged(rows, count(setting, peer, command))
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "kernels", table(rows)))


if __name__ == "__main__":
    main()
