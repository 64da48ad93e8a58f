"""Trains with Pgx's own AlphaZero for `search.py`, which starts it with the Python of an environment that has its libraries.

Only the script's compiled program is used, without its flags, logging, evaluation and checkpoints. Its network is
replaced by one of dense layers, as wide as ours.
"""

import argparse
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import haiku as hk
import jax
import jax.numpy as jnp
import pgx
from serving import Loop, serve, versions


def script(source: Path, env: str, setting: dict) -> ModuleType:
    """Imports `examples/alphazero/train.py` with a setting, and without its flags, its logging and its network module."""

    class Dense(hk.Module):
        """A torso of dense layers, and one more for each of the policy and the value."""

        def __init__(self, num_actions: int, **_: object):
            super().__init__()
            self.num_actions = num_actions

        def __call__(self, x, is_training, test_local_stats):
            x = hk.nets.MLP(setting["hidden_sizes"], activate_final=True)(x.reshape(len(x), -1).astype(jnp.float32))
            return hk.Linear(self.num_actions)(x), jnp.tanh(hk.Linear(1)(x))[..., 0]

    fields = {
        "env_id": env.removeprefix("pgx:"),
        "selfplay_batch_size": setting["num_envs"],
        "max_num_steps": setting["unroll_length"],
        "num_simulations": setting["num_simulations"],
        "training_batch_size": setting["batch_size"],
        "learning_rate": setting["learning_rate"],
    }
    for name, content in {
        "wandb": {},
        "omegaconf": {"OmegaConf": SimpleNamespace(from_cli=lambda: fields)},
        "network": {"AZNet": Dense},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    pgx.make_baseline_model = lambda name: None  # it would be loaded from the network, for evaluations
    sys.path.insert(0, str(source / "examples" / "alphazero"))
    return importlib.import_module("train")


def training(source: Path, env: str, setting: dict) -> Loop:
    """Trains in iterations like the script's: games, values, one pass over the positions in another order."""
    az = script(source, env, setting)
    positions, size = setting["num_envs"] * setting["unroll_length"], setting["batch_size"]
    if setting["num_updates"] * size != positions:
        raise ValueError(f"the script learns from every position once: {positions} are not num_updates x batch_size")
    observation = jax.vmap(az.env.init)(jax.random.split(jax.random.PRNGKey(0), 2)).observation
    model = az.forward.init(jax.random.PRNGKey(0), observation)
    one = jax.tree.map(lambda x: x[None], (model, az.optimizer.init(model[0])))
    run = {"key": jax.random.PRNGKey(1), "model": one[0], "opt_state": one[1]}

    def iterate() -> None:
        run["key"], play, shuffle = jax.random.split(run["key"], 3)
        samples = jax.device_get(az.compute_loss_input(az.selfplay(run["model"], play[None])))
        order = jax.random.permutation(shuffle, positions)
        samples = jax.tree.map(lambda x: x.reshape(positions, *x.shape[3:])[order], samples)
        for start in range(0, positions, size):
            batch = jax.tree.map(lambda x, at=start: x[None, at : at + size], samples)
            run["model"], run["opt_state"], policy_loss, value_loss = az.train(run["model"], run["opt_state"], batch)
            for loss in (policy_loss, value_loss):  # the script logs both
                loss.mean().item()

    def make(iterations: int):
        def chunk() -> object:
            for _ in range(iterations):
                iterate()
            return run["model"]

        start = time.perf_counter()
        iterate()
        return chunk, time.perf_counter() - start

    return Loop(make, positions)


def main() -> None:
    """Reads the setting and serves it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a clone of Pgx")
    parser.add_argument("--setting", type=json.loads, required=True, help="the fields of a `Setting`, as JSON")
    args = parser.parse_args()
    git = ["git", "-C", str(args.source), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    loop = training(args.source, args.setting["env"], args.setting["config"])
    serve(loop, {"script": commit} | versions("jax", "jaxlib", "pgx", "mctx", "dm-haiku", "optax"))


if __name__ == "__main__":
    main()
