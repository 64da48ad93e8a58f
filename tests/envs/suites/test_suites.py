"""Environments of suites: their names, and random steps against the suites' own step functions, from the same states."""

import dataclasses
import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from msrl_jax import envs
from msrl_jax.envs.masks import mask_of, sample_legal, unmasked
from msrl_jax.envs.suites.catalog import SUITES
from msrl_jax.envs.suites.common import load, quiet
from msrl_jax.envs.wrappers import TimeLimit
from tests.support.slow import mostly_slow

NUM_STEPS, NUM_ENVS = {"playground": 100, "craftax": 250}, 2
"""Steps of environments that take long; 500 of the others."""

OFTEN = {  # the others are slow to compile
    "brax": {"inverted_pendulum"},
    "playground": {"CartpoleBalance"},
    "craftax": {"Craftax-Classic-Symbolic-v1"},
    "jumanji": {"Tetris-v0"},
    "xminigrid": {"MiniGrid-Empty-5x5"},
}
TEAMS = (
    "Cleaner-v0",
    "Connector-v3",
    "JobShop-v0",
    "LevelBasedForaging-v0",
    "MMST-v0",
    "MultiCVRP-v0",
    "RobotWarehouse-v0",
    "SearchAndRescue-v0",
)
BROKEN = {"swimmer": r"brax:swimmer fails in its step, .* JAX .*: clip\(\) got an unexpected keyword argument 'a_min'"}
"""Environments that do not work with the JAX that is installed, and what they say."""
FETCHED = ("Sokoban-v0",)
"""Environments that download what they need, as do all of Playground's but those of the DeepMind Control Suite."""
CONTROL_SUITE = dataclasses.replace(SUITES["playground"], files=SUITES["playground"].files[:1]).own_names


def own_names(prefix):
    """The names in the suite's own registry."""
    return {
        "brax": lambda: set(load("brax.envs")._envs),
        "craftax": lambda: {f"Craftax-{kind}-v1" for kind in ("Symbolic", "Pixels", "Classic-Symbolic", "Classic-Pixels")},
        "jumanji": lambda: set(load("jumanji").registered_environments()),
        "playground": lambda: set(load("mujoco_playground").registry.ALL_ENVS),
        "xminigrid": lambda: set(load("xminigrid").registered_environments()),
    }[prefix]()


@pytest.mark.parametrize("prefix", mostly_slow(OFTEN, "jumanji", "xminigrid"))
def test_names_are_those_of_the_suite(prefix):
    assert set(SUITES[prefix].own_names) == own_names(prefix)
    assert {f"{prefix}:{name}" for name in own_names(prefix)} <= set(envs.names())


def redo_brax(env, state, action, key):
    """Brax's own wrapper ends episodes at their length."""
    theirs = load("brax.envs.wrappers.training").EpisodeWrapper(env.env.env, env.max_steps, 1)
    first = jax.eval_shape(theirs.reset, jax.random.key(0))
    before, ours = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), first), state.env_state
    info = {**before.info, **ours.info, "steps": state.steps.astype(jnp.float32)}
    data = {name: getattr(ours, name) for name in ("pipeline_state", "data") if hasattr(ours, name)}
    before = before.replace(obs=ours.obs, reward=ours.reward, done=ours.done, metrics=ours.metrics, info=info, **data)
    after = theirs.step(before, action)
    return after.obs, after.reward, after.done > 0, after.info["truncation"] > 0


def redo_craftax(env, state, action, key):
    params = env.env.params
    obs, after, reward, done, _ = env.env.env.step(key, state, action, params)
    return obs, reward, done, done & (after.timestep >= params.max_timesteps) & (after.player_health > 0)


def redo_xminigrid(env, state, action, key):
    before = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(env.env.reset, env.params, jax.random.key(0)))
    after = env.env.step(env.params, before.replace(state=state.env_state), action)
    return after.observation, after.reward, after.last(), after.last() & (after.discount == 1)


def by_field(value):
    """Named tuples and dataclasses as dicts."""
    names = getattr(value, "_fields", None) or [f.name for f in getattr(value, "__dataclass_fields__", {}).values()]
    return {name: by_field(getattr(value, name)) for name in names} if names else value


