"""Nan and infinities in a run are noticed, and handled as the guard says."""

import dataclasses
import importlib
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.run import DivergedError
from msrl_jax.run.evaluation.history import NO_EPISODES, SKIPPED
from msrl_jax.run.experiment.members import Member
from msrl_jax.run.loop.guard import MOST_SKIPPED, Guard, StopOrRollBack, again
from msrl_jax.run.loop.loop import StopReason
from msrl_jax.run.loop.watch import non_finite
from tests.support.guarded_envs import Faulty
from tests.support.guarded_runs import APART, CONFIGS, TOGETHER, WHERE, all_finite, run


@pytest.mark.slow
def test_an_environment_whose_reset_returns_nan_is_named():
    with pytest.raises(DivergedError, match="environment's `reset` returned") as caught:
        run("es", Faulty("reset"))
    assert caught.value.path == ".obs" and caught.value.replay is None


@pytest.mark.long
@pytest.mark.parametrize(
    ("algo", "what", "policy"),
    [
        ("ppo", "observation", APART),
        pytest.param("dqn", "reward", APART, marks=pytest.mark.slow),
        pytest.param("ppo", "reward", TOGETHER, marks=pytest.mark.slow),
        pytest.param("sac", "reward", TOGETHER, marks=pytest.mark.slow),
        pytest.param("es", "reward", TOGETHER, marks=pytest.mark.slow),
        pytest.param("impala", "reward", f"{APART},staleness=2", marks=pytest.mark.slow),
    ],
)
def test_skip_drops_the_updates_and_goes_on(algo, what, policy):
    result = run(algo, Faulty(what, length=25), policy, guard="skip", iterations=8)
    assert result.status == "finished" and all_finite((result.state.params, result.state.opt_state))
    dropped = result.history["skipped_updates"].sum()
    assert dropped >= 1 if algo != "es" else dropped == 0, "ES ranks a nan return lowest, so its updates are finite"


@pytest.mark.slow
def test_skip_keeps_the_parameters_of_a_gradient_that_overflows():
    result = run("ppo", Faulty(), guard="skip", learning_rate=1e25, max_grad_norm=1e30)
    assert result.status == "finished" and all_finite((result.state.params, result.state.opt_state))
    assert result.history["skipped_updates"].tolist() == [2.0, 2.0, 2.0], "two updates per iteration"


