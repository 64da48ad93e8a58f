"""Trains PPO with Stable-Baselines3 for `hosts.py`, which starts it with the Python of an environment that has it."""

import argparse
import json
import time

import gymnasium
import stable_baselines3
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.vec_env import SubprocVecEnv


def main() -> None:
    """Answers every line of seconds with the speed of training for about that long."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--setting", type=json.loads, required=True)
    setting = parser.parse_args().setting
    config, name = setting["config"], setting["env"].partition(":")[2]
    start = time.perf_counter()
    envs = SubprocVecEnv([lambda: gymnasium.make(name)] * config["num_envs"], "forkserver")
    batch = config["num_envs"] * config["unroll_length"]
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=config["unroll_length"],
        batch_size=batch // config["num_minibatches"],
        n_epochs=config["num_epochs"],
        learning_rate=config["learning_rate"],
        device="cpu",
    )
    model.learn(batch)
    versions = {"stable-baselines3": stable_baselines3.__version__, "torch": torch.__version__}
    print(json.dumps({"compile_seconds": time.perf_counter() - start, "device": "cpu", "versions": versions}), flush=True)
    rate = batch / 2.0
    while True:
        try:
            seconds = float(input())
        except EOFError:
            return
        steps = max(int(seconds * rate) // batch, 1) * batch
        start = time.perf_counter()
        model.learn(steps, reset_num_timesteps=False)
        rate = steps / (time.perf_counter() - start)
        print(json.dumps({"steps_per_second": rate}), flush=True)


if __name__ == "__main__":
    main()
