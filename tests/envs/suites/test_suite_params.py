"""Parameters of Brax and Playground as data: the suites' own steps of a changed system, and what is refused."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs.suites.brax_env import BraxEnvironment
from msrl_jax.envs.suites.common import quiet


def changed(raw, field, values):
    """The suite's environment with another system."""
    raw, model = copy.copy(raw), getattr(raw, field)
    setattr(raw, field, model.tree_replace(values))
    return raw


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "field", "values"),
    [
        ("brax:inverted_pendulum", "sys", {"gravity": np.float32([0, 0, -3]), "dof.damping": np.float32([2, 3])}),
        ("playground:CartpoleBalance", "_mjx_model", {"opt.gravity": np.float32([0, 0, -3])}),
    ],
    ids=["brax", "playground"],
)
def test_a_system_as_data_steps_like_the_suites_own(name, field, values):
    made = envs.make(name)
    env = envs.RandomizeParams(made, values)
    inner = made
    while not isinstance(inner, BraxEnvironment):
        inner = inner.env
    theirs, action = changed(inner.env, field, values), jnp.full(made.action_space.shape, 0.3)

    def ours(key):
        state, first = env.reset(key)
        return first, jax.lax.fori_loop(0, 3, lambda _, x: env.step(key, x[0], action)[:2], (state, first))[1]

    def own(key):
        state = theirs.reset(key)
        return state.obs, jax.lax.fori_loop(0, 3, lambda _, state: theirs.step(state, action), state).obs

    with quiet():
        for mine, expected in zip(*(jax.jit(run)(jax.random.key(0)) for run in (ours, own)), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_the_physics_does_not_use_is_refused():
    env = envs.make("brax:inverted_pendulum")
    with pytest.raises(ValueError, match="body_mass of brax:inverted_pendulum has no effect on reset and step"):
        envs.RandomizeParams(env, {"body_mass": np.ones(3)})
    with pytest.raises(ValueError, match=r"has no parameter 'gravty' \(did you mean 'gravity'\?\) .* others"):
        envs.RandomizeParams(env, {"gravty": np.ones(3)})
    with pytest.raises(ValueError, match=r"gravity=-3 does not fit the parameter, which is float32\[3\]"):
        envs.RandomizeParams(env, {"gravity": -3.0})
    with pytest.raises(TypeError, match="xminigrid:MiniGrid-Empty-5x5 has no parameters as data"):
        envs.RandomizeParams(envs.make("xminigrid:MiniGrid-Empty-5x5"), {"height": 5})
