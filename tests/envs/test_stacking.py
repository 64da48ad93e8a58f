"""stack_agents: what is padded, masked and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs

KEY = jax.random.key(0)


class Echo:
    """Observations are constant; the state keeps the actions as the agents' own environment sees them."""

    def __init__(self, observation_spaces, action_spaces, **members):
        self.agents = tuple(observation_spaces)
        self.observation_spaces, self.action_spaces = observation_spaces, action_spaces
        for name, value in members.items():
            setattr(self, name, value)

    def reset(self, key):
        actions = {a: jnp.zeros(space.shape, space.dtype) for a, space in self.action_spaces.items()}
        return actions, self._observe()

    def step(self, key, state, action):
        reward = {a: float(i) for i, a in enumerate(self.agents)}
        flags = {a: jnp.asarray(i == 0) for i, a in enumerate(self.agents)}
        return action, self._observe(), reward, flags, dict.fromkeys(self.agents, jnp.asarray(False))

    def _observe(self):
        return {a: jnp.ones(space.shape, space.dtype) for a, space in self.observation_spaces.items()}


def box(n, low=-1.0, high=1.0):
    return envs.Box(low, high, (n,))


def echo(actions=None, observations=None, **members):
    actions = actions or (envs.Discrete(2), envs.Discrete(4))
    observations = observations or (box(2), box(3, 2, 5))
    names = ("cat", "dog")
    spaces = (dict(zip(names, own, strict=True)) for own in (observations, actions))
    return Echo(*spaces, **members)


