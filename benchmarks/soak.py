"""Trains for minutes under several policies, and reports memory, compilations and the drift of the rate.

    python benchmarks/soak.py --minutes 10 --policies GPUOnly SingleLearnerFine Central

Each policy trains in a separate process, with evaluations off and chunks of about a second. The
first fifth warms up. After every chunk, a fixed program of plain JAX is timed: the drift is that of the rate in units of its
speed, since the speed of a machine drifts too. Prints one line of JSON per policy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable


def soak(policy: str, minutes: float, devices: int, seconds: float) -> dict:
    """Trains PPO on CartPole under one policy, in this process."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    import numpy as np

    import msrl_jax as msrl

    reference = fixed_program()
    compiled, rows, start = [], [], time.monotonic()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None
    )

    def tick(tick):
        now = time.monotonic() - start
        rate = tick.metrics["steps_per_second"]
        rows.append((now, rate, resident(), len(compiled), rate * reference()))
        return now > 60 * minutes

    with tempfile.TemporaryDirectory() as folder:
        msrl.train(
            "ppo",
            "CartPole-v1",
            policy=policy,
            total_steps=1e13,
            out=os.path.join(folder, "run"),
            checkpoint_every=f"{seconds}s",
            eval_episodes=0,
            callbacks=[tick],
            progress=False,
        )
    rows = [row for row in rows if row[0] > 12 * minutes]
    first, last = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    rate, relative = ([float(np.median([row[i] for row in part])) for part in (first, last)] for i in (1, 4))
    return {
        "policy": policy,
        "ticks": len(rows),
        "load": os.getloadavg()[1],
        "steps_per_second": round(rate[0]),
        "drift": round(relative[1] / relative[0] - 1, 4),
        "drift_with_the_machine": round(rate[1] / rate[0] - 1, 4),
        "compilations": rows[-1][3] - rows[0][3],
        "resident_mib": [round(np.median([row[2] for row in part]) / 2**20, 1) for part in (rows[:30], rows[-30:])],
    }


def fixed_program() -> Callable[[], float]:
    """A program of small products, as in training; returns the seconds that it takes, about 0.05."""
    import jax
    import jax.numpy as jnp

    def step(x, _):
        return jnp.tanh(x @ weights), None

    weights = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    loop = jax.jit(lambda x: jax.lax.scan(step, x, length=3000)[0])
    x = jax.block_until_ready(loop(jnp.ones((64, 64))))

    def timed() -> float:
        start = time.perf_counter()
        jax.block_until_ready(loop(x))
        return time.perf_counter() - start

    return timed


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
    parser.add_argument("--checkpoint-seconds", type=float, default=10.0, help="time between checkpoints")
    parser.add_argument("--here", action="store_true", help="train in this process")
    args = parser.parse_args()
    for policy in args.policies:
        if args.here:
            print(json.dumps(soak(policy, args.minutes, args.devices, args.checkpoint_seconds)), flush=True)
            continue
        command = [sys.executable, __file__, "--here", "--policies", policy, "--minutes", str(args.minutes)]
        command += ["--devices", str(args.devices), "--checkpoint-seconds", str(args.checkpoint_seconds)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
