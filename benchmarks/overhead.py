"""What checkpoints cost: windows of a run that save at their start, against windows that do not, in turns.

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

from msrl_jax.training.pace import Pace
from msrl_jax.training.run import Run
from msrl_jax.training.saving import Interval, Saver
from msrl_jax.training.setup import resolve, resolve_policy


def measure(algo: str, env: str, policy: str, seconds: float, windows: int) -> dict:
    """Rates of both kinds of windows, and the share of time that saving takes."""
    setup = resolve(algo, env)
    program = setup.compile(resolve_policy(policy))
    run = Run(setup, program, setup.start(program), 10**9, Pace(10**7, fixed=False), None, None, (), None, time.perf_counter())
    run.compile()
    for _ in range(8):
        run.advance()
    rates: dict[bool, list[float]] = {False: [], True: []}
    waits = []
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(Path(folder), Interval(seconds=seconds), keep=2)
        for window in range(2 * windows):
            saves, start, step = bool(window % 2), time.monotonic(), run.step
            if saves:
                saver.save(run)
                waits.append(saver.seconds)
            while time.monotonic() - start < seconds:
                run.advance()
            rates[saves].append((run.step - step) / (time.monotonic() - start))
        saver.finish(run)
    without, with_saves = (statistics.median(rates[kind]) for kind in (False, True))
    return {
        "algorithm": algo, "env": env, "policy": policy, "load": os.getloadavg()[0], "steps_per_second": round(without),
        "overhead": round(1 - with_saves / without, 4), "spread": round(statistics.stdev(rates[False]) / without, 4),
        "wait_ms": round(1000 * statistics.median(waits), 1),
    }  # fmt: skip


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
