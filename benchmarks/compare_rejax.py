"""Compares msrl_jax with rejax: steps per second of one algorithm with the same settings, on CartPole-v1 or Pendulum-v1.

    python benchmarks/compare_rejax.py --algo dqn --python /path/to/an/environment/with/rejax/bin/python

rejax runs in a separate process. The timed runs of both alternate, and one process waits while the other is timed. Both train
networks of two layers of width 64: PPO with four epochs of four minibatches per iteration, the other algorithms with the same
batches, updates per step and buffer size. Times exclude initialization, compilation and evaluation. Prints a table, then one
line of JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

import jax
from rejax_worker import DISCOUNT, ENVS, HIDDEN, LEARNING_RATE, SETTINGS

from msrl_jax.training.benchmark import calibrated_chunk, interleave, program_runner
from msrl_jax.training.setup import resolve, resolve_policy


class Rejax:
    """One setting of rejax in another process."""

    def __init__(self, python: str, algo: str, setting: dict):
        """Starts the process, and waits until it has compiled."""
        script = Path(__file__).with_name("rejax_worker.py")
        command = [python, script, "--algo", algo, "--setting", json.dumps(setting)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.compile_seconds: float = self._answer()["compile_seconds"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the rejax process ended with code {self._process.wait()}; its error is above")
        return json.loads(line)

    def run(self, seconds: float) -> float:
        """Trains for about `seconds`, and returns environment steps per second."""
        assert self._process.stdin is not None
        print(seconds, file=self._process.stdin, flush=True)
        return self._answer()["steps_per_second"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(python: str, algo: str, setting: dict, repeats: int, seconds: float) -> dict:
    """Measures one setting in both libraries."""
    config = setting | {"hidden_sizes": HIDDEN, "learning_rate": LEARNING_RATE, "discount": DISCOUNT}
    setup = resolve(algo, ENVS[algo], overrides=config)
    program = setup.compile(resolve_policy("GPUOnly"), jax.devices()[:1])
    chunk = calibrated_chunk(setup, program)
    compile_seconds = program.compile_seconds
    rejax = Rejax(python, algo, setting)
    ours, theirs = interleave([program_runner(setup, program, chunk), rejax], seconds, repeats)
    rejax.close()
    return {"algo": algo} | setting | {
        "msrl_jax": statistics.median(ours),
        "rejax": statistics.median(theirs),
        "ratio": statistics.median(ours) / statistics.median(theirs),
        "msrl_jax_runs": ours,
        "rejax_runs": theirs,
        "msrl_jax_compile_seconds": compile_seconds,
        "rejax_compile_seconds": rejax.compile_seconds,
        "load": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    """Reads the command line, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of an environment that has rejax")
    parser.add_argument("--algo", choices=SETTINGS, default="ppo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="approximate length of a timed run")
    args = parser.parse_args()
    rows = []
    columns = ("num_envs", "unroll_length", "num_updates", "batch_size", "capacity")
    columns = [name for name in columns if name in SETTINGS[args.algo][0]]
    print("".join(f"{name:>14}" for name in columns) + f"{'msrl_jax steps/s':>19}{'rejax steps/s':>16}{'ratio':>8}{'load':>6}")
    for setting in SETTINGS[args.algo]:
        row = compare(args.python, args.algo, setting, args.repeats, args.seconds)
        rows.append(row)
        rates = f"{row['msrl_jax']:>19,.0f}{row['rejax']:>16,.0f}{row['ratio']:>8.2f}{row['load']:>6.1f}"
        print("".join(f"{setting[name]:>14,}" for name in columns) + rates, flush=True)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
