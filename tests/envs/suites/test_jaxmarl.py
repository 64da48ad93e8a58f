"""JaxMARL's environments: names, spaces, masks, the end of time, and the same steps as JaxMARL's own."""

import sys
import types
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import cli, envs
from msrl_jax.envs.suites.catalog import SUITES
from msrl_jax.envs.suites.jaxmarl_env import _registration
from msrl_jax.fragments.support.text_values import parse_spec
from tests.support import processes

NAMES = [*SUITES["jaxmarl"].own_names, "LearnedPolicyEnemySMAX"]
SMALL = {
    "HeuristicEnemySMAX": {"scenario": "3m"},
    "SMAX": {"num_allies": 2, "num_enemies": 3},
    "hanabi": {"num_colors": 2, "num_ranks": 2, "hand_size": 2, "num_cards_of_rank": np.array([3, 2])},
}

OTHERS = (
    "MPE_simple_world_comm_v3",
    "MPE_simple_facmac_6a_v1",
    "MPE_simple_facmac_9a_v1",
    "LearnedPolicyEnemySMAX",
    "storm_np",
    "overcooked_v2",
    "ant_4x2",
    "halfcheetah_6x1",
    "hopper_3x1",
    "humanoid_9|8",
    "walker2d_2x3",
)
"""Like others, and long to trace."""


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class Constant:
    """An enemy for SMAX that always stops."""

    def apply(self, params, obs):
        return types.SimpleNamespace(sample=lambda seed: jnp.full(obs.shape[0], 4)), None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:max_dist_to_goal", "ignore:scatter inputs have incompatible types")  # JaxMARL's own
@pytest.mark.parametrize("name", [slow(name) if name in OTHERS else name for name in NAMES])
def test_every_environment_conforms(name):
    params = {"policy": Constant(), "params": ()} if name.startswith("Learned") else SMALL.get(name, {})
    env = envs.make(f"jaxmarl:{name}", **params)
    venv = envs.vectorize(env, 2)  # checks all types
    assert isinstance(venv, envs.VectorizedAgents) and venv.name == f"jaxmarl:{name}"
    assert env.observation_space.shape == jax.tree.map(lambda x: x.shape[1:], jax.eval_shape(env.reset, jax.random.key(0))[1])


@pytest.mark.long
def test_names_are_listed_but_those_whose_packages_are_missing(capsys):
    everything = _registration().registered_envs
    lacking = {name for name in everything if SUITES["jaxmarl"].lacks(name)}
    assert {*NAMES} | lacking == {*everything} and len(NAMES) >= 25
    assert {f"jaxmarl:{name}" for name in SUITES["jaxmarl"].own_names} <= set(envs.names())
    assert cli.main(["list"]) == 0
    assert "\n  jaxmarl:MPE_simple_spread_v3\n" in capsys.readouterr().out


QUIET = """
import sys
from msrl_jax import envs
streams = sys.stdout, sys.stderr, sys.__stdout__
envs.make("jaxmarl:MPE_simple_tag_v3")
assert streams == (sys.stdout, sys.stderr, sys.__stdout__)
"""


@pytest.mark.slow
def test_its_import_leaves_the_standard_streams_alone():
    done = processes.run([sys.executable, "-c", QUIET])
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def theirs(env, obs, size):
    """JaxMARL's observations of all agents, padded with zeros."""
    return jnp.stack([jnp.pad(obs[a].reshape(-1), (0, size - obs[a].size)) for a in env.agents])


