"""Environments of Gymnasium's kind for the tests of workers; the workers import this module."""

import contextlib
import copy
import os
import signal
import time

import gymnasium
import numpy as np


class Counting(gymnasium.Env):
    """Counts the steps of an episode of `length` steps; the reward is the action. Faults at chosen steps of its process."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (), np.float32)

    def __init__(self, length=5, *, raises_at=None, hangs_at=None, dies_at=None, slow=0.0, once=None):
        self.length, self.slow, self.once = length, slow, once
        self.faults = {"raise": raises_at, "hang": hangs_at, "die": dies_at}
        self.taken = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        self.start = self.np_random.random()
        return np.array([self.start, 0.0]), {}

    def step(self, action):
        self.taken += 1
        self.count += 1
        for fault, at in self.faults.items():
            if at == self.taken and self.first_of_all():
                self.fail(fault)
        if self.slow and self.start < 0.5:
            time.sleep(self.slow)
        return np.array([self.start, self.count]), float(action), False, self.count == self.length, {}

    def first_of_all(self):
        if self.once is None:
            return True
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
            return True
        return False

    def fail(self, fault):
        if fault == "raise":
            raise ArithmeticError("the physics diverged")
        if fault == "hang":
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)


class Parts(gymnasium.Env):
    """Observations and actions of several parts."""

    observation_space = gymnasium.spaces.Dict(
        {
            "b": gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(3), gymnasium.spaces.MultiBinary(2))),
            "a": gymnasium.spaces.Box(0, 255, (2, 2), np.uint8),
        }
    )
    action_space = gymnasium.spaces.MultiDiscrete([2, 3])

    def reset(self, *, seed=None, options=None):
        self.observation_space = copy.deepcopy(Parts.observation_space)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), float(action[1]), bool(action[0]), False, {}
