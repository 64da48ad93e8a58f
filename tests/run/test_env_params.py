"""Runs whose environments draw their parameters: the same under every policy, changed without compiling, exactly resumed."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli, envs
from msrl_jax.agents.transformations import counted
from msrl_jax.envs.param_sources import changed, find_source
from msrl_jax.run import Result
from tests.support.runs import assert_same_run, stop_after
from tests.support.transitions import noise

ENV, ITERATIONS = "CartPole-v1:max_steps_in_episode=20", 6
DRAWN = {
    "length": envs.uniform(0.25, envs.ramp(0.5, 2, 1000)),
    "gravity": envs.choice([8.0, 12.0]),
    "max_steps_in_episode": envs.uniform(4, 9),
    "force_mag": 10,
}
SMALL = {
    "ppo": {"num_envs": 16, "unroll_length": 8, "hidden_sizes": (8,), "num_epochs": 1, "num_minibatches": 2},
    "dqn": {
        "num_envs": 16,
        "unroll_length": 8,
        "hidden_sizes": (8,),
        "replay.learning_starts": 128,
        "batch_size": 32,
        "num_updates": 2,
        "replay.capacity": 1024,
    },
}


@functools.cache
def reference(algo):
    """The agent, its initial state, and the result of plain jit(scan)."""
    agent = counted(msrl.algorithms.make(algo, SMALL[algo]).build(envs.RandomizeParams(envs.make(ENV), DRAWN)), 100)
    state = jax.jit(agent.init)(jax.random.key(0))
    return agent, state, *jax.jit(lambda state: jax.lax.scan(lambda s, _: agent.iteration(s), state, length=ITERATIONS))(state)


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted(msrl.policies.POLICIES))
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("algo", SMALL)
def test_the_same_run_under_every_policy(algo, count, policy):
    agent, state, after, metrics = reference(algo)
    program = msrl.compile(
        agent.iteration, state, policy=msrl.policies.get(policy), axes=agent.axes, devices=jax.devices()[:count]
    )
    mine, measured = program.run(state, ITERATIONS, chunk=ITERATIONS)
    np.testing.assert_array_equal(mine.inner.obs, after.inner.obs)
    for a, b in zip(*map(jax.tree.leaves, (find_source(mine), find_source(after))), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*map(jax.tree.leaves, (mine.inner.params, after.inner.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    assert {f"env_params/{name}" for name in DRAWN} < set(measured)
    for a, b in zip(*map(jax.tree.leaves, (measured, metrics)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4)


def by_difficulty(key, level):
    """Longer poles at higher levels."""
    return {"length": 0.25 + level["most"] * jax.random.uniform(key), "gravity": level["gravity"][0]}


def curriculum():
    return envs.Curriculum(by_difficulty, {"most": 0.25, "gravity": np.array([9.8, 1.0])})


def harder(tick):
    """Sets the next level by the last episodes."""
    most = tick.iteration / 4 + tick.metrics["episode_return"] / 100
    tick.set_env_params({"most": most, "gravity": np.array([9.8 + tick.iteration, 1.0])})


def longer(tick):
    tick.set_env_params({"length": envs.uniform(0.25, 0.25 + tick.iteration)})
    tick.set_env_params({"gravity": 9.0 + tick.iteration})


KINDS = {"level": (curriculum, harder), "values": (lambda: {"length": envs.uniform(0.25, 0.5), "gravity": 9.8}, longer)}


def train(kind, out=None, callbacks=(), policy="GPUOnly:num_devices=1", **options):
    given, change = KINDS[kind]
    options = {"chunk": 2, "eval_episodes": 4, "progress": False, "seed": 3, "total_steps": 128 * 12} | options
    return msrl.train(
        "ppo",
        ENV,
        env_params=options.pop("env_params", given()),
        policy=policy,
        out=out,
        callbacks=[change, *callbacks],
        **options,
        **SMALL["ppo"],
    )


@pytest.fixture(scope="module")
def whole():
    return functools.cache(train)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["level", pytest.param("values", marks=pytest.mark.slow)])
def test_a_curriculum_of_a_callback_compiles_nothing(kind):
    compiled, seen = [], []

    def listener(event, _, **about):
        if "backend_compile" in event:
            compiled.append(about.get("fun_name", event))

    def count(tick):
        seen.append(len(compiled))

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        result = train(kind, callbacks=[count], eval_episodes=0, total_steps=128 * 20)
    finally:
        jax.monitoring.clear_event_listeners()
    # The first change compiles the copying of a number, and no later chunk anything.
    assert len(seen) == 10 and seen[0] > 0 and set(seen[2:]) == {seen[2]}
    lengths = result.history["env_params/length"]
    assert lengths[-1] > 3 * lengths[0]
    gravity = result.history["env_params/gravity"]
    assert gravity[0] == pytest.approx(9.8) and gravity[-1] > 20


@pytest.mark.long
@pytest.mark.parametrize("kind", ["level", pytest.param("values", marks=pytest.mark.slow)])
def test_a_run_resumes_in_the_middle_of_a_curriculum(kind, whole, tmp_path):
    train(kind, tmp_path / "run", callbacks=[stop_after(6)])
    given = {"env_params": curriculum()} if kind == "level" else {"env_params": None}
    again = train(kind, tmp_path / "run", resume=True, **given)
    assert_same_run(again, whole(kind))
    loaded = Result.load(tmp_path / "run", **given)
    one, other = (result.evaluate(16, seed=1).returns for result in (loaded, whole(kind)))
    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_episodes_are_played_with_the_parameters_of_the_run_unless_told_otherwise(tmp_path):
    steps = {"max_steps_in_episode": 3}

    def shorter(tick):
        tick.set_env_params({"max_steps_in_episode": 2})

    result = msrl.train(
        "ppo",
        ENV,
        env_params=steps,
        total_steps=512,
        chunk=2,
        progress=False,
        eval_episodes=4,
        eval_every=128,
        callbacks=[shorter],
        out=tmp_path / "run",
        **SMALL["ppo"],
    )
    np.testing.assert_array_equal(result.history["eval_length"], [3, 2])
    run = Result.load(tmp_path / "run")
    assert set(run.evaluate(4).lengths) == {2}
    assert set(run.evaluate(4, env_params={"max_steps_in_episode": envs.choice([4])}).lengths) == {4}
    assert run.evaluate(4, env_params={}).lengths.min() > 4
    assert msrl.data.record(run, 12, num_envs=2).truncated.sum() == 6
    assert msrl.data.record(run, 12, num_envs=2, env_params="max_steps_in_episode=6").truncated.sum() == 2


REFUSED = {
    "name": ("values", {"lenght": 1.0}, r"not draw a parameter 'lenght' \(did you mean 'length'\?\) of CartPole-v1"),
    "new": ("values", {"tau": 0.1}, "does not draw a parameter 'tau' of CartPole-v1; it draws length, gravity. Pass every"),
    "kind": ("values", {"length": 1.0}, r"length was uniform\(0.25, 0.5\) and cannot become 1 during a run"),
    "order": ("values", {"length": envs.uniform(2, 1)}, "the bounds are 2.0 and 1.0; use low <= high"),
    "form": ("values", 3.0, "by name, {name: value}, not by 3.0"),
    "level": ("level", {"most": 1.0}, "the level was .* and cannot become .* during a run, which would change the program"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_set_is_refused_in_words(case):
    kind, values, message = REFUSED[case]
    env = envs.RandomizeParams(envs.make("CartPole-v1"), KINDS[kind][0]())
    with pytest.raises(ValueError, match=message):
        changed(env, values)


def test_runs_without_numbers_to_set_say_so():
    message = "the run on CartPole-v1 has no parameters to set; start it with env_params={name: value}"
    env = envs.make("CartPole-v1")
    for there in (env, envs.RandomizeParams(env, lambda key: {"length": jax.random.uniform(key)})):
        with pytest.raises(ValueError, match=re.escape(message)):
            changed(there, {"length": 1.0})
    with pytest.raises(RuntimeError, match="this Tick belongs to no run"):
        msrl.run.Tick(0, 0, 0, {}, lambda: None).set_env_params({})


@pytest.mark.slow
def test_a_run_without_environments_plays_its_episodes_with_the_parameters_but_cannot_change_them():
    env = envs.make(ENV)
    options = {"data": noise(env), "env_params": {"max_steps_in_episode": 3}, "total_steps": 32, "progress": False}
    assert set(msrl.train("bc", env, eval_episodes=4, **options).evaluation.lengths) == {3}
    with pytest.raises(ValueError, match="bc keeps no environments between iterations, so no parameters can be set"):
        msrl.train("bc", env, eval_episodes=0, callbacks=[lambda t: t.set_env_params({"max_steps_in_episode": 2})], **options)


def test_a_level_keeps_its_type():
    env = envs.RandomizeParams(
        envs.make("CartPole-v1"), envs.Curriculum(lambda key, level: {"length": 1.0 + level + jnp.float32(0)}, 0)
    )
    assert changed(env, 2.0).level == 2
    with pytest.raises(ValueError, match=r"cannot become 0\.5, because it started as int32; start with a float"):
        changed(env, 0.5)


@pytest.mark.long
def test_the_folder_knows_what_was_drawn(tmp_path, capsys):
    run = tmp_path / "run"
    options = ["--total-steps", "256", "--num-envs", "16", "--unroll-length", "8", "--progress", "none", "--eval-episodes", "2"]
    train = ["train", "--env", ENV, "--out", str(run), *options, "--hidden-sizes", "4"]
    assert cli.main([*train, "--env-params", "length=uniform:0.25:1,max_steps_in_episode=5"]) == 0
    about = json.loads((run / "config.json").read_text())
    assert about["env_params"] == {"length": "uniform(0.25, 1)", "max_steps_in_episode": "5"}
    assert cli.main(["evaluate", str(run), "--episodes", "4", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["lengths"]) == {5}
    assert cli.main(["evaluate", str(run), "--episodes", "4", "--env-params", "max_steps_in_episode=3", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])["lengths"]) == {3}
    assert cli.main([*train, "--total-steps", "384", "--resume", "--env-params", "length=uniform:0.25:2"]) == 2
    assert "cannot resume with env_params={'length': 'uniform(0.25, 2)'}" in capsys.readouterr().err
    assert cli.main([*train, "--total-steps", "384", "--resume"]) == 0
    assert cli.main([*train[:4], str(tmp_path / "other"), *options, "--env-params", "lenght=1"]) == 2
    assert "no parameter 'lenght' (did you mean 'length'?)" in capsys.readouterr().err
