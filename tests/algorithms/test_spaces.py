"""Which spaces the algorithms take; others are refused in one line, in Python and on the command line."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli
from msrl_jax.agents.agent import innermost
from msrl_jax.algorithms import counted
from msrl_jax.configs.names import all_fields
from msrl_jax.envs import Box, Dict, Discrete, Space, Tuple, registry, spaces
from tests.support.agents import make_counted
from tests.support.slow import slow_unless

ALGORITHMS = [name for name in msrl.algorithms.names() if not msrl.algorithms.get(name).multi_agent]
VECTOR, CHOICE, MOTION = Box(-1, 1, (3,)), Discrete(3), Box(-1, 2, (2, 2))
# All others take choices and motions.
REFUSED = {"pqn": MOTION, "dqn": MOTION, "apex_dqn": MOTION, "r2d2": MOTION, "muzero": MOTION, "ddpg": CHOICE, "td3": CHOICE}


@dataclasses.dataclass(frozen=True)
class Still:
    """Nothing ever happens."""

    observation_space: Space
    action_space: Space

    def reset(self, key):
        return jnp.int32(0), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spaces.struct(self.observation_space))

    def step(self, key, state, action):
        never = jnp.asarray(False)
        return *self.reset(key), jnp.float32(0), never, never


def arguments(name, env):
    """What a config cannot do without: data to learn from, if the algorithm learns from nothing else."""
    if name not in ("bc", "cql", "iql"):
        return {}
    rows = 1024
    obs, action = (np.zeros((rows, *space.shape), space.dtype) for space in (env.observation_space, env.action_space))
    flags = np.arange(rows) % 8 == 7
    return {"data": msrl.data.Dataset(obs, action, np.zeros(rows), flags, np.zeros(rows, bool), obs)}


@pytest.fixture
def compiled(caplog):
    """What was compiled during a test, by name."""
    with jax.log_compiles():
        yield lambda: [r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]


def marks(name, space):
    return [] if REFUSED.get(name) == space or (name in ("ppo", "sac") and space is MOTION) else pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "action_space"),
    [
        pytest.param(name, space, id=f"{name}-{kind}", marks=marks(name, space))
        for name in ALGORITHMS
        for kind, space in (("choice", CHOICE), ("motion", MOTION))
    ],
)
def test_the_state_keeps_its_types_and_unsupported_action_spaces_are_refused_with_an_alternative(name, action_space):
    env = Still(VECTOR, action_space)
    config = msrl.algorithms.make(name, arguments(name, env))
    if REFUSED.get(name) == action_space:
        with pytest.raises(TypeError, match=r"use .*ppo"):
            msrl.algorithms.build(config, env)
        return
    agent = counted(msrl.algorithms.build(config, env), 9)
    state = agent.with_data(jax.eval_shape(agent.init, jax.random.key(0)))
    after, metrics = jax.eval_shape(agent.iteration, state)
    kind = lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False))
    assert jax.tree.map(kind, after) == jax.tree.map(kind, state)
    assert all(x.shape == () and x.dtype == jnp.float32 for x in jax.tree.leaves(metrics))


OTHERS = {
    "truth values": Box(False, True, (2,), bool),
    "several actions": Tuple((CHOICE, CHOICE)),
    "named actions": Dict({"a": MOTION}),
}


WINDOWS = {"trace_length": 2, "burn_in": 1}


@pytest.mark.parametrize(
    ("name", "kind"), [*(("ppo", kind) for kind in OTHERS), ("dqn", "truth values"), ("sac", "truth values")]
)
def test_other_spaces_are_refused_before_anything_compiles(name, kind, compiled, monkeypatch, tmp_path, capsys):
    env, remedy = Still(VECTOR, OTHERS[kind]), "wrap the environment to take"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_factories", {"Still-v0": lambda: env})
    with pytest.raises(TypeError, match=remedy):
        msrl.train(name, env, progress=False)
    assert cli.main(["train", "--algo", name, "--env", "Still-v0"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("msrl-jax: error: ") and remedy in line
    assert list(tmp_path.iterdir()) == [] and compiled() == []


OBSERVED = {
    "number": Discrete(4),
    "parts": Dict({"place": VECTOR, "choice": CHOICE, "more": Tuple((Box(0, 255, (2, 2), jnp.uint8), Discrete(2)))}),
}


@dataclasses.dataclass(frozen=True)
class Wandering(Still):
    """Random observations, and rewards that depend on them; every fourth step ends an episode."""

    def reset(self, key):
        return jnp.int32(0), self.observation_space.sample(key)

    def step(self, key, state, action):
        obs = self.observation_space.sample(key)
        reward = spaces.flatten(self.observation_space, obs).sum()
        return state + 1, obs, reward, state % 4 == 3, state % 6 == 5


# One of each kind of loop and network: `-m slow` runs the rest.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        slow_unless((kind, name) == ("parts", "ppo"), name, kind)
        for name in ALGORITHMS
        if name not in ("bc", "cql", "iql")
        for kind in OBSERVED
    ],
)
def test_observations_of_any_space_train_as_the_vectors_that_they_flatten_to(name, kind):
    env = Wandering(OBSERVED[kind], MOTION if REFUSED.get(name) == CHOICE else CHOICE)
    fields = all_fields(msrl.algorithms.get(name)())
    small = {"num_envs": 8, "unroll_length": 4, "hidden_sizes": (4,), "num_epochs": 1, "batch_size": 8, "replay.capacity": 128}
    small |= {"core.size": 4, "num_minibatches": 2, "population_size": 8} | WINDOWS
    small |= {"replay.learning_starts": 64, "replay.n_step": 1, "model_steps": 2}
    given = {key: value for key, value in small.items() if key in fields and (key not in WINDOWS or "hindsight" not in fields)}
    params = []
    for each in (env, msrl.envs.FlattenObservation(env)):
        agent = make_counted(name, each, **given)
        run = jax.jit(lambda key, agent=agent: jax.lax.scan(lambda s, _: agent.iteration(s), agent.init(key), length=3))
        state, _ = run(jax.random.key(0))
        params.append(innermost(state).params)
    chex.assert_trees_all_close(*params, rtol=1e-5, atol=1e-7)


def random_rows(env, rows=256):
    """Steps of random observations and actions, with rewards that tell them apart."""
    keys = jax.random.split(jax.random.key(5), rows + 1)
    obs = jax.device_get(jax.vmap(env.observation_space.sample)(keys))
    action = np.asarray(jax.vmap(env.action_space.sample)(keys))[:-1]
    last, odd = np.arange(rows) % 8 == 7, np.arange(rows) // 8 % 2 == 1
    before, after = jax.tree.map(lambda x: x[:-1], obs), jax.tree.map(lambda x: x[1:], obs)
    return msrl.data.Dataset(before, action, np.sin(np.arange(rows)), last & odd, last & ~odd, after)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bc", "cql", "iql", "dqn", "sac", "td3"])
def test_data_of_any_space_train_as_the_vectors_that_they_flatten_to(name):
    """Alone, and mixed into the run's own experience."""
    env = Wandering(OBSERVED["parts"], MOTION if name in ("cql", "td3") else CHOICE)
    vectors, dataset = msrl.envs.FlattenObservation(env), random_rows(env)
    flat = {field: np.asarray(spaces.flatten(env.observation_space, getattr(dataset, field))) for field in ("obs", "next_obs")}
    small = {
        "num_envs": 8,
        "unroll_length": 4,
        "replay.capacity": 128,
        "replay.learning_starts": 32,
        "num_updates": 2,
        "batch_size": 16,
    }
    fields, params = all_fields(msrl.algorithms.get(name)), []
    for each, rows in ((env, dataset), (vectors, dataclasses.replace(dataset, **flat))):
        given = {key: value for key, value in small.items() if key in fields}
        agent = make_counted(name, each, **given, hidden_sizes=(4,), data=rows)
        step = lambda s, _, agent=agent: agent.iteration(s)
        state = agent.with_data(jax.jit(agent.init)(jax.random.key(0)))
        state, metrics = jax.jit(lambda s, step=step: jax.lax.scan(step, s, length=4))(state)
        params.append(innermost(state).params)
        if name == "bc" and each is env:  # and over devices
            begun = agent.with_data(jax.jit(agent.init)(jax.random.key(0)))
            program = msrl.compile(agent.iteration, begun, policy=msrl.policies.get("MultiLearner"), axes=agent.axes)
            chex.assert_trees_all_close(innermost(program.run(begun, 4)[0]).params, params[0], rtol=1e-5, atol=1e-7)
    assert name not in ("bc", "cql", "iql") or np.isfinite(metrics["validation_loss"]).all()
    chex.assert_trees_all_close(*params, rtol=1e-5, atol=1e-7)
