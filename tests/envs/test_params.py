"""Parameters as data: the same as constants, drawn anew in each episode, on ramps, inside of wrappers; and what is refused."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs import param_distributions
from msrl_jax.envs.param_sources import means
from tests.support.leaving import Leaving
from tests.support.slow import mostly_slow

E, T = 8, 30


@dataclasses.dataclass(frozen=True)
class Weighing:
    """Shows its parameters; an episode has `steps` steps."""

    weight: float = 1.0
    steps: int = 3
    grid: tuple[float, ...] = (0.0, 0.0)
    size: int = 2
    dead: float = 0.0
    observation_space = envs.Box(-np.inf, np.inf, (4,))
    action_space = envs.Discrete(2)

    @property
    def default_params(self):
        names = ("weight", "steps", "grid", "size", "dead")
        return {name: np.float32(self.grid) if name == "grid" else getattr(self, name) for name in names}

    def with_params(self, params):
        return dataclasses.replace(self, **params)

    def observe(self, time):
        parts = [jnp.float32(self.weight), jnp.float32(self.steps), *jnp.asarray(self.grid, jnp.float32)]
        return jnp.stack(parts[: 2 + self.size])

    def reset(self, key):
        return jnp.int32(0), self.observe(0)

    def step(self, key, state, action):
        time = state + 1
        return time, self.observe(time), self.weight * action, time >= self.steps, jnp.asarray(False)

    def action_mask(self, state):
        return jnp.stack([jnp.asarray(True), jnp.asarray(self.weight) > 0])


class Loaded(Weighing):
    """Pays less for what is dead."""

    def step(self, key, state, action):
        state, obs, reward, *ends = super().step(key, state, action)
        return state, obs, reward - self.dead, *ends


def played(env, num_envs=E, steps=T, key=0):
    """The first observations, all time steps with action 0, and the last state."""
    venv = envs.vectorize(env, num_envs)
    zeros = jax.tree.map(lambda x: jnp.zeros((num_envs, *x.shape), x.dtype), envs.spaces.struct(env.action_space))

    def run():
        state, obs = venv.reset(jax.random.key(key))
        state, t = jax.lax.scan(lambda state, _: venv.step(state, zeros), state, length=steps)
        return obs, t, state

    return jax.device_get(jax.jit(run)())


FIXED = {
    "CartPole-v1": {"length": 0.7, "gravity": 11, "max_steps_in_episode": 6},
    "Pendulum-v1": {"g": 9.0, "m": 1.5, "max_steps_in_episode": 7},
    "Breakout-MinAtar": {"max_steps_in_episode": 5},
}


@pytest.mark.parametrize("name", mostly_slow(FIXED, "CartPole-v1"))
def test_fixed_parameters_as_data_are_those_as_constants(name):
    data, constants = envs.RandomizeParams(envs.make(name), FIXED[name]), envs.make(name, **FIXED[name])
    (first, steps, _), (expected_first, expected, _) = played(data), played(constants)
    chex.assert_trees_all_equal((first, steps.truncated), (expected_first, expected.truncated))
    chex.assert_trees_all_close(steps, expected, rtol=1e-5, atol=1e-6)


def test_parameters_are_drawn_at_each_reset_and_kept_for_the_episode():
    given = {"weight": envs.log_uniform(0.01, 100), "steps": envs.uniform(2, 4), "grid": envs.choice([[1.0, 2.0], [3.0, 4.0]])}
    first, t, _ = played(envs.RandomizeParams(Weighing(), given), num_envs=64)
    shown = np.concatenate([first.obs[None], t.obs.obs])  # the parameters of the episode that each next step belongs to
    ended = t.terminated
    for copy in range(64):
        starts = [0, *(np.flatnonzero(ended[:, copy]) + 1)]
        lengths = np.diff(starts)
        for start, length in zip(starts, lengths, strict=False):
            episode = shown[start : start + length, copy]
            assert (episode == episode[0]).all() and length == episode[0, 1]
    episodes = shown[np.concatenate([np.ones((1, 64), bool), ended])]
    weight, steps, grid = episodes[:, 0], episodes[:, 1], episodes[:, 2:]
    assert len(np.unique(weight)) == len(weight) > 500 and (weight >= 0.01).all() and (weight <= 100).all()
    assert abs(np.log10(weight).mean()) < 0.15 and abs(np.log10(weight).var() - 16 / 12) < 0.15
    assert set(steps) == {2.0, 3.0, 4.0} and min(np.unique(steps, return_counts=True)[1]) > 0.25 * len(steps)
    assert set(map(tuple, grid)) == {(1.0, 2.0), (3.0, 4.0)} and abs((grid[:, 0] == 1).mean() - 0.5) < 0.1


def test_parameters_are_drawn_independently_of_each_other():
    given = {"weight": envs.uniform(0, 1), "dead": envs.uniform(0, 1), "steps": envs.uniform(1, 1000)}
    env = envs.RandomizeParams(Loaded(), given)
    drawn = jax.vmap(lambda key: env.reset(key)[0].params)(jax.random.split(jax.random.key(0), 1000))
    between = np.corrcoef([np.asarray(drawn[name], float) for name in given])
    assert np.abs(between - np.eye(3)).max() < 5 / np.sqrt(1000)


def test_parameters_are_drawn_independently_of_first_states():
    class Starting(Weighing):
        def reset(self, key):
            state, obs = super().reset(key)
            return state, obs.at[0].set(jax.random.uniform(jax.random.split(key)[0]))

    env = envs.RandomizeParams(Starting(), {"weight": envs.uniform(0, 1)})
    state, obs = jax.vmap(env.reset)(jax.random.split(jax.random.key(0), 1000))
    assert abs(np.corrcoef(state.params["weight"], obs[:, 0])[0, 1]) < 5 / np.sqrt(1000)


def test_a_function_draws_what_it_likes():
    def heavier(key):
        steps = jax.random.randint(key, (), 1, 4)
        return {"steps": steps, "weight": 10.0 * steps}

    _, t, state = played(envs.RandomizeParams(Weighing(), heavier))
    np.testing.assert_array_equal(t.obs.obs[..., 0], 10 * t.obs.obs[..., 1])
    drawn = means(state.env_state)
    expected = state.env_state.params["weight"].mean()
    assert drawn["env_params/weight"].mean() == pytest.approx(float(expected))
    assert float(drawn["env_params/weight"].count) == E


def test_ramps_follow_the_steps_of_all_copies():
    given = {"weight": envs.uniform(envs.ramp(0, 8, 64), envs.ramp(0, 8, 64)), "steps": envs.ramp(1, 3, 80)}
    env = envs.RandomizeParams(Weighing(), given)
    first, t, state = played(env, steps=14)
    np.testing.assert_array_equal(first.obs[:, 0], 0)
    begun = t.obs.obs[:, 0][t.terminated[:, 0]]
    # A step of 8 copies is 8 steps of the run, and the reset in step i comes after 8 i of them.
    weight, length = (lambda i: min(8 * i / 64, 1) * 8), (lambda i: round(1 + 2 * min(8 * i / 80, 1)))
    when = [0]  # the first episodes have one step
    while when[-1] + length(when[-1]) < 14:
        when.append(when[-1] + length(when[-1]))
    expected = [[weight(i), length(i)] for i in when]
    np.testing.assert_allclose(begun[:, :2], expected, rtol=1e-6)
    taken = state.source.taken
    np.testing.assert_array_equal(taken.low, 14 * 8)


def test_a_long_ramp_does_not_wrap():
    env = envs.RandomizeParams(Weighing(), {"weight": envs.ramp(0.0, 4.0, 2**41)})
    venv = envs.vectorize(env, 2)
    state, _ = venv.reset(jax.random.key(0))
    taken = jax.tree.map(lambda x, word: jnp.full_like(x, word), state.source.taken, type(state.source.taken)(2**8, 0))
    state = state._replace(source=state.source._replace(taken=taken))
    for _ in range(3):
        state, t = jax.jit(venv.step)(state, jnp.zeros(2, jnp.int32))
    np.testing.assert_allclose(t.obs.obs[:, 0], 2.0, rtol=1e-6)


@pytest.mark.parametrize("wrap", mostly_slow(["TimeLimit", "FrameStack", "ResetPool"], "ResetPool"))
def test_wrappers_stand_inside_and_outside(wrap):
    around = {
        "TimeLimit": lambda env: envs.TimeLimit(env, 3),
        "FrameStack": lambda env: envs.FrameStack(env, 2),
        "ResetPool": lambda env: envs.ResetPool(env, 4),
    }[wrap]
    given = {"weight": envs.uniform(1, 2)}
    inside = played(envs.RandomizeParams(around(Weighing()), given))
    outside = played(around(envs.RandomizeParams(Weighing(), given)))
    chex.assert_trees_all_equal(inside[:2], outside[:2])
    assert len(np.unique(inside[1].obs.obs[..., 0])) > 2 * E


class Timed(Leaving):
    """Three agents; the limit is a parameter."""

    @property
    def default_params(self):
        return {"limit": self.limit}

    def with_params(self, params):
        return Timed(self.leave, **params)


@pytest.mark.long
def test_several_agents():
    venv = envs.vectorize(envs.RandomizeParams(Timed((9, 9, 9)), {"limit": envs.uniform(2, 5)}), 64)

    def step(state, _):
        limit = state.env_state.params["limit"]
        state, t = venv.step(state, jnp.zeros((64, 3), jnp.int32))
        return state, (t.ended, limit)

    state, _ = venv.reset(jax.random.key(0))
    state, (ended, limit) = jax.jit(lambda state: jax.lax.scan(step, state, length=40))(state)
    ended, limit = np.asarray(ended), np.asarray(limit)
    for copy in range(64):
        ends = np.flatnonzero(ended[:, copy])
        np.testing.assert_array_equal(np.diff([-1, *ends]), limit[ends, copy])
    assert set(limit.ravel()) == {2, 3, 4, 5}
    assert "env_params/limit" in venv.pop_episodes(state)[1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("uniform:0.25:1", envs.uniform(0.25, 1)),
        ("log_uniform(1e-3, 1)", envs.log_uniform(1e-3, 1)),
        ("choice:1:2:4", envs.choice([1, 2, 4])),
        ("choice([True, False])", envs.choice([True, False])),
        ("-9.8", -9.8),
        ("ramp:0:1:1e6", envs.ramp(0, 1, 1_000_000)),
        ("uniform(0, ramp(1, 2, 50))", envs.uniform(0, envs.ramp(1, 2, 50))),
        ("[0, 0, -9.8]", [0, 0, -9.8]),
        ("uniform([1, 2], [3, 4])", envs.uniform([1, 2], [3, 4])),
    ],
)
def test_values_as_text(text, value):
    assert param_distributions.parse_param("x", text) == value
    assert param_distributions.parse_param("x", param_distributions.text(value)) == value
    assert param_distributions.parse_many(f"a={text},b=1") == {"a": value, "b": 1}


class Fixed:
    """A wrapper that is no dataclass."""

    def __init__(self, env):
        self.env = env
        self.observation_space, self.action_space, self.reset, self.step = (
            env.observation_space,
            env.action_space,
            env.reset,
            env.step,
        )


class Own(Weighing):
    def vectorize(self, num_envs):
        return envs.Vectorized(self, num_envs)


REFUSED = {
    "name": ({"wieght": 1}, r"Weighing has no parameter 'wieght' \(did you mean 'weight'\?\) that can be data; it has weight"),
    "shapes": ({"weight": 1, "size": 2}, "size of Weighing cannot be data, because shapes or Python control flow"),
    "no effect": ({"dead": 1.0}, "dead of Weighing has no effect on reset and step; remove it from env_params"),
    "type": ({"steps": 1.5}, "Weighing: steps=1.5 does not fit the parameter, which is int32"),
    "shape": ({"grid": 1.0}, r"Weighing: grid=1 does not fit the parameter, which is float32\[2\]"),
    "order": ({"weight": envs.uniform(2, 1)}, r"weight=uniform\(2, 1\): the bounds are 2.0 and 1.0; use low <= high"),
    "ramps": (
        {"weight": envs.uniform(0, envs.ramp(1, -1, 50))},
        r"weight=uniform\(0, ramp\(1, -1, 50\)\): the bounds after 50 steps are 0.0 and -1.0; use low <= high",
    ),
    "options": ({"weight": envs.choice([])}, r"weight=choice\(\[\]\) has no options"),
    "text": ({"weight": "unifrom:0:1"}, r"there is no 'unifrom' \(did you mean 'uniform'\?\)"),
    "arguments": ({"weight": "uniform:1"}, r"weight=uniform\(1\): write uniform\(low, high\)"),
    "syntax": ("weight", "cannot read 'weight' as parameters; write name=value,name=uniform:0.25:1"),
    "function": (lambda key: {"weight": jnp.zeros(3)}, r"env_params returned float32\[3\] for weight of Weighing"),
    "level": (envs.Curriculum(lambda key, level: {"weight": 1.0}, "easy"), "the level of a Curriculum holds easy; use numbers"),
    "nothing": ({}, "env_params of Weighing is empty"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_in_words(case):
    given, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        envs.RandomizeParams(Weighing(), given)


def test_environments_without_parameters_as_data_are_refused():
    with pytest.raises(TypeError, match="Leaving has no parameters as data"):
        envs.RandomizeParams(Leaving(), {"limit": 3})
    with pytest.raises(TypeError, match="Fixed wraps an environment with parameters as data, but is not a dataclass"):
        envs.RandomizeParams(Fixed(Weighing()), {"weight": 3})
    with pytest.raises(TypeError, match="Own creates its own parallel copies, so its parameters cannot be data here"):
        envs.RandomizeParams(Own(), {"weight": 3})
    with pytest.raises(ValueError, match="the parameters of Weighing are already drawn; pass all of them"):
        envs.RandomizeParams(envs.TimeLimit(envs.RandomizeParams(Weighing(), {"weight": 1}), 5), {"steps": 3})
    with pytest.raises(TypeError, match="the function of env_params of Weighing returned None; return a mapping"):
        envs.RandomizeParams(Weighing(), lambda key: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(TypeError, match="env_params=3 of Weighing: pass a mapping name -> value, a function of a key, or"):
        envs.RandomizeParams(Weighing(), 3)
    with pytest.raises(ValueError, match="masscart of CartPole-v1 has no effect on reset and step"):
        envs.RandomizeParams(envs.make("CartPole-v1"), {"masscart": 1.5})


@pytest.mark.slow
def test_an_environment_with_drawn_parameters_conforms():
    report = envs.check(envs.RandomizeParams(envs.make("CartPole-v1"), {"length": envs.uniform(0.25, 1)}), steps=40)
    assert report.ok and not report.notes
