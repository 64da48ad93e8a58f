"""Trains for minutes under several policies, and reports memory, compilations and the drift of the rate.

    python benchmarks/soak.py --minutes 10 --policies GPUOnly SingleLearnerFine Central

Each policy trains in a process of its own, with checkpoints every 10 s, evaluations off, and chunks of about a second. The
first fifth warms up. Prints one line of JSON per policy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def soak(policy: str, minutes: float, devices: int) -> dict:
    """Trains PPO on CartPole under one policy, in this process."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    import numpy as np

    import msrl_jax as msrl

    compiled, rows, start = [], [], time.monotonic()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )

    def tick(tick):
        now = time.monotonic() - start
        rows.append((now, tick.metrics["steps_per_second"], resident(), len(compiled)))
        return now > 60 * minutes

    with tempfile.TemporaryDirectory() as folder:
        msrl.train(
            "ppo", "CartPole-v1", policy=policy, total_steps=1e13, out=os.path.join(folder, "run"), checkpoint_every="10s",
            eval_episodes=0, callbacks=[tick], progress=False,
        )  # fmt: skip
    rows = [row for row in rows if row[0] > 12 * minutes]
    first, last = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    rate = [float(np.median([row[1] for row in part])) for part in (first, last)]
    return {
        "policy": policy, "ticks": len(rows), "load": os.getloadavg()[1], "steps_per_second": round(rate[0]),
        "drift": round(rate[1] / rate[0] - 1, 4), "compilations": rows[-1][3] - rows[0][3],
        "resident_mib": [round(np.median([row[2] for row in part]) / 2**20, 1) for part in (rows[:30], rows[-30:])],
    }  # fmt: skip


def resident() -> int:
    """Bytes of memory that this process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Runs every policy after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--policies", nargs="+", default=["GPUOnly", "SingleLearnerFine", "Central"])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--here", action="store_true", help="train in this process")
    args = parser.parse_args()
    for policy in args.policies:
        if args.here:
            print(json.dumps(soak(policy, args.minutes, args.devices)), flush=True)
            continue
        command = [sys.executable, __file__, "--here", "--policies", policy, "--minutes", str(args.minutes)]
        subprocess.run([*command, "--devices", str(args.devices)], check=True)


if __name__ == "__main__":
    main()
