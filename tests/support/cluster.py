"""A process of a run on several: `python -m tests.support.cluster ADDRESS COUNT INDEX DEVICES FOLDER CASE...`.

Each case is ALGORITHM/POLICY. Every process writes what it has at the end to FOLDER/CASE.INDEX.npz.
"""

import re
import sys
from pathlib import Path

import jax
import numpy as np

ENV = "CartPole-v1:max_steps_in_episode=30"
CONFIGS = {
    "ppo": {
        "num_envs": 8,
        "unroll_length": 8,
        "num_epochs": 1,
        "num_minibatches": 2,
        "hidden_sizes": (8,),
        "normalize_observations": True,
    },
    "dqn": {
        "num_envs": 8,
        "unroll_length": 4,
        "hidden_sizes": (8,),
        "replay.learning_starts": 32,
        "replay.capacity": 256,
        "batch_size": 16,
    },
    "impala": {"num_envs": 8, "unroll_length": 8, "hidden_sizes": (8,)},
}
ITERATIONS, CHUNK = 6, 2


def train(case, devices=None):
    """Trains for a few iterations.

    Args:
      case: ALGORITHM/POLICY; ALGORITHM+curriculum changes parameters of the environment after every chunk.
      devices: the devices; all of all processes if None.

    Returns:
      Everything that must not depend on processes: the state's leaves, registers, columns of the history, evaluations.
    """
    import msrl_jax as msrl

    name, policy = case.split("/")
    algo, _, changes = name.partition("+")
    config, options = CONFIGS[algo], {}
    if changes:
        length = msrl.envs.uniform(0.25, msrl.envs.ramp(0.5, 1.0, 300))
        options["env_params"] = {"length": length, "max_steps_in_episode": 9}
        options["callbacks"] = [lambda tick: tick.set_env_params({"max_steps_in_episode": tick.iteration})]
    result = msrl.train(
        algo,
        ENV,
        policy=policy,
        total_steps=ITERATIONS * config["num_envs"] * config["unroll_length"],
        chunk=CHUNK,
        eval_episodes=2,
        seed=3,
        progress=False,
        devices=devices,
        **options,
        **config,
    )
    arrays = {f"state{jax.tree_util.keystr(path)}": x for path, x in jax.tree.leaves_with_path(result.state)}
    arrays |= {f"register {i}": x for i, x in enumerate(result.registers)}
    arrays |= {name: x for name, x in result.history.items() if name not in ("seconds", "steps_per_second")}
    arrays["returns of the evaluation"] = result.evaluation.returns
    is_key = lambda x: jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return {name: np.asarray(jax.random.key_data(x) if is_key(x) else x) for name, x in arrays.items()}


def file_of(case, index):
    """The file of a process with what it has at the end of a case."""
    return f"{re.sub(r'[^A-Za-z0-9=]+', '_', case)}.{index}.npz"


def main(address, count, index, devices, folder, *cases):
    from msrl_jax.run import processes

    jax.config.update("jax_num_cpu_devices", int(devices))
    processes.start(address, int(count), int(index))
    for case in cases:
        np.savez(Path(folder) / file_of(case, index), **train(case))


if __name__ == "__main__":
    main(*sys.argv[1:])
