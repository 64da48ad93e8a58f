"""Draws one training run under six policies, on 1, 2, 4 and 8 devices: every curve is the same.

    python benchmarks/one_run.py --svg docs/one_run.svg

Trains PPO on CartPole-v1 24 times on virtual CPU devices, which takes about ten minutes on two cores, and draws the returns,
and how far the losses are from those of one device.
"""

import argparse
from pathlib import Path

import jax
import numpy as np

import msrl_jax as msrl

DEVICES = (1, 2, 4, 8)
STEPS = 200_000


def train(policy: str, devices: int, steps: int) -> dict[str, np.ndarray]:
    """The history of a run, with a row for each iteration."""
    result = msrl.train(
        "ppo", "CartPole-v1", policy=policy, total_steps=steps, chunk=1, eval_episodes=0, devices=jax.devices()[:devices],
        progress=False, anneal_learning_rate=True,
    )  # fmt: skip
    return {name: result.history[name] for name in ("step", "episode_return", "value_loss")}


def difference(column: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """The relative difference of two columns."""
    return np.abs(column - reference) / np.maximum(np.abs(reference), 1e-12)


def draw(runs: dict[tuple[str, int], dict[str, np.ndarray]], path: Path) -> None:
    """Writes the figure."""
    import matplotlib
    from matplotlib.figure import Figure

    reference = runs["GPUOnly", 1]
    with matplotlib.rc_context({"svg.hashsalt": "msrl_jax", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for number, policy in enumerate(msrl.policies.names()):
            for devices in DEVICES:
                run, label = runs[policy, devices], policy if devices == DEVICES[-1] else None
                left.plot(run["step"], run["episode_return"], color=f"C{number}", lw=1, alpha=0.7, label=label)
                apart = np.maximum(difference(run["value_loss"], reference["value_loss"]), 1e-9)
                right.plot(run["step"], apart, color=f"C{number}", lw=1, alpha=0.7)
        left.set(title=f"{len(runs)} runs of PPO on CartPole-v1", xlabel="environment steps", ylabel="return")
        left.legend(fontsize=8)
        right.set(
            title="relative difference of the value loss from one device", xlabel="environment steps", yscale="log",
            ylim=(1e-9, 1),
        )  # fmt: skip
        for panel in (left, right):
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
    runs = {}
    for policy in msrl.policies.names():
        for devices in DEVICES:
            runs[policy, devices] = train(policy, devices, args.steps)
            apart = difference(runs[policy, devices]["episode_return"], runs[msrl.policies.names()[0], 1]["episode_return"])
            print(f"{policy} on {devices}: largest relative difference of returns {np.nanmax(apart):.1e}", flush=True)
    draw(runs, args.svg)


if __name__ == "__main__":
    main()
