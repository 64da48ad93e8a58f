"""Compares the speed of `alphazero` with that of Pgx's own AlphaZero script: self-play with search, and training.

    git clone https://github.com/sotetsuk/pgx /tmp/pgx && python3.11 -m venv /tmp/pgx_env
    /tmp/pgx_env/bin/pip install jax==0.10.2 pgx mctx dm-haiku optax pydantic
    python benchmarks/search.py --python /tmp/pgx_env/bin/python --source /tmp/pgx \\
        --json benchmarks/results/pgx.json --docs benchmarks/README.md

Both have dense layers, and learn from every position once. The script moves positions to the host and shuffles them there; ours
samples them from a buffer that holds those of one iteration.
"""

import argparse
from pathlib import Path

from comparison import Setting, run

SHARED = {"num_simulations": 32, "hidden_sizes": (128, 128), "learning_rate": 1e-3}
OURS = {"network": "mlp", "random_share": 0.0, "max_grad_norm": None, "anneal_learning_rate": False}


def alphazero(game: str, num_envs: int, unroll_length: int, batch_size: int) -> Setting:
    """A setting in which every position is learned from once."""
    positions = num_envs * unroll_length
    sizes = {"num_envs": num_envs, "unroll_length": unroll_length, "batch_size": batch_size}
    sizes["num_updates"] = positions // batch_size
    return Setting("alphazero", f"pgx:{game}", SHARED | sizes, only_ours=OURS | {"replay.capacity": positions})


SETTINGS = [alphazero("tic_tac_toe", 128, 16, 256), alphazero("connect_four", 128, 16, 256)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that find Pgx's script."""
    parser.add_argument("--python", required=True, help="the Python of an environment with the script's dependencies")
    parser.add_argument("--source", type=clone, required=True, help="a clone of Pgx")


def clone(text: str) -> Path:
    """The folder of a clone of Pgx."""
    if not (path := Path(text)).joinpath("examples/alphazero/train.py").exists():
        raise argparse.ArgumentTypeError(f"{text} has no examples/alphazero/train.py; give the folder of a clone of Pgx")
    return path


if __name__ == "__main__":
    run(
        "Pgx",
        __doc__,
        SETTINGS,
        add_arguments,
        lambda args: [args.python, Path(__file__).with_name("pgx_worker.py"), "--source", args.source],
    )
