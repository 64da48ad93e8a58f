"""The cost of checkpoints and the guard: alternating windows of one run with a checkpoint, with the guard, and with neither.

    python benchmarks/overhead.py --seconds 10 --windows 12

Prints one line of JSON.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import msrl_jax as msrl
from msrl_jax.run.loop.guard import Guard
from msrl_jax.run.loop.hooks import Checkpoints
from msrl_jax.run.loop.loop import ChunkScheduler, Run
from msrl_jax.run.prepare import make_experiment

KINDS = ("neither", "checkpoint", "guard")


def measure(algo: str, env: str, policy: str, seconds: float, windows: int) -> dict:
    """The shares of the rate that checkpoints and the guard take, and the time that training waits for a checkpoint."""
    experiment, where = make_experiment(algo, env, total_steps=10**15), msrl.policies.get(policy)
    program = experiment.compile(where)
    about, pace = {"rollbacks": [], "eval_every": None, "registers": program.registers}, ChunkScheduler(10**7, fixed=False)
    run = Run(experiment, where, None, None, about, program, pace, time.perf_counter(), experiment.start(program))
    guard = Guard()
    guard.begin(run)
    run.compile()
    for _ in range(8):
        run.advance()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    waits = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Checkpoints(Path(folder), (None, seconds), keep=2)
        for window in range(len(KINDS) * windows):
            kind, start, step = KINDS[window % len(KINDS)], time.monotonic(), run.step
            if kind == "checkpoint":
                saver.save(run)
                waits.append(run.saving_seconds)
            while time.monotonic() - start < seconds:
                run.advance()
                if kind == "guard":
                    guard.after(run)
            rates[kind].append((run.step - step) / (time.monotonic() - start))
        saver.end(run)
    plain = statistics.median(rates["neither"])
    return {
        "algorithm": algo,
        "env": env,
        "policy": policy,
        "load": os.getloadavg()[0],
        "steps_per_second": round(plain),
        "spread": round(statistics.stdev(rates["neither"]) / plain, 4),
        "checkpoint": round(1 - statistics.median(rates["checkpoint"]) / plain, 4),
        "guard": round(1 - statistics.median(rates["guard"]) / plain, 4),
        "wait_ms": round(1000 * statistics.median(waits), 1),
    }


def main() -> None:
    """Measures one setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algo", default="ppo")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--policy", default="GPUOnly")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--windows", type=int, default=6)
    args = parser.parse_args()
    print(json.dumps(measure(args.algo, args.env, args.policy, args.seconds, args.windows)))


if __name__ == "__main__":
    main()
