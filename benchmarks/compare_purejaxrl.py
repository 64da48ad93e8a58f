"""Compares the training speed of msrl_jax with that of PureJaxRL, with equal settings.

    git clone https://github.com/luchris429/purejaxrl /tmp/purejaxrl && python3.11 -m venv /tmp/purejaxrl_env
    /tmp/purejaxrl_env/bin/pip install jax==0.10.2 gymnax==0.0.9 distrax==0.1.9 flax optax brax==0.14.2 navix==0.7.4
    python benchmarks/compare_purejaxrl.py --python /tmp/purejaxrl_env/bin/python --source /tmp/purejaxrl \\
        --json benchmarks/results/purejaxrl.json --docs benchmarks/README.md

PureJaxRL does not run with gymnax 1.0, which msrl_jax uses. `--only MinAtar "recurrent_ppo"` measures some settings.
"""

import argparse
from pathlib import Path

from compare_rejax import MINATAR, OURS, PPO, ppo
from comparison import Setting, run

# PureJaxRL's recurrent network has two dense layers of width 128 behind its core, one for the policy and one for the value.
# Ours has dense layers before the core only; with two more of them, the products of both networks are the same.
RECURRENT = PPO | {"activation": "relu"}
RECURRENT_OURS = OURS | {"hidden_sizes": (128, 128, 128), "core.size": 128}

SETTINGS = [
    *(ppo("CartPole-v1", *size) for size in ((4, 128), (64, 128), (1024, 32), (4, 128, 64))),
    *(ppo(env, 64, 128, activation="relu") for env in MINATAR),
    *(
        Setting("recurrent_ppo", "CartPole-v1", RECURRENT | {"num_envs": e, "unroll_length": t}, only_ours=RECURRENT_OURS)
        for e, t in ((4, 128), (64, 128), (1024, 32))
    ),
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that find PureJaxRL."""
    parser.add_argument("--python", required=True, help="the Python of an environment with PureJaxRL's dependencies")
    parser.add_argument("--source", type=Path, required=True, help="a clone of PureJaxRL")


if __name__ == "__main__":
    run(
        "PureJaxRL",
        __doc__,
        SETTINGS,
        add_arguments,
        lambda args: [args.python, Path(__file__).with_name("purejaxrl_worker.py"), "--source", args.source],
    )
