"""Actions of several integers: they learn, one integer trains as a choice does, and all that a choice can do, they can."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli, data, envs
from msrl_jax.algorithms import Progress
from msrl_jax.envs import Box, MultiDiscrete
from msrl_jax.envs.actions import uniform_actions
from msrl_jax.fragments.counters import counter
from tests.support.agents import make_counted
from tests.support.lock import COUNT, SIZES, Lock, OneInteger
from tests.support.many_agents import Homes
from tests.support.random_walk import RandomWalk

LOCK = "tests.support.lock:Lock"
SHOWN = np.eye(COUNT, dtype=np.float32)
OPEN = np.stack([Lock.wanted(shown) for shown in range(COUNT)])
SMALL = {"num_envs": 8, "unroll_length": 8, "hidden_sizes": (8,)}
PROXIMAL = SMALL | {"num_epochs": 2, "num_minibatches": 2}
CONFIGS = {
    "ppo": PROXIMAL,
    "recurrent_ppo": PROXIMAL | {"core.size": 8},
    "a2c": SMALL,
    "a3c": SMALL | {"num_workers": 2},
    "impala": SMALL | {"replay_batches": 2, "num_updates": 2},
    "es": SMALL | {"unroll_length": 12},
    "ippo": PROXIMAL,
    "self_play": PROXIMAL | {"num_opponents": 2, "pool_size": 2, "pool_period": 1, "latest_share": 0.5},
    "teams": {
        "num_envs": 8,
        "unroll_length": 8,
        "teams": {"one": "ippo:agents=walker_0|walker_2,hidden_sizes=(8,),num_minibatches=2", "two": "random:agents=walker_1"},
    },
    "mappo": PROXIMAL | {"share_parameters": False, "core": "gru:8"},
}


@functools.cache
def learned():
    """A run of PPO on the lock, long enough to open it always."""
    return msrl.train(
        "ppo",
        LOCK,
        total_steps=40_000,
        num_envs=32,
        unroll_length=16,
        learning_rate=1e-2,
        hidden_sizes=(32,),
        seed=1,
        policy="GPUOnly:num_devices=1",
        eval_episodes=64,
        progress=False,
    )


@pytest.mark.slow
def test_probabilities_are_those_of_the_actions_drawn():
    result = learned()
    p = np.asarray(result.probabilities(SHOWN))
    assert p.shape == (COUNT, 3, max(SIZES)) and (p[:, 0, 2:] == 0).all() and (p[:, 2, 3:] == 0).all()
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-5)
    drawn = np.stack([result.act(SHOWN, key) for key in jax.random.split(jax.random.key(0), 400)]) - Lock.action_space.low
    frequency = (drawn[..., None] == np.arange(max(SIZES))).mean(0)
    assert (np.abs(frequency - p) < 5 * np.sqrt(p * (1 - p) / 400) + 1e-3).all()


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A walk whose actions start elsewhere, and a part of whose observations is a choice that does, too."""

    first: int
    env = RandomWalk()

    @property
    def observation_space(self):
        return envs.Dict({"walk": self.env.observation_space, "time": envs.Discrete(6, start=self.first)})

    @property
    def action_space(self):
        return envs.Discrete(3, start=self.first)

    def reset(self, key):
        state, obs = self.env.reset(key)
        return state, {"walk": obs, "time": state.time + self.first}

    def step(self, key, state, action):
        state, obs, *outcome = self.env.step(key, state, action - self.first)
        return state, {"walk": obs, "time": state.time + self.first}, *outcome


REPLAYING = {
    "num_envs": 8,
    "unroll_length": 2,
    "batch_size": 16,
    "replay.learning_starts": 16,
    "num_updates": 1,
    "hidden_sizes": (8,),
}

PLANNING = {
    "replay.learning_starts": 64,
    "num_simulations": 2,
    "latent_size": 4,
    "act_simulations": 2,
    "model_steps": 1,
    "replay.n_step": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "config"),
    [
        ("dqn", REPLAYING),
        ("muzero", REPLAYING | PLANNING),
        *(
            pytest.param(algo, config, marks=pytest.mark.slow)
            for algo, config in {"ppo": PROXIMAL, "pqn": PROXIMAL, "es": CONFIGS["es"], "sac": REPLAYING}.items()
        ),
    ],
)
def test_choices_that_start_elsewhere_train_as_those_from_0(algo, config):
    """Bit for bit; only what the agent does is shifted."""
    states, chosen = [], []
    for first in (0, 10):
        env = Elsewhere(first)
        agent = make_counted(algo, env, **config)
        state = jax.jit(agent.init)(jax.random.key(3))
        step = lambda s, _, agent=agent: (agent.iteration(s)[0], None)
        state = jax.jit(lambda s, step=step: jax.lax.scan(step, s, None, length=4)[0])(state)
        states.append(state.inner.params)
        obs = {"walk": jnp.linspace(-1, 1, 24).reshape(8, 3), "time": jnp.arange(8) % 6 + first}
        chosen.append(jax.jit(agent.act)(state, obs, None, ())[0])
    jax.tree.map(np.testing.assert_array_equal, *states)
    np.testing.assert_array_equal(chosen[0] + 10, chosen[1])
    assert {*np.unique(chosen[0])} <= {0, 1, 2}