@pytest.mark.slow
def test_skip_gives_the_same_run_under_every_policy():
    env = Faulty("reward", length=25)
    together, apart, central = (run("ppo", env, policy, "skip").state for policy in (TOGETHER, APART, "Central:workers=1"))
    for x, y, z in zip(*(jax.tree.leaves(s.params) for s in (together, apart, central)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(x, z, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "what", "policy"),
    [
        pytest.param("ppo", "reward", TOGETHER, marks=pytest.mark.slow),
        pytest.param("ppo", "observation", APART, marks=pytest.mark.slow),
        ("dqn", "reward", TOGETHER),
        pytest.param("sac", "observation", APART, marks=pytest.mark.slow),
        pytest.param("es", "reward", TOGETHER, marks=pytest.mark.slow),
    ],
)
def test_rollback_goes_back_with_a_smaller_rate_and_gives_up_in_the_end(algo, what, policy, tmp_path):
    config = CONFIGS[algo]
    steps = config["num_envs"] * config["unroll_length"]
    with pytest.raises(DivergedError) as caught:
        msrl.train(
            algo,
            Faulty(what),
            policy=policy,
            total_steps=6 * steps,
            chunk=1,
            eval_episodes=0,
            guard="rollback",
            checkpoint_every=steps,
            out=tmp_path / "run",
            devices=jax.devices()[:2],
            progress=False,
            learning_rate=1e-3,
            **config,
        )
    bad = WHERE[algo][0]
    description = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [r["to"] for r in description["rollbacks"]] == [bad - 1] * 5
    assert description["config"]["learning_rate"] == pytest.approx(1e-3 / 2**5)
    assert caught.value.result.config.learning_rate == pytest.approx(1e-3 / 2**5)
    rows = caught.value.result.history["iteration"]
    np.testing.assert_array_equal(rows, range(1, bad + 1))


def test_skip_ends_a_run_whose_member_drops_too_many_updates_in_a_row():
    """In chunks of 30 iterations; member 1 learns in iteration 7, and never again."""
    guard, chunk = Guard(), 30
    guard._streak = np.zeros(2, np.int64)
    guard._keep = lambda run: None
    run = SimpleNamespace(experiment=SimpleNamespace(guard="skip", has_members=True), iteration=0, changed_at=-1)
    while run.iteration < 7 + MOST_SKIPPED:
        rows = run.iteration + 1 + np.arange(chunk)
        run.iteration += chunk
        run.metrics = {SKIPPED: np.stack([rows % 2, rows != 7], axis=1).astype(np.float32)}
        guard.after(run)
        assert (run.finding is None) == (run.iteration < 7 + MOST_SKIPPED)
    assert (run.finding.metric, run.finding.iteration, run.finding.member) == (SKIPPED, 8, 1)
    assert StopOrRollBack(guard, None).after(run) == StopReason("diverged")


def test_a_run_that_goes_back_keeps_nothing_of_what_it_leaves(monkeypatch):
    """Rows and episodes after that iteration are gone, its own stay; keys are others, and rates are halved."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        learning_rate: float = 0.5
        critic_learning_rate: float = 0.25

    class Experiment(SimpleNamespace):
        def replaced(self, algorithm):
            return Experiment(**vars(self) | {"algorithm": algorithm})

    state = {"key": jax.random.key(3), "params": jnp.ones(2)}
    program = SimpleNamespace(place=lambda state: state, compile_seconds=0.0)
    experiment = Experiment(guard="rollback", algorithm=Config(), pbt=None, agent=SimpleNamespace(env=None))
    experiment.compile = lambda policy, devices: program
    kept = Guard()
    kept.begin, kept.earlier = (lambda run: None), (lambda run: (state, 4, 0))
    run = SimpleNamespace(
        experiment=experiment,
        deployment={"rollbacks": []},
        finding=SimpleNamespace(iteration=6, metric="loss", leaf=None),
        program=program,
        policy=None,
        devices=None,
        path=None,
        compiled_before=0.0,
        compile=lambda: None,
        iteration=6,
        rows=[{"iteration": i} for i in (2, 4, 6)],
        last_episodes=NO_EPISODES.add(0, np.arange(1.0, 7.0)),
    )
    monkeypatch.setattr("msrl_jax.run.loop.guard.close_simulators", lambda env: None)
    assert StopOrRollBack(kept, None).after(run) is None
    assert (run.iteration, run.finding) == (4, None) and [row["iteration"] for row in run.rows] == [2, 4]
    assert run.last_episodes.iterations.tolist() == [1, 2, 3, 4] and run.last_episodes.mean() == 2.5
    assert run.experiment.algorithm == Config(0.25, 0.125) and run.deployment["rollbacks"][0]["to"] == 4
    keys = [jax.random.key_data(x["key"]).tolist() for x in (state, run.run_state)]
    assert keys[0] != keys[1] and (run.run_state["params"] == 1).all()


def test_members_go_back_with_rates_halved_for_every_rollback():
    """Whatever state they go back to: their own rates of the config, or evolved ones of a state after some rollbacks."""
    member = Member({"key": jax.random.key(0)}, {"learning_rate": jnp.float32(0.125), "gamma": jnp.float32(0.5)})
    given = {"learning_rate": np.float32([0.5]), "gamma": np.float32([0.5])}
    found = [
        again(member, number, before, SimpleNamespace(numbers=given, pbt=pbt))
        for number, before, pbt in ((1, 0, None), (3, 2, None), (2, 0, "evolves"), (3, 2, "evolves"))
    ]
    assert [float(np.squeeze(m.numbers["learning_rate"])) for m in found] == [0.25, 0.0625, 0.03125, 0.0625]
    assert all(m.numbers["gamma"] == 0.5 for m in found)
    keys = [tuple(jax.random.key_data(m.inner["key"]).tolist()) for m in (member, *found[:3])]
    assert len(set(keys)) == 4, "each rollback has other random numbers"


def test_a_killed_run_goes_on_as_after_its_last_rollback(monkeypatch):
    """It went back twice to its newest checkpoint, which was written before."""
    module = importlib.import_module("msrl_jax.run.training")
    state = Member({"key": jax.random.key(0)}, {"learning_rate": jnp.float32(1.0)})
    monkeypatch.setattr(module.store, "restore_state", lambda *args: state)
    monkeypatch.setattr(module.store, "take_over", lambda *args: None)
    monkeypatch.setattr(module.store, "warn_of_schedules", lambda *args: None)
    experiment = SimpleNamespace(pbt="evolves")
    program = SimpleNamespace(begin=lambda count: None, place=lambda state: state, compile_seconds=0.0)
    run = SimpleNamespace(
        program=program,
        experiment=experiment,
        max_at_once=1,
        deployment={"rollbacks": [{}, {}]},
        seconds={},
        started=0.0,
        step=0,
        iteration=1,
        iterations=1,
    )
    module._begin_run(run, SimpleNamespace(checkpoint=SimpleNamespace(progress={"rollbacks": 0})))
    wanted = again(state, 2, 0, experiment)
    assert run.run_state.numbers == wanted.numbers == {"learning_rate": 0.25}
    assert run.run_state.inner["key"] == wanted.inner["key"]


def train_unsteady(out, **options):
    """With rates from 2e18 on, products of two layers' weights are no float32 any more."""
    options = {"total_steps": 8 * 32, "learning_rate": 4e18, **options}
    return msrl.train(
        "ppo",
        Faulty(),
        policy=TOGETHER,
        chunk=1,
        eval_episodes=0,
        guard="rollback",
        out=out,
        checkpoint_every=32,
        devices=jax.devices()[:1],
        progress=False,
        max_grad_norm=1e30,
        normalize_values=False,
        **CONFIGS["ppo"],
        **options,
    )


@pytest.mark.long
def test_a_resumed_run_keeps_the_rate_that_recovered(tmp_path):
    out = tmp_path / "run"
    stopped = train_unsteady(out, learning_rate=2e18, total_steps=4 * 32, callbacks=[lambda tick: tick.iteration == 3])
    assert [r["learning_rate"] for r in stopped.description["rollbacks"]] == [1e18]
    goes_on = msrl.train(resume=out, env=Faulty(), devices=jax.devices()[:1], progress=False)
    assert goes_on.status == "finished" and goes_on.config.learning_rate == 1e18 and all_finite(goes_on.state.params)
    assert goes_on.history["iteration"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("devices", [1, 2])
def test_leaves_that_are_not_finite_are_found_on_one_device_and_on_several(dtype, devices):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    rows = [[], [1, 2], [np.nan, 1], [1, np.inf], [-np.inf, 1], [np.inf, -np.inf], [6e4, -6e4]]
    leaves = [jax.device_put(jnp.asarray(row, dtype), split) for row in rows]
    wanted = [i for i, row in enumerate(rows) if not np.isfinite(row).all()]
    assert non_finite(leaves, range(len(rows))) == wanted == [2, 3, 4, 5]
    assert non_finite(leaves, [5, 1]) == [5]
