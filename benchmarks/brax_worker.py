"""Trains with Brax's PPO for `suite_trainers.py`, which starts it with the Python of an environment that has Brax.

A line of input is a seed, answered with the greedy return after training, the environment steps and the seconds of the run.
"""

import argparse
import json
import os
import platform
import sys
import time
from importlib import import_module, metadata
from typing import Any

import jax
from brax.training.agents.ppo import networks, train


def environment(name: str) -> tuple[Any, dict[str, Any]]:
    """A task of Brax or Playground, and what its training needs in addition to settings."""
    suite, task = name.split(":")
    if suite == "brax":
        return import_module("brax.envs").get_environment(task), {"episode_length": 1000}
    package = import_module("mujoco_playground")
    config = package.registry.get_default_config(task)
    config.update({"impl": "jax"} if "impl" in config else {})
    wrapping = {"episode_length": config.episode_length, "wrap_env_fn": package.wrapper.wrap_for_brax_training}
    return package.registry.load(task, config), wrapping


def run(task: dict[str, Any], seed: int) -> dict[str, Any]:
    """One run: its greedy return, its environment steps and its seconds."""
    given, found = task["settings"], []
    layers, activation = given["hidden_sizes"], getattr(jax.nn, given["activation"])
    start = time.perf_counter()
    env, wrapping = environment(task["env"])
    train.train(
        env,
        num_timesteps=task["total_steps"],
        num_envs=given["num_envs"],
        unroll_length=given["unroll_length"],
        batch_size=given["num_envs"] // given["num_minibatches"],
        num_minibatches=given["num_minibatches"],
        num_updates_per_batch=given["num_epochs"],
        learning_rate=given["learning_rate"],
        discounting=given["discount"],
        gae_lambda=given["gae_lambda"],
        clipping_epsilon=given["clip_ratio"],
        entropy_cost=given["entropy_coef"],
        max_grad_norm=given["max_grad_norm"],
        normalize_observations=given["normalize_observations"],
        reward_scaling=task["reward_scaling"],
        network_factory=lambda *args, **kwargs: networks.make_ppo_networks(
            *args, policy_hidden_layer_sizes=layers, value_hidden_layer_sizes=layers, activation=activation, **kwargs
        ),
        num_evals=1,
        num_eval_envs=task["episodes"],
        deterministic_eval=True,
        seed=seed,
        progress_fn=lambda steps, metrics: found.append((steps, metrics)),
        **wrapping,
    )
    steps, metrics = found[-1]
    greedy, seconds = float(metrics["eval/episode_reward"]), time.perf_counter() - start
    return {"return": greedy, "steps": int(steps), "seconds": seconds}


def main() -> None:
    """Answers requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", type=json.loads, required=True, help="the fields of a `Task`, as JSON")
    args = parser.parse_args()
    # Answers alone go to the output; what libraries print goes to the errors.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    versions = {name: metadata.version(name) for name in ("jax", "brax", "playground", "mujoco-mjx")}
    about = {"device": jax.devices()[0].device_kind, "versions": {"python": platform.python_version()} | versions}
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        print(json.dumps(run(args.setting, json.loads(line))), file=answers)


if __name__ == "__main__":
    main()
