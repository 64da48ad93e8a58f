"""Trains with Ray RLlib for `compare_rllib.py`, which starts it with the Python of an environment that has Ray.

A line of input is a number of seconds to train, answered with environment steps per second; or an object with a seed, a target
and limits, answered with the time that a new run took until the mean return of its last 100 episodes was as high.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections import deque
from typing import Any

STEPS, RETURNS = "num_env_steps_sampled_lifetime", "returns_of_episodes"


def log_return(*, episode: Any, metrics_logger: Any, prev_episode_chunks: Any = None, **_: Any) -> None:
    """RLlib calls this at the end of an episode; its own mean sometimes covers fewer episodes than configured."""
    total = episode.get_return() + sum(chunk.get_return() for chunk in prev_episode_chunks or ())
    metrics_logger.log_value(RETURNS, total, reduce="item_series")


def algorithm(setting: dict[str, Any], options: dict[str, Any], seed: int) -> Any:
    """RLlib's algorithm of a setting, built.

    Args:
      setting: the fields of a `Setting`.
      options: what only RLlib has: `runners`, `vectorize`, `learners`.
      seed: of the run.
    """
    from ray.rllib.algorithms.impala import IMPALAConfig
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    given, runners = setting["config"], options["runners"]
    batch = given["num_envs"] * given["unroll_length"]
    training: dict[str, Any] = {
        "lr": given["learning_rate"],
        "gamma": given["discount"],
        "grad_clip": given["max_grad_norm"],
        "grad_clip_by": "global_norm",
        "train_batch_size_per_learner": batch,
        "entropy_coeff": given["entropy_coef"],
    }
    if setting["algo"] == "ppo":
        config = PPOConfig()
        # RLlib squares errors of values where msrl_jax takes half of the square; its clip is one of the loss.
        training |= {
            "num_epochs": given["num_epochs"],
            "minibatch_size": batch // given["num_minibatches"],
            "use_kl_loss": False,
            "lambda_": given["gae_lambda"],
            "clip_param": given["clip_ratio"],
            "vf_clip_param": float("inf"),
            "vf_loss_coeff": given["value_coef"] / 2,
        }
    else:
        config = IMPALAConfig()
        training |= {"vf_loss_coeff": given["value_coef"]}
    model = DefaultModelConfig(
        fcnet_hiddens=list(given["hidden_sizes"]), fcnet_activation=given["activation"], vf_share_layers=given["shared_torso"]
    )
    config = (
        config.environment(setting["env"].split(":")[1])
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=given["num_envs"] // max(runners, 1),
            rollout_fragment_length=given["unroll_length"],
            gym_env_vectorize_mode=options["vectorize"],
        )
        .learners(num_learners=options["learners"])
        .training(**training)
        .rl_module(model_config=model)
        .callbacks(on_episode_end=log_return)
        .reporting(min_time_s_per_iteration=0)
        .debugging(seed=seed, log_level="ERROR")
    )
    return config.build_algo()


def progress(result: dict[str, Any]) -> tuple[int, list[float]]:
    """The environment steps since the start, and the returns of the episodes that ended in this iteration."""
    found = result["env_runners"]
    returns = found.get(RETURNS, ())  # a series of one is reported as a number
    return int(found.get(STEPS, 0)), [float(x) for x in (returns if isinstance(returns, list | tuple) else [returns])]


class Training:
    """One run that every call continues."""

    def __init__(self, algo: Any):
        """Trains until the run has taken steps, so that all that starts late has started."""
        self._algo, self._steps = algo, 0
        while not self._steps:
            self._steps = progress(algo.train())[0]

    def run(self, seconds: float) -> float:
        """Environment steps per second of whole iterations that take at least `seconds`."""
        start, before = time.perf_counter(), self._steps
        while time.perf_counter() - start < seconds or self._steps == before:
            self._steps = progress(self._algo.train())[0]
        return (self._steps - before) / (time.perf_counter() - start)


def reach(algo: Any, target: float, max_steps: int, max_seconds: float) -> dict[str, Any]:
    """Trains until the mean return of the last 100 episodes is at least `target`, or a limit is reached."""
    start, steps, found = time.perf_counter(), 0, float("nan")
    last: deque[float] = deque(maxlen=100)
    while not found >= target and steps < max_steps and time.perf_counter() - start < max_seconds:
        steps, ended = progress(algo.train())
        last.extend(ended)
        found = sum(last) / len(last) if len(last) == last.maxlen else float("nan")
    return {"seconds": time.perf_counter() - start, "steps": steps, "return": found, "reached": found >= target}


def main() -> None:
    """Answers requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", type=json.loads, required=True, help="the fields of a `Setting`, as JSON")
    parser.add_argument("--options", type=json.loads, required=True, help="what only RLlib has, as JSON")
    args = parser.parse_args()
    # Answers alone go to the output; what Ray and its processes print goes to the errors.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    import ray
    import torch

    torch.set_num_threads(args.options["threads"])
    # Ray places an actor where a core is free, and none would be for the second of two: more are declared than there are.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="error")
    start = time.perf_counter()
    training: Training | None = None
    if args.options["continuing"]:
        training = Training(algorithm(args.setting, args.options, seed=0))
    versions = {name: importlib.metadata.version(name) for name in ("ray", "torch", "gymnasium", "numpy")}
    about = {"device": "cpu", "compile_seconds": time.perf_counter() - start}
    print(json.dumps(about | {"versions": {"python": platform.python_version()} | versions}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if isinstance(request, dict):
            start = time.perf_counter()
            algo = algorithm(args.setting, args.options, request.pop("seed"))
            building = time.perf_counter() - start
            answer = reach(algo, **request) | {"start_seconds": building}
            algo.stop()
        else:
            assert training is not None
            answer = {"steps_per_second": training.run(request)}
        print(json.dumps(answer), file=answers)
    ray.shutdown()


if __name__ == "__main__":
    main()
