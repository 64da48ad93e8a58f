"""Small runs that are interrupted and go on; also a script that can be killed: `python -m tests.support.runs NAME ...`."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from tests.support import processes

ENV = "CartPole-v1:max_steps_in_episode=30"
_OFF = {
    "num_envs": 4,
    "unroll_length": 4,
    "hidden_sizes": (8,),
    "batch_size": 16,
    "replay.learning_starts": 32,
    "replay.capacity": 256,
}
RUNS = {
    "ppo": (
        "ppo",
        ENV,
        {
            "num_envs": 8,
            "unroll_length": 8,
            "num_epochs": 1,
            "num_minibatches": 2,
            "hidden_sizes": (8,),
            "normalize_observations": True,
            "normalize_rewards": True,
            "anneal_learning_rate": True,
        },
    ),
    "recurrent_ppo": (
        "recurrent_ppo",
        ENV,
        {"num_envs": 8, "unroll_length": 8, "num_epochs": 1, "num_minibatches": 2, "hidden_sizes": (8,), "core.size": 4},
    ),
    "dqn": ("dqn", ENV, _OFF | {"replay.priorities": "prioritized", "replay.n_step": 3}),
    "sac": ("sac", "Pendulum-v1", _OFF | {"data_fraction": 0.5}),
    "sac+gru": ("sac", "Pendulum-v1", _OFF | {"replay.learning_starts": 128, "core": "gru:4", "burn_in": 2, "trace_length": 4}),
    "impala": ("impala", ENV, {"num_envs": 8, "unroll_length": 8, "hidden_sizes": (8,)}),
    "a2c": ("a2c", ENV, {"num_envs": 8, "unroll_length": 8, "hidden_sizes": (8,), "core": "gru:4"}),
}
"""Algorithm, environment and config of each run."""

ITERATIONS, CHUNK = 24, 3


def stop_after(iterations):
    """A callback that stops a run."""
    return lambda tick: tick.iteration >= iterations


def cli(*arguments, **options):
    """Starts the command line in a process of its own."""
    command = [sys.executable, "-m", "msrl_jax", *arguments]
    return processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def train(name, folder=None, policy="GPUOnly", *, devices=None, data=None, iterations=ITERATIONS, **options):
    """Trains one of `RUNS`, with everything that a run can have: evaluations, checkpoints and a recording."""
    import msrl_jax as msrl

    algo, env, config = RUNS[name]
    config = config | ({"data": str(data)} if name == "sac" else {}) | {k: options.pop(k) for k in list(options) if k in config}
    per_iteration = config["num_envs"] * config["unroll_length"]
    options = {
        "total_steps": iterations * per_iteration,
        "chunk": CHUNK,
        "eval_episodes": 2,
        "eval_every": 15 * per_iteration,
        "checkpoint_every": 4 * per_iteration,
        "seed": 5,
        "devices": None if devices is None else jax.devices()[:devices],
        "progress": False,
        "out": folder,
    } | options
    return msrl.train(algo, env, policy=policy, **options, **config)


def plain(x):
    """An array or typed keys as NumPy."""
    return np.asarray(jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_same_state(actual, expected):
    """Equal structures, types and bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(plain(x), plain(y), err_msg=jax.tree_util.keystr(path))


def assert_same_run(actual, expected):
    """Equal bits in the state without its data, the registers, the history and the evaluation."""
    without_data = expected.behavior.agent.without_data
    pairs = ("state", *map(without_data, (actual.state, expected.state))), ("registers", actual.registers, expected.registers)
    for kind, mine, theirs in pairs:
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        for (path, x), y in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(theirs), strict=True):
            np.testing.assert_array_equal(plain(x), plain(y), err_msg=f"{kind}{jax.tree_util.keystr(path)}")
    assert actual.history.keys() == expected.history.keys()
    for column in expected.history:
        if column not in ("seconds", "steps_per_second"):
            np.testing.assert_array_equal(actual.history[column], expected.history[column], err_msg=column)
    assert (actual.evaluation is None) == (expected.evaluation is None)
    if expected.evaluation is not None:
        np.testing.assert_array_equal(actual.evaluation.returns, expected.evaluation.returns)


def main(name, policy, folder, data, record):
    """Goes on with the run in a folder, or starts it; prints every tick."""
    from msrl_jax.fragments import program  # noqa: F401 - imports before the clock of the caller starts

    def tick(tick):
        print(tick.iteration, flush=True)

    train(name, Path(folder), policy, devices=4, data=data or None, resume=True, callbacks=[tick], record=record or None)
    print(json.dumps("done"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