@pytest.mark.parametrize(
    ("name", "params", "ends"),
    [
        slow("MPE_simple_spread_v3", {"num_agents": 4}, "time"),
        pytest.param("MPE_simple_tag_v3", {"action_type": "Continuous"}, "time", marks=pytest.mark.long),
        slow("MPE_simple_speaker_listener_v4", {}, "time"),
        ("switch_riddle", {"num_agents": 4}, "task"),
        slow("coin_game", {"num_inner_steps": 5, "num_outer_steps": 3}, "time"),
        slow("overcooked", {"layout": "forced_coord", "max_steps": 20}, "time"),
        slow("hanabi", SMALL["hanabi"], "task"),
        slow("HeuristicEnemySMAX", {"scenario": "3m", "max_steps": 10}, "either"),
    ],
)
def test_steps_are_those_of_jaxmarl(name, params, ends):
    """50 random legal steps beside JaxMARL's `step_env`, with a new episode whenever JaxMARL says that one has ended."""
    env = envs.make(f"jaxmarl:{name}", **params)
    inner = env.env.env
    size = max(np.prod(space.shape, dtype=int) for space in env.env.observation_spaces.values())
    count = len(env.agents)

    def sample(key, state):
        if hasattr(env, "action_mask"):
            return jax.random.categorical(key, jnp.where(env.action_mask(state), 0.0, -jnp.inf))
        return jax.vmap(env.action_space.sample)(jax.random.split(key, count))

    def step(state, key):
        step_key, reset_key, action_key = jax.random.split(key, 3)
        action = sample(action_key, state)
        spaces = zip(inner.agents, env.env.action_spaces.values(), action, strict=True)
        own = {a: x[: space.shape[0]] if space.shape else x for a, space, x in spaces}
        obs, new, reward, dones, _ = inner.step_env(step_key, state, own)
        want = theirs(inner, obs, size), jnp.stack([reward[a] for a in inner.agents]), dones["__all__"]
        _, seen, rewards, terminated, truncated = env.step(step_key, state, action)
        got = seen.reshape(count, -1), rewards, truncated | terminated.all()
        first_obs, fresh = inner.reset(reset_key)
        state = jax.tree.map(lambda a, b: jnp.where(dones["__all__"], a, b).astype(b.dtype), fresh, new)
        first = theirs(inner, first_obs, size), env.reset(reset_key)[1].reshape(count, -1)
        return state, (want, got, first, terminated, truncated)

    @jax.jit
    def run(key):
        return jax.lax.scan(step, env.reset(key)[0], jax.random.split(key, 50))[1]

    want, got, first, terminated, truncated = jax.tree.map(np.asarray, run(jax.random.key(1)))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    np.testing.assert_array_equal(*first)
    assert want[2].any() and got[1].dtype == np.float32
    assert (terminated.all(1) == terminated.any(1)).all() and not (terminated.all(1) & truncated).any()
    assert ends == "either" or terminated.any() == (ends == "task")


@pytest.mark.long
def test_shaped_rewards_of_overcooked_are_added_with_their_weight():
    env = envs.make("jaxmarl:overcooked", shaped_reward=0.5)
    inner = env.env.env

    def step(state, key):
        action = jax.random.randint(key, (2,), 0, env.action_space.n)
        own = dict(zip(inner.agents, action, strict=True))
        _, new, reward, _, info = inner.step_env(key, state, own)
        theirs = tuple(jnp.stack([x[a] for a in inner.agents]) for x in (reward, info["shaped_reward"]))
        return new, (env.step(key, state, action)[2], theirs)

    @jax.jit
    @jax.vmap
    def run(key):
        return jax.lax.scan(step, env.reset(key)[0], jax.random.split(key, 60))[1]

    got, (reward, shaped) = jax.tree.map(np.asarray, run(jax.random.split(jax.random.key(0), 64)))
    np.testing.assert_array_equal(got, reward + 0.5 * shaped)
    assert shaped.any() and got.dtype == np.float32


def test_the_riddle_ends_by_its_answer_or_by_its_length():
    env = envs.make("jaxmarl:switch_riddle")

    @jax.jit
    def outcomes(key):
        state, _ = env.reset(key)
        return env.step(key, state, jnp.full(3, 2)), env.step(key, state.replace(step=jnp.int32(5)), jnp.zeros(3, jnp.int32))

    told, late = outcomes(jax.random.key(0))
    assert told[3].all() and not told[4] and (told[2] == -1).all()
    assert late[4] and not late[3].any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["SMAX", slow("HeuristicEnemySMAX")])
def test_a_battle_ends_by_death_or_by_its_length(name):
    env = envs.make(f"jaxmarl:{name}", **SMALL[name])
    inner = env.env.env

    def with_units(state, **changes):
        return state.replace(state=state.state.replace(**changes)) if hasattr(state, "state") else state.replace(**changes)

    count = inner.num_allies + inner.num_enemies
    health = jnp.where(jnp.arange(count) < inner.num_allies, 45.0, 0.0)
    one_dead = jnp.where(jnp.arange(count) == 0, 0.0, 45.0)
    stop = jnp.full(len(env.agents), 4)

    @jax.jit
    def outcomes(key):
        state, _ = env.reset(key)
        unit = getattr(state, "state", state)
        changes = (
            {"unit_health": health, "unit_alive": health > 0},
            {"step": jnp.full_like(unit.step, 100)},
            {"unit_health": one_dead, "unit_alive": one_dead > 0},
        )
        return [env.step(key, with_units(state, **change), stop)[2:] for change in changes], env.action_mask(state)

    ((won, won_end, won_cut), (_, late_end, late_cut), (_, dead_end, dead_cut)), mask = outcomes(jax.random.key(0))
    assert won_end.all() and not won_cut and (won[: inner.num_allies] >= 1).all()
    assert late_cut and not late_end.any()
    assert not dead_end.any() and not dead_cut, "a dead unit shares in its team's rewards, so it has not left"
    assert mask.shape == (len(env.agents), env.action_space.n) and mask[:, 4].all()
    assert jax.eval_shape(envs.vectorize(env, 2).reset, jax.random.key(0))[1].obs.shape[1] == len(env.agents)
    assert envs.vectorize(env, 2).state_size == inner.state_size