def redo_jumanji(env, state, action, key):
    sizes = [int(n) for n in np.ravel(getattr(env.env.action_spec, "num_values", 1))]
    if len(sizes) > 1:  # row-major by hand
        parts = []
        for n in reversed(sizes):
            parts.append(action % n)
            action = action // n
        action = jnp.stack(parts[::-1])
    _, after = env.env.step(state.env_state, action)
    obs = by_field(after.observation)
    if hasattr(env, "action_mask"):
        obs.pop("action_mask")
    return obs, after.reward, after.last(), after.last() & (after.discount > 0)


REDO = {
    "brax": redo_brax,
    "playground": lambda env, *given: redo_brax(env.env, *given),
    "craftax": redo_craftax,
    "xminigrid": redo_xminigrid,
    "jumanji": redo_jumanji,
}


def every_environment(*prefixes):
    """All environments of the suites, but for those of several agents; those that are not to be checked often are slow."""
    for prefix, often in OFTEN.items():
        for name in SUITES[prefix].own_names:
            fetched = name in FETCHED or (prefix == "playground" and name not in CONTROL_SUITE)
            if not fetched and name not in BROKEN and not (prefix == "jumanji" and name in TEAMS):
                known = name in often and prefix in prefixes
                marks = () if known and prefix not in ("brax", "craftax", "playground") else pytest.mark.slow
                yield pytest.param(prefix, name, marks=marks, id=f"{prefix}:{name}")


@pytest.mark.long
@pytest.mark.parametrize(("prefix", "name"), [*every_environment(*OFTEN)])
def test_steps_are_those_of_the_suite(prefix, name):
    env = envs.make(f"{prefix}:{name}")
    venv = envs.vectorize(env, NUM_ENVS)

    def step(carry, key):
        state, obs = carry
        keys = jax.random.split(key, NUM_ENVS)
        mask = mask_of(obs)
        action = jax.vmap(env.action_space.sample)(keys) if mask is None else jax.vmap(sample_legal)(keys, mask)
        after, t = venv.step(state, action)
        step_keys = jax.vmap(lambda key: jax.random.split(jax.random.split(key)[1])[0])(state.key)
        with quiet():
            theirs = jax.vmap(functools.partial(REDO[prefix], env))(state.env_state, action, step_keys)
        ours = unmasked(t.final_obs), t.reward, t.terminated | t.truncated, t.truncated
        if prefix == "xminigrid":  # only success is rewarded
            ours, theirs = (*ours, t.metrics[:, 0]), (*theirs, theirs[1] > 0)
        return (after, t.obs), (ours, theirs)

    _, (ours, theirs) = jax.jit(
        lambda key: jax.lax.scan(step, venv.reset(key), jax.random.split(key, NUM_STEPS.get(prefix, 500)))
    )(jax.random.key(1))
    if name == "MiniGrid-Empty-5x5":
        assert env.metrics == {"success": "last"} and {*np.unique(ours[-1])} == {0, 1}
    for (path, one), other in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(theirs), strict=True):
        # XLA fuses the two, and so rounds them, each in its way.
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-3, atol=1e-4, err_msg=str(path))


# Environments of the other suites share one class with one kind of space each.
@pytest.mark.long
@pytest.mark.parametrize(
    ("prefix", "name"),
    [case for case in every_environment("jumanji") if case.values[0] == "jumanji" or case.values[1] in OFTEN[case.values[0]]],
)
def test_environments_conform(prefix, name):
    report = envs.check(f"{prefix}:{name}", steps=60, num_envs=2)
    assert report.ok, report


