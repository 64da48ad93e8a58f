"""Which distribution policy is fastest depends on the network and on the environments: MSRL's argument, measured and predicted.

PPO on CartPole and MAPPO on a cooperative task, on eight virtual devices of this machine. Before every transfer between
placements the host sleeps, as if the network were slower. Each policy's time is predicted from its instructions, measured one
by one without the sleep, and measured.

    python benchmarks/thesis.py --json benchmarks/results/thesis.json --docs benchmarks/README.md --svg docs/thesis.svg
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
from msrl_jax.fragments.measure import delayed, predict
from msrl_jax.report import curves
from msrl_jax.report.bench import program_runner
from msrl_jax.report.provenance import commit
from msrl_jax.run import Experiment
from msrl_jax.run.prepare import make_experiment

POLICIES = ("GPUOnly", "MultiLearner", "SingleLearnerCoarse", "SingleLearnerFine", "Environments", "Central")
DELAYS = (0.0, 0.0002, 0.001, 0.002, 0.006)
SIZES = (32, 128, 512, 1024)
AGENTS = (3, 8, 32)
FIXED = {"unroll_length": 16, "num_minibatches": 4, "num_epochs": 4}
_CLOSE = 1.1  # a choice this near to the best measured policy is as good

Row = Mapping[str, Any]


def cases(sizes: Sequence[int], agents: Sequence[int]) -> dict[str, Experiment]:
    """The experiments by name: PPO on so many environments, and MAPPO with so many agents in 32 environments."""
    found = {f"PPO, {n} environments": ("ppo", "CartPole-v1", {"num_envs": n}) for n in sizes}
    spread = "jaxmarl:MPE_simple_spread_v3:num_agents={n},num_landmarks={n}"
    found |= {f"MAPPO, {n} agents": ("mappo", spread.format(n=n), {"num_envs": 32}) for n in agents}
    return {name: make_experiment(algo, env, **FIXED | own) for name, (algo, env, own) in found.items()}


def measure(name: str, experiment: Experiment, delays: Sequence[float], seconds: float, repeats: int) -> list[Row]:
    """Predicts and measures all policies in one case.

    Args:
      name: of the case.
      experiment: the run.
      delays: seconds that a transfer takes longer.
      seconds: length of a timed run.
      repeats: timed runs, whose median counts.

    Returns:
      For each policy and delay the predicted and the measured seconds of an iteration, and its transfers.
    """
    rows, steps = [], experiment.steps_per_iteration
    for policy in POLICIES:
        program = experiment.compile(policies.get(policy))
        for delay in delays:
            predicted = predict(program, experiment.start(program), delay=delay)
            count = max(1, min(100, round(seconds / 4 / predicted.seconds)))
            with delayed(program, delay):
                runner = program_runner(experiment, program, count)
                rate = statistics.median(runner.run(seconds) for _ in range(repeats))
            rows.append(
                {
                    "case": name,
                    "policy": policy,
                    "delay": delay,
                    "exchanges": predicted.exchanges,
                    "steps": steps,
                    "predicted": predicted.seconds,
                    "measured": steps / rate,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return rows


def choices(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each case and delay: the fastest policy, the predicted one, and how many times as long it took."""
    found = []
    for name, delay in dict.fromkeys((r["case"], r["delay"]) for r in rows):
        case = [r for r in rows if (r["case"], r["delay"]) == (name, delay)]
        best, chosen = (min(case, key=lambda r: r[key]) for key in ("measured", "predicted"))
        regret = chosen["measured"] / best["measured"]
        found.append({"case": name, "delay": delay, "best": best, "chosen": chosen, "regret": regret})
    return found


def page(record: Mapping[str, Any]) -> str:
    """The tables of a record, and what it was measured on."""
    rows = record["rows"]
    head = ("case", "longer by", *POLICIES)
    lines = [_line(head), "|---" + "|---:" * (len(head) - 1) + "|"]
    for case in choices(rows):
        cells = []
        for name in POLICIES:
            (row,) = (r for r in rows if (r["case"], r["delay"], r["policy"]) == (case["case"], case["delay"], name))
            marks = [mark for mark, which in (("**", "best"), ("_", "chosen")) if case[which]["policy"] == name]
            text = f"{1e3 * row['measured']:.3g} ({1e3 * row['predicted']:.3g})"
            cells.append("".join(marks) + text + "".join(reversed(marks)))
        lines.append(_line([case["case"], f"{1e3 * case['delay']:g} ms", *cells]))
    found = choices(rows)
    good = sum(case["regret"] <= _CLOSE for case in found)
    worst = max(found, key=lambda case: case["regret"])
    about, versions = record["machine"], ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return "\n".join(
        [
            *lines,
            "",
            "Milliseconds of an iteration: measured (predicted). Bold is the fastest, italic the predicted one. The predicted "
            f"one is the fastest, or at most a tenth slower, in {good} of {len(found)} cases; in the worst it takes "
            f"{worst['regret']:.2f} times as long ({worst['case']}, {1e3 * worst['delay']:g} ms).",
            "",
            f"{about['cpu']} (cores: {about['cores']}). {versions}.",
        ]
    )


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def figure(record: Mapping[str, Any]) -> str:
    """Steps per second over the delay, a panel for each case: measured as lines, predicted as dots."""
    rows, names = record["rows"], list(dict.fromkeys(r["case"] for r in record["rows"]))
    with curves.styled():
        drawn, panels = curves.figure_of(len(names))
        for panel, name in zip(panels, names, strict=True):
            for number, policy in enumerate(POLICIES):
                case = [r for r in rows if (r["case"], r["policy"]) == (name, policy)]
                x = [1e3 * r["delay"] for r in case]
                panel.plot(x, [r["steps"] / r["measured"] for r in case], color=f"C{number}", label=policy, lw=1.4)
                panel.plot(x, [r["steps"] / r["predicted"] for r in case], color=f"C{number}", ls="", marker="o", ms=3.5)
            panel.set(yscale="log", xlabel="a transfer takes longer by (ms)", ylabel="steps/s", title=name)
        return curves.svg_of(curves.finished(drawn))


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and writes the record, the page and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="*", default=SIZES, help="numbers of environments of PPO")
    parser.add_argument("--agents", type=int, nargs="*", default=AGENTS, help="numbers of agents of MAPPO")
    parser.add_argument("--delays", type=float, nargs="+", default=DELAYS, help="seconds that a transfer takes longer")
    parser.add_argument("--seconds", type=float, default=0.6, help="length of a timed run")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, whose median counts")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the tables in this page")
    parser.add_argument("--svg", type=Path, help="draw the figure here")
    args = parser.parse_args(argv)
    if not (args.envs or args.agents) or not args.delays:
        parser.error("give at least one number of environments or of agents, and a delay")
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions(), "commit": commit(), "rows": []}
    for name, experiment in cases(args.envs, args.agents).items():
        record["rows"] += measure(name, experiment, args.delays, args.seconds, args.repeats)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.docs:
        args.docs.write_text(rewrite(args.docs.read_text(), "thesis", page(record)))
    if args.svg:
        args.svg.write_text(figure(record))
    print(page(record))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
