"""Draws one training run under six policies, on 1, 2, 4 and 8 devices.

    python benchmarks/one_run.py --svg docs/one_run.svg

Trains PPO on CartPole-v1 24 times on virtual CPU devices, which takes about ten minutes on two cores. Runs whose learners split
a batch over the same number of devices have the same bits under every policy; between the others, sums of gradients are rounded
differently, which training amplifies. Prints which runs are equal; draws the returns, and how far the losses are apart.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

import msrl_jax as msrl

DEVICES = (1, 2, 4, 8)
STEPS = 200_000

Name = tuple[str, int]  # a policy, and a number of devices
History = dict[str, np.ndarray]


def train(policy: str, devices: int, steps: int) -> History:
    """The history of a run, with a row for each iteration."""
    result = msrl.train(
        "ppo",
        "CartPole-v1",
        policy=policy,
        total_steps=steps,
        chunk=1,
        eval_episodes=0,
        devices=jax.devices()[:devices],
        progress=False,
        anneal_learning_rate=True,
    )
    return {name: result.history[name] for name in ("step", "episode_return", "value_loss")}


def difference(column: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The relative difference of two columns."""
    return np.abs(column - reference) / np.maximum(np.abs(reference), 1e-12)


def equal(runs: dict[Name, History]) -> list[list[Name]]:
    """The names of runs in groups that have the same bits, the largest group first."""
    groups: dict[bytes, list[Name]] = {}
    for name, run in runs.items():
        groups.setdefault(b"".join(column.tobytes() for column in run.values()), []).append(name)
    return sorted(groups.values(), key=len, reverse=True)


def draw(runs: dict[Name, History], path: Path) -> None:
    """Writes the figure."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "msrl_jax", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        reference = runs[msrl.policies.names()[0], 1]
        for number, names in enumerate(equal(runs)):
            style = {"color": f"C{number}", "lw": 1.2, "alpha": 0.8}
            for name in names:
                run, label = runs[name], f"{len(names)} runs with equal bits" if name == names[0] else None
                apart = np.maximum(difference(run["value_loss"], reference["value_loss"]), 1e-9)
                left.plot(run["step"] / 1000, run["episode_return"], label=label, **style)
                right.plot(run["step"] / 1000, apart, **style)
        left.set(title=f"{len(runs)} runs of PPO on CartPole-v1", ylabel="return")
        left.legend(fontsize=8)
        right.set(title="relative difference of the value loss", yscale="log", ylim=(1e-9, 1e2))
        for panel in (left, right):
            panel.set(xlabel="thousand environment steps")
            panel.grid(alpha=0.3)
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    """Trains and draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, required=True, help="file for the figure")
    parser.add_argument("--steps", type=int, default=STEPS, help="environment steps of each run")
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(DEVICES))
    runs: dict[Name, History] = {}
    for policy in msrl.policies.names():
        for devices in DEVICES:
            runs[policy, devices] = train(policy, devices, args.steps)
            print(f"{policy} on {devices}: return {runs[policy, devices]['episode_return'][-1]:.1f}", flush=True)
    for names in equal(runs):
        print(f"{len(names)} runs with equal bits: {', '.join(f'{policy} on {devices}' for policy, devices in names)}")
    draw(runs, args.svg)


if __name__ == "__main__":
    main()