@pytest.mark.long
@pytest.mark.parametrize("name", mostly_slow(TEAMS, "LevelBasedForaging-v0"))
def test_teams_of_jumanji_conform_and_step_as_the_suite_does(name):
    env = envs.make(f"jumanji:{name}")
    assert envs.has_agents(env)
    report = envs.check(env, steps=60, num_envs=2)
    assert report.ok, report

    def compare(key):
        state, obs = env.reset(key)
        _, after = env.env.reset(key)
        differ = jnp.asarray(False)
        for _ in range(4):
            key, action_key = jax.random.split(key)
            keys = jax.random.split(action_key, len(env.agents))
            mask = env.action_mask(state) if hasattr(env, "action_mask") else None
            sample = env.action_space.sample
            action = jax.vmap(sample)(keys) if mask is None else jax.vmap(sample_legal)(keys, mask)
            _, after = env.env.step(state.env_state, action.astype(env.env.action_spec.dtype))
            state, obs, reward, terminated, truncated = env.step(key, state, action)
            differ |= ~jnp.allclose(reward, after.reward) | (after.last() != (truncated | terminated.all()))
            for field in env.own_fields:
                differ |= ~jnp.allclose(obs[field], getattr(after.observation, field))
        return differ, obs["agent"]

    differ, number = jax.jit(compare)(jax.random.key(3))
    assert not differ
    np.testing.assert_array_equal(number, range(len(env.agents)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("brax:halfcheeta", r"Brax has no environment 'halfcheeta' \(did you mean 'halfcheetah'\?\); it has ant, fast"),
        ("brax:reacher:backend=mjy", r"brax:reacher cannot be made with \{'backend': 'mjy'\}: "),
        ("brax:reacher:episode_length=0", "brax:reacher: episode_length=0: use an integer of at least 1"),
        ("craftax:Craftax-Classic-Symbolic-v1:max_timesteps=9.5", r"max_timesteps=9.5 does not fit; its default is 10000"),
        ("xminigrid:MiniGrid-Empty-5x5:benchmark='small-1m'", "has a single task; only XLand-MiniGrid"),
        ("xminigrid:XLand-MiniGrid-R1-9x9:benchmark='easy'", r"has no benchmark 'easy'.*; it has .*trivial-21k"),
        ("jumanji:Snake-v1:num_row=3", r"jumanji:Snake-v1 has no parameter 'num_row' \(did you mean 'num_rows'\?\)"),
    ],
)
def test_names_and_parameters_that_do_not_exist_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name)


def test_parameters_reach_the_suite():
    cheetah = envs.make("brax:inverted_pendulum:backend=spring,episode_length=100,action_repeat=3")
    assert isinstance(cheetah, TimeLimit) and cheetah.max_steps == 34 and cheetah.env.action_repeat == 3
    assert cheetah.env.env.backend == "spring"
    assert envs.make("jumanji:Maze-v0", time_limit=7).env.time_limit == 7
    assert envs.make("xminigrid:MiniGrid-Empty-5x5", max_steps=7, view_size=3).observation_space.shape == (3, 3, 2)


@pytest.mark.slow
def test_parameters_reach_craftax_and_playground():
    craftax = envs.make("craftax:Craftax-Classic-Symbolic-v1", max_timesteps=7, map_size=(32, 32))
    assert craftax.env.params.max_timesteps == 7 and craftax.env.env.static_env_params.map_size == (32, 32)
    assert envs.make("playground:CartpoleBalance").ratio == 512
    assert craftax.ratio == 16 and envs.make("craftax:Craftax-Classic-Symbolic-v1:reset_ratio=1").ratio == 1
    cartpole = envs.make("playground:CartpoleBalance", episode_length=10, action_repeat=2, reset_ratio=4)
    assert cartpole.env.max_steps == 5 and cartpole.ratio == 4


@pytest.mark.parametrize("prefix", OFTEN)
def test_a_missing_package_is_named_with_the_command_that_installs_it(prefix, monkeypatch):
    monkeypatch.setattr(type(SUITES[prefix]), "version", lambda self: None)
    command = re.escape(f"pip install 'msrl-jax[{SUITES[prefix].extra}]'")
    with pytest.raises(ImportError, match=rf"need {SUITES[prefix].package} \d+\.\d+ or later, .*; install it with: {command}"):
        envs.make(f"{prefix}:anything")
    monkeypatch.setattr(type(SUITES[prefix]), "version", lambda self: "0.0.1")
    with pytest.raises(ImportError, match=rf"0\.0\.1 is installed; install it with: {command}"):
        envs.make(f"{prefix}:anything")


def test_the_page_has_the_rates_of_their_record():
    root = Path(__file__).parents[3]
    page = (root / "benchmarks" / "README.md").read_text()
    for row in json.loads((root / "benchmarks" / "results" / "suites.json").read_text())["rows"]:
        numbers = f"{row['num_envs']} | {row['ours']:,.0f} | {row['theirs']:,.0f} | {row['ours'] / row['theirs']:.2f}"
        assert f"| `{row['env']}` | {numbers} |" in page
