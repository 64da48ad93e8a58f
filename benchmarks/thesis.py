"""Which distribution policy is fastest depends on the network and on the environments: MSRL's argument, measured and predicted.

PPO on CartPole on eight virtual devices of this machine. Before every transfer between placements the host sleeps, as if the
network were slower. Each policy's time is predicted from its instructions, measured one by one without the sleep, and measured.

    python benchmarks/thesis.py --json benchmarks/results/thesis.json --docs docs/thesis.md --svg docs/thesis.svg
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from comparison import machine, our_versions, rewrite

from msrl_jax import policies
from msrl_jax.experiment.arguments import make_experiment
from msrl_jax.report import curves
from msrl_jax.report.bench import program_runner
from msrl_jax.report.provenance import commit

POLICIES = ("GPUOnly", "MultiLearner", "SingleLearnerCoarse", "SingleLearnerFine", "Environments", "Central")
DELAYS = (0.0, 0.0002, 0.001, 0.002, 0.006)
SIZES = (32, 128, 512, 1024)
FIXED = {"unroll_length": 16, "num_minibatches": 4, "num_epochs": 4}
_CLOSE = 1.1  # a choice this near to the best measured policy is as good

Row = Mapping[str, Any]


def measure(num_envs: int, delays: Sequence[float], seconds: float, repeats: int) -> list[Row]:
    """Predicts and measures all policies for a number of environments.

    Args:
      num_envs: the environments.
      delays: seconds that a transfer takes longer.
      seconds: length of a timed run.
      repeats: timed runs, whose median counts.

    Returns:
      For each policy and delay the predicted and the measured seconds of an iteration, and its transfers.
    """
    experiment = make_experiment("ppo", "CartPole-v1", overrides=FIXED | {"num_envs": num_envs})
    rows = []
    for name in POLICIES:
        program = experiment.compile(policies.get(name))
        for delay in delays:
            predicted = program.predict(experiment.start(program), delay=delay)
            count = max(1, min(100, round(seconds / 4 / predicted.seconds)))
            with program.delayed(delay):
                runner = program_runner(experiment, program, count)
                rate = statistics.median(runner.run(seconds) for _ in range(repeats))
            rows.append({
                "num_envs": num_envs, "policy": name, "delay": delay, "exchanges": predicted.exchanges,
                "predicted": predicted.seconds, "measured": experiment.steps_per_iteration / rate,
            })  # fmt: skip
            print(json.dumps(rows[-1]), flush=True)
    return rows


def choices(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each number of environments and delay: the fastest policy, the predicted one, and how many times as long it took."""
    found = []
    for num_envs, delay in dict.fromkeys((r["num_envs"], r["delay"]) for r in rows):
        case = [r for r in rows if (r["num_envs"], r["delay"]) == (num_envs, delay)]
        best, chosen = (min(case, key=lambda r: r[key]) for key in ("measured", "predicted"))
        regret = chosen["measured"] / best["measured"]
        found.append({"num_envs": num_envs, "delay": delay, "best": best, "chosen": chosen, "regret": regret})
    return found


def page(record: Mapping[str, Any]) -> str:
    """The tables of a record, and what it was measured on."""
    rows = record["rows"]
    head = ("environments", "longer by", *POLICIES)
    lines = [_line(head), "|---:" * len(head) + "|"]
    for case in choices(rows):
        cells = []
        for name in POLICIES:
            (row,) = (r for r in rows if (r["num_envs"], r["delay"], r["policy"]) == (case["num_envs"], case["delay"], name))
            marks = [mark for mark, which in (("**", "best"), ("_", "chosen")) if case[which]["policy"] == name]
            text = f"{1e3 * row['measured']:.3g} ({1e3 * row['predicted']:.3g})"
            cells.append("".join(marks) + text + "".join(reversed(marks)))
        lines.append(_line([str(case["num_envs"]), f"{1e3 * case['delay']:g} ms", *cells]))
    found = choices(rows)
    good = sum(case["regret"] <= _CLOSE for case in found)
    worst = max(found, key=lambda case: case["regret"])
    about, versions = record["machine"], ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join([
        *lines, "",
        "Milliseconds of an iteration: measured (predicted). Bold is the fastest, italic the predicted one. The predicted one "
        f"is the fastest, or at most a tenth slower, in {good} of {len(found)} cases; in the worst it takes "
        f"{worst['regret']:.2f} times as long ({worst['num_envs']} environments, {1e3 * worst['delay']:g} ms).", "",
        f"{about['cpu']} (cores: {about['cores']}). {versions}.",
    ])  # fmt: skip


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure(record: Mapping[str, Any]) -> str:
    """Steps per second over the delay, for the fewest and the most environments: measured as lines, predicted as dots."""
    rows, sizes = record["rows"], sorted({r["num_envs"] for r in record["rows"]})
    with curves.styled():
        drawn, panels = curves.figure_of(2)
        for panel, num_envs in zip(panels, (sizes[0], sizes[-1]), strict=True):
            for number, name in enumerate(POLICIES):
                case = [r for r in rows if (r["num_envs"], r["policy"]) == (num_envs, name)]
                steps, x = num_envs * FIXED["unroll_length"], [1e3 * r["delay"] for r in case]
                panel.plot(x, [steps / r["measured"] for r in case], color=f"C{number}", label=name, lw=1.4)
                panel.plot(x, [steps / r["predicted"] for r in case], color=f"C{number}", ls="", marker="o", ms=3.5)
            panel.set(yscale="log", xlabel="a transfer takes longer by (ms)", ylabel=f"steps/s, {num_envs} environments")
        return curves.svg_of(curves.finished(drawn))


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and writes the record, the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=SIZES, help="numbers of environments")
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS, help="seconds that a transfer takes longer")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of a timed run")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, whose median counts")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the tables in this page")
    parser.add_argument("--svg", type=Path, help="draw the figure here")
    args = parser.parse_args(argv)
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions(), "commit": commit(), "rows": []}
    for num_envs in args.envs:
        record["rows"] += measure(num_envs, args.delays, args.seconds, args.repeats)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "thesis", page(record)))
    if args.svg:
        args.svg.write_text(figure(record))
    print(page(record))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