class Typed(RandomWalk):
    """Its actions are of another type than those that networks count."""

    action_space = envs.Discrete(3, np.uint8, start=10)

    def step(self, key, state, action):
        assert action.dtype == np.uint8
        return super().step(key, state, action.astype(jnp.int32) - 10)


@pytest.mark.parametrize(
    ("algo", "config"),
    [
        ("ppo", PROXIMAL),
        ("dqn", REPLAYING),
        pytest.param("pqn", PROXIMAL, marks=pytest.mark.slow),
        pytest.param("es", CONFIGS["es"], marks=pytest.mark.slow),
        pytest.param("muzero", REPLAYING | PLANNING | {"act_simulations": 0}, marks=pytest.mark.slow),
    ],
)
def test_every_choice_reaches_the_environment_in_its_space(algo, config):
    """In training, as the types show, and outside of it; the first action is best if all numbers of a network are 0."""
    agent = msrl.algorithms.build(msrl.algorithms.make(algo, config), Typed())
    start = jax.eval_shape(agent.init, jax.random.key(0))
    jax.eval_shape(lambda state: agent.iteration(state, Progress(counter())), start)
    still = start._replace(params=jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), start.params))
    action = agent.act(still, jnp.ones((8, 3)), None, ())[0]
    assert action.dtype == np.uint8 and action.tolist() == [10] * 8


@pytest.mark.long
def test_actions_are_recorded_saved_cloned_and_loaded(tmp_path):
    result = learned()
    played = data.record(result, 600, tmp_path / "played.npz", epsilon=0.5, seed=1, num_envs=8)
    assert played.action.shape == (600, 3) and played.action.dtype == np.int32
    assert (played.action >= Lock.action_space.low).all() and (played.action <= Lock.action_space.high).all()
    opened = (played.action == OPEN[played.obs.argmax(-1)]).all(-1)
    np.testing.assert_array_equal(played.reward, opened)
    assert abs(opened.mean() - (0.5 + 0.5 / 24)) < 5 * 0.5 / np.sqrt(600)
    cloned = msrl.train(
        "bc",
        LOCK,
        data=str(tmp_path / "played.npz"),
        total_steps=400,
        hidden_sizes=(32,),
        learning_rate=1e-2,
        batch_size=64,
        policy="GPUOnly:num_devices=1",
        eval_episodes=0,
        progress=False,
    )
    np.testing.assert_array_equal(cloned.act(SHOWN), OPEN)
    wrong = data.Dataset(*(getattr(played, name) for name in data.dataset.FIELDS))
    object.__setattr__(wrong, "action", wrong.action + np.int32([0, 0, 2]))
    with pytest.raises(ValueError, match="action of the data set is outside the action_space of Lock"):
        data.check_spaces(wrong, Lock())
    cloned.save(tmp_path / "run")
    np.testing.assert_array_equal(msrl.Result.load(tmp_path / "run", env=LOCK).act(SHOWN), OPEN)


def test_the_command_line_refuses_values_of_several_integers(capsys):
    assert cli.main(["train", "--algo", "dqn", "--env", LOCK]) == 2
    assert "for integers use a2c, a3c, bc, es, impala, ppo" in capsys.readouterr().err


@pytest.mark.slow
def test_integers_of_any_shape_and_type_reach_the_environment_as_they_are():
    class Grid(Lock):
        action_space = Box(np.array([[250, 0], [3, 7]]), np.array([[255, 1], [3, 9]]), (2, 2), jnp.uint8)

        def step(self, key, state, action):
            assert action.shape == (2, 2) and action.dtype == jnp.uint8
            return super().step(key, state, action.reshape(-1)[:3].astype(jnp.int32))

    one = {"policy": "GPUOnly:num_devices=1", "progress": False}
    result = msrl.train("ppo", Grid(), total_steps=256, eval_episodes=8, **one, **PROXIMAL)
    drawn = np.stack([result.act(SHOWN, key) for key in jax.random.split(jax.random.key(0), 50)]).reshape(-1, 4)
    assert [set(x) for x in drawn.T.tolist()] == [set(range(250, 256)), {0, 1}, {3}, {7, 8, 9}]
    assert envs.check(Grid(), steps=20).ok


def test_random_integers_are_uniform_and_one_is_the_choice():
    keys = jax.random.split(jax.random.key(0), 4000)
    drawn = np.asarray(uniform_actions(keys, Lock.action_space))
    for i, n in enumerate(SIZES):
        assert (np.abs(np.bincount(drawn[:, i], minlength=n) / 4000 - 1 / n) < 5 * np.sqrt(1 / n / 4000)).all()
    one, choice = uniform_actions(keys, MultiDiscrete([5])), uniform_actions(keys, envs.Discrete(5))
    np.testing.assert_array_equal(one[:, 0], choice)


@pytest.mark.parametrize("algo", ["qmix", "vdn", "maddpg"])
def test_values_of_several_agents_refuse_integers(algo):
    with pytest.raises(TypeError, match=r"for integers use .*of several agents: ippo, mappo"):
        msrl.algorithms.get(algo)().build(OneInteger(Homes()))
