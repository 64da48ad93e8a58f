"""Simulators on the host: what share of their speed training reaches, and how fast Stable-Baselines3 trains with them.

    python3 -m venv /tmp/sb3 && /tmp/sb3/bin/pip install stable-baselines3 'gymnasium[mujoco]'
    python benchmarks/hosts.py --python /tmp/sb3/bin/python --json benchmarks/results/hosts.json

Without `--python` only the shares are measured. All runs take turns: random actions in the simulators alone, training, and
Stable-Baselines3's PPO with the same environments and sizes.
"""

import argparse
import contextlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from comparison import Peer, Setting

import msrl_jax as msrl
from msrl_jax.report.bench import Runner, calibrated_chunk, interleave, program_runner
from msrl_jax.report.provenance import commit
from msrl_jax.run.prepare import make_experiment

PPO = {"num_envs": 16, "unroll_length": 128, "num_epochs": 10, "num_minibatches": 32, "learning_rate": 3e-4}
SETTINGS = [Setting("ppo", f"gymnasium:{name}", PPO) for name in ("HalfCheetah-v5", "Ant-v5")]
SETTINGS += [Setting("ppo", "gymnasium:HalfCheetah-v5", PPO | {"num_epochs": 1, "num_minibatches": 4})]
SETTINGS += [Setting("impala", "envpool:HalfCheetah-v5", {"num_envs": 16, "unroll_length": 32})]


class Simulating:
    """The simulators alone, with random actions."""

    def __init__(self, env: str, num_envs: int):
        made: Any = msrl.envs.make(env)
        self._sim = made.vectorize(num_envs).simulators
        self._seed = np.arange(num_envs, dtype=np.uint32)
        self._steps, _ = self._sim.reset(self._seed)
        keys = jax.random.split(jax.random.key(0), (64, num_envs))
        self._actions = np.asarray(jax.vmap(jax.vmap(made.action_space.sample))(keys))

    def run(self, seconds: float) -> float:
        """Steps per second, over about `seconds`."""
        start, taken = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            for action in self._actions:
                self._steps, _ = self._sim(self._seed, self._steps, action)
            taken += self._actions[..., 0].size if self._actions.ndim > 2 else self._actions.size
        return taken / (time.perf_counter() - start)


def training(setting: Setting, policy: str) -> Runner:
    """A runner of training, compiled."""
    experiment = make_experiment(setting.algo, setting.env, **setting.config)
    program = experiment.compile(msrl.policies.get(policy), jax.devices()[:1])
    return program_runner(experiment, program, calibrated_chunk(experiment, program))


def measure(setting: Setting, policy: str, python: str | None, repeats: int, seconds: float) -> dict[str, Any]:
    """One row: medians of all runs, in steps per second."""
    with contextlib.ExitStack() as stack:
        simulators = Simulating(setting.env, setting.config["num_envs"])
        runners: dict[str, Any] = {"simulators": simulators, "training": training(setting, policy)}
        if python and setting.algo == "ppo":
            worker = Path(__file__).with_name("sb3_worker.py")
            runners["Stable-Baselines3"] = stack.enter_context(Peer([python, worker], setting))
        runs = dict(zip(runners, interleave(list(runners.values()), seconds, repeats), strict=True))
    return {"label": setting.label, "policy": policy, "commit": commit(), "runs": runs} | {
        name: statistics.median(values) for name, values in runs.items()
    }


def main() -> None:
    """Measures all settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="the Python of an environment with Stable-Baselines3")
    parser.add_argument("--policy", default="MultiLearner:num_devices=1")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for setting in SETTINGS:
        row = measure(setting, args.policy, args.python, args.repeats, args.seconds)
        rows.append(row)
        print(row["label"], {k: round(v) for k, v in row.items() if isinstance(v, float)}, flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
