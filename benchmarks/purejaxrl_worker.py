"""Trains with PureJaxRL for `compare_purejaxrl.py`, which starts it with the Python of an environment that can import it."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
from serving import Loop, compiled, serve, versions

MODULES = {"ppo": "ppo", "recurrent_ppo": "ppo_rnn"}


def adapt_flax() -> None:
    """Lets `flax.linen.GRUCell()` be called without its size, as PureJaxRL does and flax could before 0.7."""
    sized = nn.GRUCell

    class GRUCell(nn.Module):
        @nn.compact
        def __call__(self, carry, inputs):
            return sized(carry.shape[-1])(carry, inputs)

        @staticmethod
        def initialize_carry(key, batch_shape, size):
            return jnp.zeros((*batch_shape, size))

    nn.GRUCell = GRUCell


def training(algo: str, env: str, seeds: int, setting: dict) -> Loop:
    """Trains `seeds` runs in one program; each chunk is a run from its start, whose initialization is subtracted.

    Of the metrics of every step, the mean return of every iteration is kept, so that XLA removes the others.
    """
    module = importlib.import_module(MODULES[algo])
    names = {
        "NUM_ENVS": "num_envs",
        "NUM_STEPS": "unroll_length",
        "UPDATE_EPOCHS": "num_epochs",
        "NUM_MINIBATCHES": "num_minibatches",
        "ACTIVATION": "activation",
        "LR": "learning_rate",
        "MAX_GRAD_NORM": "max_grad_norm",
        "GAMMA": "discount",
        "GAE_LAMBDA": "gae_lambda",
        "CLIP_EPS": "clip_ratio",
        "ENT_COEF": "entropy_coef",
        "VF_COEF": "value_coef",
    }
    config = {theirs: setting[ours] for theirs, ours in names.items()} | {"ENV_NAME": env, "ANNEAL_LR": False}
    steps = setting["num_envs"] * setting["unroll_length"]
    keys = jax.random.split(jax.random.PRNGKey(0), seeds)

    def make(iterations: int):
        train = module.make_train(config | {"TOTAL_TIMESTEPS": iterations * steps})

        def run(key):
            out = train(key)
            metrics = out["metrics"] if "metrics" in out else out["metric"]
            return out["runner_state"], metrics["returned_episode_returns"].mean((1, 2))

        arguments = keys[0] if seeds == 1 else keys
        program, seconds = compiled(run if seeds == 1 else jax.vmap(run), arguments)
        return lambda: program(arguments), seconds

    return Loop(make, seeds * steps, empty=True)


def main() -> None:
    """Reads the setting and serves it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a clone of PureJaxRL")
    parser.add_argument("--setting", type=json.loads, required=True, help="the fields of a `Setting`, as JSON")
    args = parser.parse_args()
    adapt_flax()
    sys.path.insert(0, str(args.source / "purejaxrl"))
    git = ["git", "-C", str(args.source), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    loop = training(args.setting["algo"], args.setting["env"], args.setting["seeds"], args.setting["config"])
    serve(loop, {"purejaxrl": commit} | versions("jax", "jaxlib", "flax", "optax", "distrax", "gymnax"))


if __name__ == "__main__":
    main()
