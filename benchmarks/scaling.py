"""Weak scaling on paper: what each device receives, reduces and holds, under every policy, for growing numbers of devices.

The devices need not be there: `pip install 'jax[tpu]'` brings the compiler for TPUs, which runs on any machine.

    python benchmarks/scaling.py --devices tpu:v6e:1x1 tpu:v6e:2x2 tpu:v6e:4x4 tpu:v6e:8x8 --out scaling

writes scaling.json and scaling.md. Environments grow with the devices, unless `--config` has `num_envs`. With `--rows A.json
B.json`, rows of earlier calls become one record (`--json`), a table in a page (`--docs`) and a figure (`--svg`).
"""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from comparison import rewrite

from msrl_jax.cli import argument_types
from msrl_jax.fragments.plan.text import size
from msrl_jax.fragments.plan.topologies import cpus_of
from msrl_jax.report import curves
from msrl_jax.report.scaling import Scaled, cells_of, plans

POLICIES = (
    *("GPUOnly", "MultiLearner", "SingleLearnerCoarse", "SingleLearnerCoarse:learners={half}"),
    *("SingleLearnerFine:learners={half}", "Environments", "Central", "Central:workers={half},shards={half}"),
)
COLUMNS = ("policy", "devices", "idle", "dispatches", "arriving", "collectives", "in bytes", "memory", "tracing", "XLA")


def format_markdown(rows: Sequence[Scaled]) -> str:
    """Formats plans as a Markdown table; the first row of a policy names it."""
    cells = [cells_of(row, COLUMNS) for row in rows]
    named = [[f"`{first}`" if not k or cells[k - 1][0] != first else "", *rest] for k, (first, *rest) in enumerate(cells)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [COLUMNS, ["---"] * len(COLUMNS), *named])


def figure(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draws what the busiest chip receives and reduces, by algorithm and policy, and what planning takes, as SVG."""
    names, policies = (list(dict.fromkeys(map(of, rows))) for of in (lambda row: row["algorithm"], _kind))
    with curves.styled():
        drawn, panels = curves.figure_of(len(names) + 1)
        for number, (panel, name) in enumerate(zip(panels, names, strict=False)):
            for policy in policies:
                of = [row for row in rows if (row["algorithm"], _kind(row)) == (name, policy)]
                points = [row["count"] for row in of], [_busiest(row) / 1024 for row in of]
                panel.plot(*points, "o-", lw=1.2, ms=3, label=policy)
            for what, line in (("xla_seconds", "o-"), ("tracing_seconds", "o:")):
                counts = sorted({row["count"] for row in rows if row["algorithm"] == name})
                of = [[row[what] for row in rows if (row["algorithm"], row["count"]) == (name, n)] for n in counts]
                label = f"{name}, {'XLA' if what == 'xla_seconds' else 'tracing and cutting'}"
                panels[-1].plot(counts, [max(each) for each in of], line, color=f"C{number}", lw=1.2, ms=3, label=label)
            panel.set(title=name, ylabel="KiB of the busiest chip")
        panels[-1].set(title="compiling", ylabel="seconds, of the slowest policy")
        for panel in panels:
            panel.set(xlabel="chips", xscale="log", ylim=(0, None))
            panel.set_xticks(counts := sorted({row["count"] for row in rows}), [f"{n:,}" for n in counts], minor=False)
            panel.minorticks_off()
        return curves.svg_of(curves.finished(drawn))


def page(record: Mapping[str, Any]) -> str:
    """Formats a record as a Markdown table, with a row per algorithm and policy and a column per number of devices."""
    counts = sorted({row["count"] for row in record["rows"]})
    plans: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in record["rows"]:
        plans.setdefault(f"{row['algorithm']}, `{_kind(row)}`", {})[row["count"]] = row
    head = ["plan", "dispatches", *(f"KiB, {n:,} chips" for n in counts), "memory", "XLA"]
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name, of in plans.items():
        last = of[max(of)]
        cells = [f"{last['dispatches']}", *(f"{_busiest(of[n]) / 1024:,.1f}" if n in of else "-" for n in counts)]
        cells += [size(max(last["memory"].values())), f"{last['xla_seconds']:.0f} s"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Memory and seconds to compile are those of {counts[-1]:,} chips."])


def _kind(row: Mapping[str, Any]) -> str:
    """Returns the name of a row's policy without its arguments."""
    return re.sub(r"[(:].*", "", row["policy"])


def _busiest(row: Mapping[str, Any]) -> int:
    """Returns the bytes that the busiest device receives, and that its collectives result in."""
    return max(arriving + row["bytes_of_collectives"][name] for name, arriving in row["bytes_arriving"].items())


def main(argv: Sequence[str] | None = None) -> None:
    """Plans every policy for all devices and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algo", nargs="+", default=["ppo"])
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--policy", nargs="+", default=POLICIES)
    parser.add_argument("--devices", nargs="+", default=[])
    parser.add_argument("--envs-per-device", type=int, default=8)
    parser.add_argument("--config", type=json.loads, default={}, help="fields of the config, as JSON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="+", type=Path, default=[], help="JSON files of earlier calls")
    parser.add_argument("--json", type=Path, help="write --rows here as one record")
    parser.add_argument("--docs", type=Path, help="rewrite the table of --rows in this page")
    parser.add_argument("--svg", type=argument_types.new_file, help="file for a figure of --rows")
    args = parser.parse_args(argv)
    if args.rows:
        record = {"rows": [row for file in args.rows for row in json.loads(file.read_text())["rows"]]}
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
        if args.docs:
            args.docs.write_text(rewrite(args.docs.read_text(), "scaling", page(record)))
        if args.svg:
            args.svg.write_text(figure(record["rows"]))
        return
    if not args.devices or args.out is None:
        parser.error("give --devices and --out, or --rows")
    config = {name: tuple(x) if isinstance(x, list) else x for name, x in args.config.items()}
    per_device = None if "num_envs" in config else args.envs_per_device
    rows, refused = [], []
    for algo in args.algo:
        for policy in args.policy:
            for devices in args.devices:
                try:
                    rows += plans(algo, args.env, policy, [devices], per_device, **config)
                except ValueError as error:
                    refused.append({"algorithm": algo, "policy": policy, "devices": devices, "why": str(error)})
                    print(f"{algo}, {policy} on {devices}: {error}", flush=True)
                    continue
                print(format_markdown(rows[-1:]).splitlines()[-1], flush=True)
    found = {"rows": [row.to_dict() for row in rows], "refused": refused}
    args.out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(format_markdown(rows) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    if cpus := max((cpus_of(word) for word in sys.argv[1:] if word.startswith("cpu:")), default=0):
        jax.config.update("jax_num_cpu_devices", cpus)
    main()
