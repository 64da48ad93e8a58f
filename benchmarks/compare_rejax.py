"""Compares the training speed of msrl_jax with that of Rejax, with equal settings.

    python3.11 -m venv /tmp/rejax
    /tmp/rejax/bin/pip install rejax==0.1.3 gymnax==0.0.9 jax==0.10.2
    python benchmarks/compare_rejax.py --python /tmp/rejax/bin/python \\
        --json benchmarks/results/rejax.json --docs benchmarks/README.md

Rejax 0.1.3 does not run with gymnax 1.0, which msrl_jax uses. `--only MinAtar "dqn CartPole-v1"` measures some settings.
"""

from pathlib import Path

import numpy as np
from comparison import Setting, run

SHARED = {"hidden_sizes": (64, 64), "learning_rate": 1e-3, "discount": 0.99}
PPO = SHARED | {
    "num_epochs": 4,
    "num_minibatches": 4,
    "activation": "tanh",
    "max_grad_norm": 0.5,
    "gae_lambda": 0.95,
    "clip_ratio": 0.2,
    "entropy_coef": 0.01,
    "value_coef": 0.5,
}
OURS = {"network": "mlp", "clip_value": 0.2, "normalize_values": False}
OFF_POLICY = SHARED | {"activation": "relu", "max_grad_norm": 10.0, "tau": 0.02, "unroll_length": 1}
SIZES = [
    {"num_envs": e, "num_updates": k, "batch_size": b, "replay.capacity": c, "replay.learning_starts": 2 * b}
    for e, k, b, c in ((1, 1, 32, 10_000), (16, 2, 128, 20_000), (128, 8, 256, 100_000))
]
MINATAR = [f"{game}-MinAtar" for game in ("Breakout", "Asterix", "Freeway", "SpaceInvaders")]


def ppo(env: str, num_envs: int, unroll_length: int, seeds: int = 1, **fields: object) -> Setting:
    """A setting of PPO with an MLP."""
    return Setting("ppo", env, PPO | {"num_envs": num_envs, "unroll_length": unroll_length} | fields, seeds, OURS)


SETTINGS = [
    *(ppo("CartPole-v1", *size) for size in ((4, 128), (64, 128), (1024, 32), (4, 128, 64))),
    *(ppo("CartPole-v1", 4, 128, learning_rate=list(np.geomspace(1e-4, 1e-2, n))) for n in (4, 16, 64, 256)),
    *(ppo(env, 64, 128, activation="relu") for env in MINATAR),
    ppo("Pendulum-v1", 64, 128),
    *(Setting("dqn", "CartPole-v1", OFF_POLICY | size | {"target": "double"}) for size in SIZES),
    *(Setting("sac", "Pendulum-v1", OFF_POLICY | size) for size in SIZES),
    *(Setting("td3", "Pendulum-v1", OFF_POLICY | size | {"policy_period": 2, "exploration_noise": 0.1}) for size in SIZES),
]


if __name__ == "__main__":
    run(
        "Rejax",
        __doc__,
        SETTINGS,
        lambda parser: parser.add_argument("--python", required=True, help="the Python of an environment that has Rejax"),
        lambda args: [args.python, Path(__file__).with_name("rejax_worker.py")],
    )