@pytest.mark.long
def test_hanabi_s_legal_moves_are_masks():
    env = envs.make("jaxmarl:hanabi", **SMALL["hanabi"])
    inner = env.env.env

    @jax.jit
    def first(key):
        state, _ = env.reset(key)
        legal = inner.get_legal_moves(state)
        return env.action_mask(state), jnp.stack([legal[a] for a in inner.agents])

    mask, legal = first(jax.random.key(0))
    np.testing.assert_array_equal(mask, legal.astype(bool))
    assert mask.dtype == bool and mask[0].sum() > 1 and mask[1].tolist() == [False] * (env.action_space.n - 1) + [True]


def test_speaker_and_listener_are_padded():
    env = envs.make("jaxmarl:MPE_simple_speaker_listener_v4")
    assert env.observation_space.shape == (11,) and env.action_space == envs.Discrete(5)
    np.testing.assert_array_equal(env.action_mask(()), [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("spec", "name", "params"),
    [
        ("jaxmarl:MPE_simple_spread_v3", "jaxmarl:MPE_simple_spread_v3", {}),
        ("jaxmarl:MPE_simple_spread_v3:num_agents=5", "jaxmarl:MPE_simple_spread_v3", {"num_agents": 5}),
        ("jaxmarl:SMAX:scenario=3s_vs_5z,max_steps=1e2", "jaxmarl:SMAX", {"scenario": "3s_vs_5z", "max_steps": 100.0}),
        ("CartPole-v1:max_steps_in_episode=9", "CartPole-v1", {"max_steps_in_episode": 9}),
        ("Mine:a='b=3m,c',d=2s3z", "Mine", {"a": "b=3m,c", "d": "2s3z"}),
    ],
)
def test_specs_of_suites(spec, name, params):
    assert parse_spec(spec, prefixes=True) == (name, params)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("MPE_simple_spred_v3", {}, r"has no environment 'MPE_simple_spred_v3' \(did you mean 'MPE_simple_spread_v3'\?\)"),
        ("MPE_simple_spread_v3", {"num_agent": 5}, r"no parameter 'num_agent' \(did you mean 'num_agents'\?\)"),
        ("HeuristicEnemySMAX", {"scenario": "4m"}, r"no scenario '4m'.*; it has .*2s3z, 3m"),
        ("overcooked", {"layout": "cramped"}, r"no layout 'cramped' \(did you mean 'cramped_room'\?\); it has asymm"),
        ("overcooked", {"shaped_reward": -1}, r"jaxmarl:overcooked: shaped_reward=-1 is not a weight; use a finite float32"),
        ("overcooked_v2", {"layout": "cramped"}, r"jaxmarl:overcooked_v2 cannot be made with .*: Invalid layout: cramped"),
        ("LearnedPolicyEnemySMAX", {}, r"cannot be made with {}: .* missing 2 required positional arguments: 'policy'"),
    ],
)
def test_names_and_parameters_that_do_not_exist_are_refused(name, params, message):
    with pytest.raises(ValueError, match=message):
        envs.make(f"jaxmarl:{name}", **params)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "brax", None)
    with pytest.raises(ImportError, match=r"jaxmarl:ant_4x2 needs the package 'brax', .*: pip install brax"):
        envs.make("jaxmarl:ant_4x2")

    def version(package):
        raise metadata.PackageNotFoundError(package)

    with monkeypatch.context() as missing:
        missing.setattr(metadata, "version", version)
        with pytest.raises(ImportError, match=r"which is not installed; install it with: pip install 'msrl-jax\[marl\]'"):
            envs.make("jaxmarl:SMAX")
        assert cli.main(["list", "--envs"]) == 0
        listed = "jaxmarl     not installed: pip install 'msrl-jax[marl]' brings the environments of JaxMARL"
        assert listed in capsys.readouterr().out
    monkeypatch.setattr(metadata, "version", lambda package: "0.0.4")
    with pytest.raises(ImportError, match=r"need jaxmarl 0\.2 or later, and 0\.0\.4 is installed; install it with: pip"):
        envs.make("jaxmarl:SMAX")
    assert cli.main(["list"]) == 0
    assert f"jaxmarl     jaxmarl 0.0.4, {len(NAMES) - 1} environments" in capsys.readouterr().out
