"""Steps per second of one learner while 2, 4 and 1 actors are there, without a restart: IMPALA, all processes on this machine.

`SlowCartPole` waits in every step, as a simulator elsewhere would: actors then cost little processor time, and add up on few
cores too.

    python benchmarks/actors.py --json benchmarks/results/actors.json --docs benchmarks/README.md
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from comparison import machine, our_versions, rewrite

from msrl_jax import envs
from msrl_jax.elastic import tls
from msrl_jax.report.provenance import commit

COUNTS = (2, 4, 1)
ENVS = ("actors:SlowCartPole",)
DELAY = 0.004  # seconds of a step


class SlowCartPole:
    """CartPole, every step of which takes time outside of this machine's processors."""

    def __init__(self):
        self._env = envs.make("CartPole-v1")
        self.observation_space, self.action_space = self._env.observation_space, self._env.action_space

    def reset(self, key: jax.Array) -> Any:
        """As of CartPole."""
        return self._env.reset(key)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> Any:
        """As of CartPole, later."""

        def later(x: np.ndarray) -> np.ndarray:
            time.sleep(DELAY)
            return np.asarray(x)

        kind = jax.ShapeDtypeStruct(action.shape, action.dtype)
        return self._env.step(key, state, jax.pure_callback(later, kind, jnp.asarray(action), vmap_method="expand_dims"))


def measure(env: str, counts: Sequence[int], seconds: float, codec: str | None) -> list[dict[str, Any]]:
    """Lets so many actors act, one number after another, and reads the rows of metrics in which they were there.

    Args:
      env: the environment.
      counts: numbers of actors.
      seconds: how long each number is there.
      codec: the codec of parameters.

    Returns:
      For each number: median steps per second, the mean age of parameters in iterations, dropped unrolls, unrolls used.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        run, policy = Path(folder, "run"), "SingleLearnerCoarse:staleness=8" + f",parameter_codec={codec}" * (codec is not None)
        options = ["--algo", "impala", "--env", env, "--policy", policy, "--total-steps", "1000000000", "--eval-episodes", "0"]
        tls.contexts(print)  # an actor may start before the learner has made the key
        processes = [_start("train", "--actors-at", address, "--out", str(run), "--progress", "none", *options)]
        found = []
        try:
            for count in counts:
                processes += [_start("act", address) for _ in range(count - len(processes) + 1)]
                while len(processes) > count + 1:
                    processes.pop().send_signal(signal.SIGKILL)
                first = _wait_for(run, count)
                time.sleep(seconds)
                rows = [row for row in _rows(run)[first + 1 :] if row["actors"] == count]
                found.append(
                    {
                        "actors": count,
                        "steps_per_second": median(row["steps_per_second"] for row in rows),
                        "age": mean(row["parameter_age"] for row in rows),
                        "rows": len(rows),
                        "dropped": rows[-1]["dropped_unrolls"] - rows[0]["dropped_unrolls"],
                        "unrolls": rows[-1]["iteration"] - rows[0]["iteration"],
                    }
                )
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return found


def _start(*argv: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    return subprocess.Popen([sys.executable, "-m", "msrl_jax", *argv], env=environment, stderr=subprocess.DEVNULL)


def _rows(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def _wait_for(run: Path, actors: int) -> int:
    """The number of rows once so many actors are there."""
    for _ in range(1200):
        rows = _rows(run)
        if rows and rows[-1]["actors"] == actors:
            return len(rows)
        time.sleep(0.1)
    raise TimeoutError(f"{actors} actors did not come within two minutes")


def page(record: Mapping[str, Any]) -> str:
    """The table of a record."""
    lines = ["| environment | actors | steps/s | age of parameters | unrolls used | dropped |", "|---|" + "---:|" * 5]
    for name, rows in record["rows"].items():
        for row in rows:
            numbers = f"{row['steps_per_second']:,.0f} | {row['age']:.2f} | {row['unrolls']:,} | {row['dropped']:,}"
            lines.append(f"| {name.rpartition(':')[2]} | {row['actors']} | {numbers} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, measures, and writes the record and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=ENVS)
    parser.add_argument("--actors", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--seconds", type=float, default=20.0, help="how long each number of actors is there")
    parser.add_argument("--codec", help="codec of parameters")
    parser.add_argument("--json", type=Path, required=True, help="write the record here")
    parser.add_argument("--docs", type=Path, help="rewrite the table in this page")
    args = parser.parse_args(argv)
    page_before = args.docs and rewrite(args.docs.read_text(), "actors", "")  # says what is missing before anything runs
    record: dict[str, Any] = {"machine": machine(), "versions": our_versions(), "commit": commit(), "rows": {}}
    for env in args.envs:
        record["rows"][env] = measure(env, args.actors, args.seconds, args.codec)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if page_before:
        args.docs.write_text(rewrite(args.docs.read_text(), "actors", page(record)))
    print(page(record))


if __name__ == "__main__":
    main()