def test_vectors_are_padded_with_zeros_and_bounds_hold_for_all():
    env = envs.stack_agents(echo())
    assert env.observation_space == envs.Box([-1, -1, 0], [5, 5, 5], (3,)) and env.agents == ("cat", "dog")
    state, obs = env.reset(KEY)
    np.testing.assert_array_equal(obs, [[1, 1, 0], [1, 1, 1]])
    _, obs, reward, terminated, truncated = env.step(KEY, state, jnp.array([1, 3]))
    np.testing.assert_array_equal(obs, [[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(reward, [0, 1])
    np.testing.assert_array_equal(terminated, [True, False])
    assert truncated.shape == () and not truncated


def test_a_mask_forbids_the_actions_that_an_agent_does_not_have():
    env = envs.stack_agents(echo())
    assert env.action_space == envs.Discrete(4)
    np.testing.assert_array_equal(env.action_mask(()), [[1, 1, 0, 0], [1, 1, 1, 1]])
    state, *_ = env.step(KEY, (), jnp.array([3, 3]))
    assert state == {"cat": 1, "dog": 3}, "what an agent that has left chooses is a number of its own space"
    venv = envs.vectorize(env, 2)
    assert jax.eval_shape(venv.reset, KEY)[1].action_mask.shape == (2, 2, 4)


def test_equal_agents_need_no_mask_and_other_spaces_are_kept():
    space = envs.Dict({"image": envs.Box(0, 255, (2, 2, 1), jnp.uint8), "n": envs.Discrete(3)})
    env = envs.stack_agents(echo((envs.Discrete(2),) * 2, (box(2),) * 2))
    assert not hasattr(env, "action_mask") and not hasattr(env, "global_state")
    stacked = Images({"cat": space, "dog": space}, {"cat": envs.Discrete(2), "dog": envs.Discrete(2)})
    env = envs.stack_agents(stacked)
    assert env.observation_space == space
    assert env.reset(KEY)[1]["image"].shape == (2, 2, 2, 1)
    assert isinstance(envs.vectorize(env, 2), envs.VectorizedAgents)


class Images(Echo):
    def _observe(self):
        one = {"image": jnp.zeros((2, 2, 1), jnp.uint8), "n": jnp.int32(0)}
        return dict.fromkeys(self.agents, one)


def test_actions_that_start_elsewhere_reach_the_agents_as_they_are():
    env = envs.stack_agents(echo((envs.Discrete(3, start=10),) * 2))
    assert env.action_space == envs.Discrete(3, start=10)
    assert env.step(KEY, (), jnp.array([10, 12]))[0] == {"cat": 10, "dog": 12}


def test_own_masks_and_the_global_state_are_kept():
    own = {"cat": jnp.array([False, True]), "dog": jnp.array([True, False, False, True])}
    env = envs.stack_agents(echo(action_mask=lambda state: own, global_state=lambda state: jnp.arange(5.0)))
    np.testing.assert_array_equal(env.action_mask(()), [[0, 1, 0, 0], [1, 0, 0, 1]])
    np.testing.assert_array_equal(env.global_state(()), np.arange(5))
    venv = envs.vectorize(env, 2)
    assert isinstance(venv, envs.VectorizedAgents) and venv.state_size == 5


def test_actions_that_are_vectors_are_cut_to_the_agent_s_length():
    env = envs.stack_agents(echo((box(3), box(1))))
    assert env.action_space == box(3) and not hasattr(env, "action_mask")
    state, *_ = env.step(KEY, (), jnp.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]))
    np.testing.assert_allclose(state["cat"], [0.1, 0.2, 0.3])
    np.testing.assert_allclose(state["dog"], [0.4])


def image(*shape):
    return envs.Box(0, 255, shape, jnp.uint8)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"observations": (image(2, 2, 1), image(3, 3, 1))}, r"the observations of agent 'cat' are in Box\(0, 255"),
        ({"observations": (box(2), envs.Box(0, 1, (2,), jnp.int32))}, r"those of agent 'dog' in Box\(0, 1, \(2,\), int32\)"),
        ({"observations": (box(2), envs.Discrete(3))}, r"the observations of agent 'cat' .* can be padded; use the same"),
        ({"actions": (envs.Discrete(2), envs.Discrete(4, start=1))}, r"'dog' in Discrete\(4, start=1\). .* dtype and start"),
        ({"actions": (envs.Discrete(2), box(2))}, r"the actions of agent 'cat' are in Discrete\(2\), those of agent 'dog'"),
        ({"actions": (box(2), box(3, -2, 2))}, r"the actions of agent 'cat' are in .* \(for actions, with equal bounds\)"),
    ],
)
def test_agents_that_cannot_be_stacked_are_refused_by_name(members, message):
    with pytest.raises(ValueError, match=message):
        envs.stack_agents(echo(**members))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s, o, r, d, t: (s, [*o.values()], r, d, t), r"observations of step of Echo: got a list; return"),
        (lambda s, o, r, d, t: (s, {"cat": o["cat"]}, r, d, t), r"observations of step of Echo: agent 'dog' is missing"),
        (lambda s, o, r, d, t: (s, o | {"dog": jnp.ones(4)}, r, d, t), r"agent 'dog' of Echo\.step has a value of float32"),
        (lambda s, o, r, d, t: (s, o, r | {"cat": jnp.ones(2)}, d, t), r"rewards of Echo\.step for agent 'cat' is float32"),
        (lambda s, o, r, d, t: (s, o, r, d | {"cat": 1.0}, t), r"terminated of Echo\.step for agent 'cat' is float32\[\]; "),
        (lambda s, o, r, d, t: (s, o, r, d, {"cat": True}), r"truncated of step of Echo: agent 'dog' is missing"),
        (lambda s, o, r, d, t: (s, o, r, d), r"Echo\.step returned a tuple of 4; return the 5 values"),
    ],
)
def test_results_that_do_not_fit_are_refused_with_the_agent_named(change, message):
    env = echo()
    step = env.step
    env.step = lambda key, state, action: change(*step(key, state, action))
    with pytest.raises(TypeError, match=message):
        envs.vectorize(envs.stack_agents(env), 2)


def test_incomplete_environments_are_refused():
    env = echo()
    env.action_spaces = {"cat": envs.Discrete(2)}
    with pytest.raises(TypeError, match=r"Echo\.action_spaces has no entry for agent 'dog'"):
        envs.stack_agents(env)
    env = echo()
    del env.observation_spaces
    with pytest.raises(TypeError, match="Echo has no observation_spaces; stack_agents needs agents, observation_spaces"):
        envs.stack_agents(env)
    env = echo()
    env.agents = ()
    with pytest.raises(TypeError, match=r"Echo\.agents is \(\); give a tuple with the name of every agent"):
        envs.stack_agents(env)
    env = echo(action_mask=lambda state: {"cat": jnp.ones(2), "dog": jnp.ones(4, bool)})
    with pytest.raises(TypeError, match=r"action_mask of agent 'cat' of Echo is float32\[2\]; return bool\[2\]"):
        envs.vectorize(envs.stack_agents(env), 2)
