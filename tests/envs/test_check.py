"""`check`: what is wrong with an environment, in words; and nothing about one that conforms."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli, envs
from msrl_jax.envs.base import Wrapper
from tests.support.corridor import Corridor
from tests.support.leaving import Leaving
from tests.support.slow import mostly_slow


@dataclasses.dataclass(frozen=True)
class Walk:
    """A walk on a line; the steps of a subclass break one rule each."""

    observation_space = envs.Box(-20, 20, (1,))
    action_space = envs.Discrete(2)

    def reset(self, key):
        place = jax.random.uniform(key)
        return place, place[None]

    def step(self, key, state, action):
        place = state + action - 0.5 + 0.1 * jax.random.normal(key)
        return place, place[None], place, jnp.abs(place) > 3, jnp.asarray(False)


class TooFar(Walk):
    """Its rewards are no numbers, either."""

    observation_space = envs.Box(-2, 2, (1,))

    def step(self, key, state, action):
        state, obs, _, *ends = super().step(key, state, action)
        return state, obs, jnp.inf * jnp.sign(state), *ends


class NotANumber(Walk):
    def step(self, key, state, action):
        state, obs, reward, *ends = super().step(key, state, action)
        return state, jnp.log(obs - 1), reward, *ends


class OwnDice(Walk):
    def step(self, key, state, action):
        state, obs, reward, *ends = super().step(key, state, action)
        return state, obs, reward + np.random.default_rng().normal(), *ends


class Talking(Walk):
    def step(self, key, state, action):
        jax.debug.print("at {}", state)
        return super().step(key, state, action)


class Rounding(Walk):
    """The batch has an axis of its own, which a step should know nothing of."""

    def step(self, key, state, action):
        state, obs, reward, *ends = super().step(key, state, action)
        return state, obs, within_batch(reward), *ends


@jax.custom_batching.custom_vmap
def within_batch(reward):
    return reward


@within_batch.def_vmap
def _(size, batched, reward):
    return reward - reward.mean(), True


class Stuck(Walk):
    def action_mask(self, state):
        return jnp.array([True, True]) & (state < 1)


class Own(Walk):
    """Its own copies forget the final observations."""

    def vectorize(self, num_envs):
        copies = envs.Vectorized(Walk(), num_envs)  # pyright: ignore

        class Forgetful(type(copies)):
            def step(self, state, action):
                state, t = super().step(state, action)
                return state, t._replace(final_obs=t.obs + 1)

        return Forgetful(copies.env, num_envs)


BROKEN = {
    TooFar: [
        r"the observation of TooFar.step is -?\d.* at index \(0,\), (below|above) the bounds of its observation_space, Box",
        "the reward of TooFar.step is -?inf in 80 of 80 steps",
    ],
    NotANumber: ["the observation of NotANumber.step has nan; observations must be finite"],
    OwnDice: ["OwnDice returned a different (step|reward) in a second run with the same keys and actions; draw all random"],
    Talking: ["Talking has side effects .* return values in the state"],
    Stuck: ["Stuck.action_mask allows no action in a state in which the episode continues; allow at least one"],
    Own: ["obs and final_obs of Own.vectorize.*differ in steps that do not end an episode"],
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long) if kind in (OwnDice, Talking, Own) else kind for kind in BROKEN],
    ids=lambda kind: kind.__name__,
)
def test_what_is_wrong_is_named(kind, capfd):
    report = envs.check(kind(), steps=40, num_envs=2)
    assert not report.ok and str(report).startswith(f"{kind.__name__} has ")
    for message in BROKEN[kind]:
        assert any(re.match(message, problem) for problem in report.problems), report
    capfd.readouterr()


class Unfair:
    """A game of players 1 and 2 in which nobody loses."""

    agents, observation_space, action_space = ("one", "two"), envs.Box(0, 9, (1,)), envs.Discrete(2)

    def reset(self, key):
        return jnp.int32(0), jnp.zeros((2, 1))

    def step(self, key, state, action):
        return state + 1, jnp.full((2, 1), state + 1.0), jnp.array([1.0, 0.0]), jnp.full(2, state >= 5), jnp.asarray(False)

    def to_move(self, state):
        return state % 2 + 1

    def action_mask(self, state):
        return jnp.array([[True, True], [True, False]])


def test_the_turns_and_the_rewards_of_games_are_checked():
    assert envs.check(Unfair(), steps=10, num_envs=2).problems == (
        "Unfair.to_move is 2 in a game that continues; return 0 or 1, the number of an agent",
        "the rewards of Unfair.step sum to 1; a two-player game must be zero-sum",
    )


@pytest.mark.long
def test_pooled_resets_hide_nothing():
    report = envs.check(envs.ResetPool(Rounding(), 4), steps=20)
    message = "the reward of Rounding.step differs under jax.vmap"
    assert any(problem.startswith(message) for problem in report.problems), report
    assert any("over 4 devices returns a different reward" in problem for problem in report.problems), report


def test_shapes_that_do_not_fit_are_the_only_problem():
    class Wide(Walk):
        observation_space = envs.Box(-20, 20, (2,))

    (problem,) = envs.check(Wide()).problems
    assert problem.startswith("the observation of Wide.reset has a value of float32[1], but its observation_space has ")


CONFORMING = {
    "one": Walk(),
    "pool": envs.ResetPool(Walk(), 4),
    "ends": Corridor(),
    "agents": Leaving(),
    "name": "RockPaperScissors",
}


@pytest.mark.parametrize("kind", mostly_slow(CONFORMING, "agents"))
def test_an_environment_that_conforms_has_no_problems(kind):
    report = envs.check(CONFORMING[kind], steps=40)
    assert report.ok and report.steps == 160 and report.episodes > 0
    assert str(report).splitlines()[0] == f"{report.name} conforms; 160 random steps, {report.episodes} episodes ended"


@pytest.mark.long
def test_the_command_line_tells_and_exits_accordingly(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_checked_walks.py").write_text("from tests.envs.test_check import TooFar, Walk\n")
    monkeypatch.chdir(tmp_path)
    small = ["--steps", "20", "--num-envs", "2"]
    assert cli.main(["check-env", "my_checked_walks:Walk", *small]) == 0
    assert capsys.readouterr().out.startswith("Walk conforms; 40 random steps, ")
    assert cli.main(["check-env", "my_checked_walks:TooFar", *small]) == 1
    assert "problem: the observation of TooFar.step is " in capsys.readouterr().out
    assert cli.main(["check-env", "my_checked_walks:Wlk", *small]) == 2
    assert "(did you mean 'Walk'?)" in capsys.readouterr().err


class Branching(Walk):
    def step(self, key, state, action):
        if action == 0:
            state = state - 1
        return super().step(key, state, action)


def test_a_line_that_cannot_be_traced_is_named_with_a_remedy():
    (problem,) = envs.check(Branching()).problems
    line = f"{__file__}:{Branching.step.__code__.co_firstlineno + 1} (step), `if action == 0:`"
    assert f"Branching.step fails at {line}" in problem and "use jnp.where" in problem and "vector.py" not in problem


def test_what_is_no_array_is_named():
    class Words(Walk):
        def step(self, key, state, action):
            state, obs, _, *ends = super().step(key, state, action)
            return state, obs, "1", *ends

    with pytest.raises(TypeError, match=r"reward of Words\.step is '1'; return numbers or arrays of them"):
        envs.vectorize(Words(), 2)


def wrapped(kind, env):
    """A wrapper of an environment, with whatever other arguments it needs."""
    missing = dataclasses.MISSING
    needed = [f.name for f in dataclasses.fields(kind) if f.init and f.default is missing and f.default_factory is missing]
    return kind(env, *[1 for name in needed if name != "env"])


TAKES_AN_ENVIRONMENT = {
    **{name: functools.partial(wrapped, x) for name, x in vars(envs).items() if isinstance(x, type) and issubclass(x, Wrapper)},
    "vectorize": lambda env: envs.vectorize(env, 2),
    "vectorize_agents": lambda env: envs.vectorize_agents(env, 2),
    "stack_agents": envs.stack_agents,
    "by its name": lambda env: envs.TimeLimit(max_steps=5, env=env),
}


@pytest.mark.parametrize("use", TAKES_AN_ENVIRONMENT.values(), ids=TAKES_AN_ENVIRONMENT)
def test_a_text_or_a_class_in_place_of_an_environment_is_refused(use):
    with pytest.raises(TypeError, match=r"'CartPole-v1' is a string; pass the result of msrl_jax\.envs\.make\('CartPole-v1'\)"):
        use("CartPole-v1")
    with pytest.raises(TypeError, match=r"the environment Walk is a class; pass an instance, Walk\(...\)"):
        use(Walk)


@pytest.mark.parametrize(("kind", "value"), [("dtype", "strict"), ("rank", "raise")])
def test_settings_of_jax_that_forbid_promotion_are_refused(kind, value):
    setting = getattr(jax, f"numpy_{kind}_promotion")
    with setting(value), pytest.raises(ValueError, match=rf"jax_numpy_{kind}_promotion='{value}': .* call this under jax"):
        msrl.train("ppo", "CartPole-v1", total_steps=100)
