"""Compares the training speed of msrl_jax with that of JaxMARL's baselines, with equal settings.

    git clone https://github.com/FLAIROx/JaxMARL /tmp/jaxmarl && python3.11 -m venv /tmp/jaxmarl_env
    /tmp/jaxmarl_env/bin/pip install jax==0.10.2 jaxmarl==0.2.0 distrax flashbax omegaconf matplotlib
    python benchmarks/compare_jaxmarl.py --python /tmp/jaxmarl_env/bin/python --source /tmp/jaxmarl \\
        --repeats 3 --json benchmarks/results/jaxmarl.json --docs benchmarks/README.md

`--only "ippo" "num_agents=8"` measures some settings. Both libraries use the environments of the same version of JaxMARL.
"""

import argparse
from pathlib import Path
from typing import Any

from comparison import Setting, run

PPO = {
    "num_envs": 128,
    "unroll_length": 25,
    "num_epochs": 4,
    "num_minibatches": 5,
    "learning_rate": 2.5e-4,
    "max_grad_norm": 0.5,
    "discount": 0.99,
    "gae_lambda": 0.95,
    "clip_ratio": 0.2,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
    "activation": "tanh",
    "core": None,
}
RECURRENT = PPO | {"core": "gru", "core.size": 128, "num_minibatches": 4, "activation": "relu"}
Q_LEARNING = {
    "num_envs": 128,
    "unroll_length": 26,
    "batch_size": 32,
    "num_updates": 1,
    "replay.capacity": 128 * 26 * 39,
    "core": "gru",
    "core.size": 64,
    "learning_rate": 5e-3,
    "max_grad_norm": 25.0,
    "discount": 0.9,
}
MIXER = {"mixing_size": 32, "hyper_size": 128}

# JaxMARL's recurrent networks of PPO have a dense layer before the core and one behind it; ours have all before it. Its
# Q-networks have one before the core. The numbers of products are the same.
BOTH_LAYERS = {"hidden_sizes": (128, 128), "anneal_learning_rate": False}
WINDOWS = {"hidden_sizes": (64,), "trace_length": 26, "replay.learning_starts": None, "anneal_learning_rate": False}


def settings() -> list[Setting]:
    """Five algorithms on simple_spread with 3, 8 and 32 agents."""
    found: list[Setting] = []
    for agents in (3, 8, 32):
        env = f"jaxmarl:MPE_simple_spread_v3:num_agents={agents}"
        rows: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
            ("ippo", PPO, {"hidden_sizes": (64, 64), "anneal_learning_rate": False}),
            ("ippo", RECURRENT, BOTH_LAYERS),
            ("mappo", RECURRENT, BOTH_LAYERS),
            ("vdn", Q_LEARNING, WINDOWS),
            ("qmix", Q_LEARNING | MIXER, WINDOWS),
        ]
        found += [Setting(algo, env, config, only_ours=ours) for algo, config, ours in rows]
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that find JaxMARL."""
    parser.add_argument("--python", required=True, help="the Python of an environment with JaxMARL and its baselines' needs")
    parser.add_argument("--source", type=Path, required=True, help="a clone of JaxMARL")


if __name__ == "__main__":
    run(
        "JaxMARL",
        __doc__,
        settings(),
        add_arguments,
        lambda args: [args.python, Path(__file__).with_name("jaxmarl_worker.py"), "--source", args.source],
    )
