"""Goal-conditioned environments: through wrappers, and in words what is none."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs.goals import goals_of
from msrl_jax.envs.wrappers import EnvironmentWrapper
from tests.support.bits import Bits


class Legal(Bits):
    def action_mask(self, state):
        return jnp.ones(self.size, bool)


def test_goals_are_read_and_replaced_with_masks_and_through_wrappers():
    env = envs.ResetPool(envs.TimeLimit(Legal(), 3), 2)
    goals = goals_of(env)
    _, obs = jax.jit(envs.vectorize(env, 8).reset)(jax.random.key(0))
    assert isinstance(obs, envs.MaskedObservation)
    new = goals.replace(obs, goals.achieved(obs))
    np.testing.assert_array_equal(new.obs["desired_goal"], obs.obs["achieved_goal"])
    np.testing.assert_array_equal(new.action_mask, obs.action_mask)
    jax.tree.map(np.testing.assert_array_equal, new.obs | {"desired_goal": goals.desired(obs)}, obs.obs)
    reward, reached = jax.vmap(goals.reward)(goals.achieved(obs), goals.desired(obs))
    np.testing.assert_array_equal(reached, (obs.obs["achieved_goal"] == obs.obs["desired_goal"]).all(-1))
    np.testing.assert_array_equal(reward, np.where(reached, 0, -1))


class Plain(Bits):
    @property
    def goal_reward(self):
        raise AttributeError("goal_reward")


class Short(Bits):
    @property
    def observation_space(self):
        return envs.Dict(super().observation_space.spaces | {"desired_goal": envs.Box(0, 1, (2,))})


class Vague(Bits):
    def goal_reward(self, achieved, desired):
        return (achieved == desired).sum(), (achieved == desired)


class Unfinished(Bits):
    def goal_reward(self, achieved, desired):
        return None, (achieved == desired).all()


class Single(Bits):
    def goal_reward(self, achieved, desired):
        return (achieved == desired).all()


class Seen(Bits):
    def privileged_state(self, state):
        return state.goal


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Plain(), r"Plain has no method goal_reward\(achieved, desired\) -> \(reward, terminated\); add one"),
        (envs.make("CartPole-v1"), r"observations of CartPole-v1 are Box.*Dict with observation, achieved_goal, desired_goal"),
        (envs.FlattenObservation(Bits()), r"observations of Bits are Box.*remove the wrapper that flattens the observations"),
        (Short(), r"achieved_goal of Short has a value of float32\[4\], but desired_goal has float32\[2\]"),
        (Vague(), r"Vague.goal_reward returned int32\[\], bool\[4\]; return the reward, float32\[\], and whether"),
        (Unfinished(), r"Unfinished.goal_reward returned a NoneType, bool\[\]; return the reward, float32\[\], and whether"),
        (Single(), r"Single.goal_reward returned a .*; return the 2 values \(reward, terminated\)"),
        (envs.privileged.with_privileged(Seen()), r"the critic of Seen sees privileged_state.*Unprivileged\(env\)"),
    ],
    ids=lambda x: "" if isinstance(x, str) else type(x).__name__,
)
def test_what_is_no_goal_conditioned_environment_is_named(env, message):
    with pytest.raises(TypeError, match=message):
        goals_of(env)


@dataclasses.dataclass(frozen=True)
class Costly(EnvironmentWrapper):
    env: Any

    def step(self, key, state, action):
        state, obs, reward, _, truncated = self.env.step(key, state, action)
        return state, obs, reward - 0.5, jnp.asarray(False), truncated


def test_a_check_notes_where_steps_and_goals_disagree():
    report = envs.check(Costly(Bits(3)), steps=40)
    assert report.ok and len(report.notes) == 2
    assert report.notes[0].startswith("the reward of Bits.step is -1.5 where its goal_reward is -1.0; relabelled")
    assert report.notes[1] == "Bits.goal_reward terminates where Bits.step does not; they must agree"
