"""Trains with JaxMARL's baselines for `compare_jaxmarl.py`, which starts it with a Python that can import them."""

import argparse
import functools
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import jax
import jax.experimental
from serving import Loop, compiled, serve, versions

FILES = {
    ("ippo", None): "IPPO/ippo_ff_mpe.py",
    ("ippo", "gru"): "IPPO/ippo_rnn_mpe.py",
    ("mappo", "gru"): "MAPPO/mappo_rnn_mpe.py",
    ("vdn", "gru"): "QLearning/vdn_rnn.py",
    ("qmix", "gru"): "QLearning/qmix_rnn.py",
}
PPO = {
    "NUM_ENVS": "num_envs",
    "NUM_STEPS": "unroll_length",
    "UPDATE_EPOCHS": "num_epochs",
    "NUM_MINIBATCHES": "num_minibatches",
    "LR": "learning_rate",
    "MAX_GRAD_NORM": "max_grad_norm",
    "GAMMA": "discount",
    "GAE_LAMBDA": "gae_lambda",
    "CLIP_EPS": "clip_ratio",
    "ENT_COEF": "entropy_coef",
    "VF_COEF": "value_coef",
    "ACTIVATION": "activation",
}
Q_LEARNING = {
    "NUM_ENVS": "num_envs",
    "NUM_STEPS": "unroll_length",
    "BUFFER_BATCH_SIZE": "batch_size",
    "NUM_EPOCHS": "num_updates",
    "HIDDEN_SIZE": "core.size",
    "LR": "learning_rate",
    "MAX_GRAD_NORM": "max_grad_norm",
    "GAMMA": "discount",
    "MIXER_EMBEDDING_DIM": "mixing_size",
    "MIXER_HYPERNET_HIDDEN_DIM": "hyper_size",
}
FIXED = {
    "ANNEAL_LR": False,
    "SCALE_CLIP_EPS": False,
    "SEED": 0,
    "LR_LINEAR_DECAY": False,
    "EPS_START": 1.0,
    "EPS_FINISH": 0.05,
    "EPS_DECAY": 0.1,
    "TARGET_UPDATE_INTERVAL": 200,
    "TAU": 1.0,
    "MIXER_INIT_SCALE": 0.001,
    "TEST_DURING_TRAINING": False,
    "TEST_NUM_ENVS": 1,
    "TEST_INTERVAL": 1.0,
    "TEST_NUM_STEPS": 1,
    "WANDB_MODE": "disabled",
    "LOG_AGENTS_SEPARATELY": False,
}


def load(path: Path) -> Any:
    """Imports a baseline, without what it needs only for logging: its callbacks on the host would slow it down."""
    for name in ("wandb", "hydra"):
        stub = types.ModuleType(name)
        stub.main = lambda **_: lambda function: function  # type: ignore[attr-defined]
        sys.modules[name] = stub
    jax.experimental.io_callback = lambda *_, **__: None
    spec = importlib.util.spec_from_file_location("baseline", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def training(source: Path, algo: str, env: str, setting: dict[str, Any]) -> Loop:
    """Trains in one program; each chunk is a run from its start, whose initialization is subtracted."""
    import jaxmarl  # after `serving`, which sends what it prints elsewhere
    from jaxmarl.wrappers.baselines import MPELogWrapper

    module = load(source / "baselines" / FILES[algo, setting["core"]])
    name, _, parameters = env.removeprefix("jaxmarl:").partition(":")
    arguments = {key: int(value) for key, _, value in (part.partition("=") for part in parameters.split(",") if part)}
    # One of the baselines leaves the arguments of the environment out.
    module.jaxmarl = types.SimpleNamespace(make=lambda name, **_: jaxmarl.make(name, **arguments))
    replays = algo in ("vdn", "qmix")
    config = FIXED | {"ENV_NAME": name, "ENV_KWARGS": arguments}
    config |= {theirs: setting[ours] for theirs, ours in (Q_LEARNING if replays else PPO).items() if ours in setting}
    if not replays:
        config |= {"FC_DIM_SIZE": setting.get("core.size"), "GRU_HIDDEN_DIM": setting.get("core.size")}
    steps, key = setting["num_envs"] * setting["unroll_length"], jax.random.PRNGKey(0)
    if replays:  # a buffer of whole unrolls
        config["BUFFER_SIZE"] = setting["replay.capacity"] // setting["unroll_length"]
        config["LEARNING_STARTS"] = 0
        # The baselines update after `batch_size` iterations; a chunk, which restarts, has fewer.
        buffer = functools.partial(module.fbx.make_trajectory_buffer, min_length_time_axis=1)
        module.fbx = types.SimpleNamespace(make_trajectory_buffer=lambda min_length_time_axis, **fields: buffer(**fields))

    def make(iterations: int):
        run = config | {"TOTAL_TIMESTEPS": max(iterations, 0) * steps}
        train = module.make_train(run, MPELogWrapper(jaxmarl.make(name, **arguments))) if replays else module.make_train(run)
        program, seconds = compiled(lambda key: train(key)["runner_state"][0], key)
        return lambda: program(key), seconds

    return Loop(make, steps, empty=True)


def main() -> None:
    """Reads the setting and serves it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a clone of JaxMARL")
    parser.add_argument("--setting", type=json.loads, required=True, help="the fields of a `Setting`, as JSON")
    args = parser.parse_args()
    git = ["git", "-C", str(args.source), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    loop = training(args.source, args.setting["algo"], args.setting["env"], args.setting["config"])
    serve(loop, {"baselines": commit} | versions("jaxmarl", "jax", "jaxlib", "flax", "optax", "distrax", "flashbax"))


if __name__ == "__main__":
    main()
