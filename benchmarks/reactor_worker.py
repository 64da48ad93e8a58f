"""Ray's actors for `reactor.py`, which starts this with the Python of an environment that has Ray; and what both sides share.

The first line of output tells the versions. A line of input is an object with a number of `seconds` and what is called, a
`step` or an `unroll`, and is answered with steps per second.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np

DISCOUNT, EPSILON, STEP_SIZE = 0.99, 0.2, 0.005
OBSERVATION, HIDDEN, ACTIONS = 16, 64, 4


class Frames(gymnasium.Env):
    """Stands in for Atari: observations are four frames of 84x84, made beforehand, so a step costs next to nothing."""

    def __init__(self):
        self.observation_space = gymnasium.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(6)
        self._made = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """Begins an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._made[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Returns the next stack; an episode has 1,000 steps."""
        self._steps += 1
        return self._made[self._steps % 16], 1.0, False, self._steps == 1000, {}


class World:
    """What the agents of the comparison of inference see: a number of vectors that move by their actions."""

    def __init__(self, agents: int):
        self._agents = np.arange(agents)
        self.obs = np.zeros((agents, OBSERVATION), np.float32)

    def __call__(self, action: np.ndarray) -> np.ndarray:
        """Takes the actions `[A]`, and returns the next observations `[A, OBSERVATION]`."""
        self.obs = 0.9 * self.obs
        self.obs[self._agents, action] += 1
        return self.obs


def networks(agents: int) -> list[list[np.ndarray]]:
    """The weights of each agent's own policy: two hidden layers with tanh."""
    rng, sizes = np.random.default_rng(0), (OBSERVATION, HIDDEN, HIDDEN, ACTIONS)
    shapes = list(itertools.pairwise(sizes))
    return [[(rng.normal(size=s) / s[0] ** 0.5).astype(np.float32) for s in shapes] for _ in range(agents)]


class Simulators:
    """Environments of one of Ray's actors, which start again when an episode ends."""

    def __init__(self, env: str, params: dict[str, Any], num_envs: int, seed: int):
        self._envs: list[Any] = [Frames() if env == "frames" else gymnasium.make(env, **params) for _ in range(num_envs)]
        self._rng = np.random.default_rng(seed)
        self._obs = np.stack([env.reset(seed=int(self._rng.integers(2**31)))[0] for env in self._envs])

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, ...]:
        """Steps each environment once; returns observations, rewards and what ended."""
        obs, rewards = np.empty_like(self._obs), np.empty(len(self._envs), np.float32)
        ended = np.empty((2, len(self._envs)), bool)
        for k, env in enumerate(self._envs):
            obs[k], rewards[k], *ended[:, k], _ = env.step(actions[k])
            if ended[:, k].any():
                obs[k] = env.reset()[0]
        self._obs = obs
        return obs, rewards, *ended

    def unroll(self, length: int) -> list[np.ndarray]:
        """Steps each environment `length` times with random actions; returns everything, `[T, E, ...]`."""
        actions = self._rng.integers(self._envs[0].action_space.n, size=(length, len(self._envs)))
        return [np.stack(x) for x in zip(*map(self.step, actions), strict=True)]

    def errors(self, q: np.ndarray, length: int) -> np.ndarray:
        """Acts by a table `[S, A]` for `length` steps; returns the sums of the temporal difference errors in its form."""
        total, rows = np.zeros_like(q), range(len(self._envs))
        for _ in range(length):
            obs = self._obs
            action = q[obs].argmax(1)
            explores = self._rng.random(len(rows)) < EPSILON
            action[explores] = self._rng.integers(q.shape[1], size=explores.sum())
            for k, env in enumerate(self._envs):
                after, reward, terminated, truncated, _ = env.step(int(action[k]))
                total[obs[k], action[k]] += reward + DISCOUNT * (not terminated) * q[after].max() - q[obs[k], action[k]]
                self._obs[k] = env.reset()[0] if terminated or truncated else after
        return total


class Agent:
    """The policy of one agent."""

    def __init__(self, weights: list[np.ndarray]):
        self._weights = weights

    def act(self, obs: np.ndarray) -> int:
        """The most probable action."""
        *hidden, last = self._weights
        for w in hidden:
            obs = np.tanh(obs @ w)
        return int((obs @ last).argmax())


def calls(setting: dict[str, Any], ray: Any) -> dict[str, tuple[Callable[[], Any], int]]:
    """What a setting calls, a `step` or an `unroll` of all actors, and how many steps that is."""
    config = setting["config"]
    if setting["algo"] == "inference":
        world, actions = World(config["agents"]), np.zeros(config["agents"], int)
        agents = [ray.remote(Agent).remote(w) for w in networks(config["agents"])]

        def infer() -> None:
            obs = world(actions)
            actions[:] = ray.get([agent.act.remote(row) for agent, row in zip(agents, obs, strict=True)])

        return {"step": (infer, 1)}
    per, length = config["num_envs"] // config["num_workers"], config["unroll_length"]
    name, params = config["peer_env"], config.get("params", {})
    actors = [ray.remote(Simulators).remote(name, params, per, k) for k in range(config["num_workers"])]
    unroll_steps = length * config["num_envs"]
    if setting["algo"] == "simulate":
        some = itertools.cycle(np.random.default_rng(0).integers(2, size=(64, per)))
        return {
            "step": (lambda: ray.get([a.step.remote(next(some)) for a in actors]), config["num_envs"]),
            "unroll": (lambda: ray.get([a.unroll.remote(length) for a in actors]), unroll_steps),
        }
    q = np.ones((16, 4), np.float32)

    def learn() -> None:
        q[:] += STEP_SIZE * sum(ray.get([a.errors.remote(q, length) for a in actors]))

    return {"unroll": (learn, unroll_steps)}


def rate(call: Callable[[], Any], steps: int, seconds: float) -> float:
    """Steps per second of calls that take at least `seconds`."""
    start, done = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        call()
        done += steps
    return done / (time.perf_counter() - start)


def main() -> None:
    """Answers requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setting", type=json.loads, required=True, help="the fields of a `Setting`, as JSON")
    args = parser.parse_args()
    # Answers alone go to the output; what Ray and its processes print goes to the errors.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    import ray

    # Ray places an actor where a core is free: more are declared than there are.
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False, logging_level="error")
    made = calls(args.setting, ray)
    for call, _ in made.values():
        call()
    versions = {name: importlib.metadata.version(name) for name in ("ray", "gymnasium", "numpy")}
    print(json.dumps({"versions": {"python": platform.python_version()} | versions}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"steps_per_second": rate(*made[request["call"]], request["seconds"])}), file=answers)
    ray.shutdown()


if __name__ == "__main__":
    main()
