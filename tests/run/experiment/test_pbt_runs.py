"""Runs of populations: what they record, how they go on, from which values they begin, and what they learn."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import envs
from msrl_jax.run import Result, RunFolderError
from msrl_jax.run.outputs.figures import copies
from msrl_jax.run.prepare import make_experiment
from tests.support.guarded_envs import Faulty
from tests.support.runs import assert_same_run, stop_after
from tests.support.transitions import noise

from .test_pbt import EIGHT, ENV, RATE, SMALL, STEPS

FOUR = dataclasses.replace(EIGHT, members=4, every=3)
TRAIN = {"pbt": FOUR, "total_steps": 12 * STEPS, "eval_episodes": 2, "progress": False}


def train(**options):
    return msrl.train("ppo", ENV, devices=jax.devices()[:1], **{**SMALL, **TRAIN, **options})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(out=tmp_path_factory.mktemp("pbt") / "run", seed=7)


@pytest.mark.long
def test_the_history_holds_lineage_and_schedules(trained):
    parent, rate = trained.history["pbt/parent"], trained.history["pbt/learning_rate"]
    ends = trained.history["iteration"]
    assert set(range(3, 13, 3)) <= set(ends), "chunks end at exploits"
    period = (ends - 1) // 3
    for p in range(4):
        rows = np.flatnonzero(period == p)
        assert (parent[rows] == parent[rows[0]]).all() and (rate[rows] == rate[rows[0]]).all()
        if p == 0:
            np.testing.assert_array_equal(parent[rows[0]], np.arange(4))
            np.testing.assert_array_equal(rate[rows[0]], np.float32(trained.description["settings"]["learning_rate"]))
            continue
        was = rate[rows[0] - 1]
        copied = parent[rows[0]].astype(int) != np.arange(4)
        np.testing.assert_array_equal(rate[rows[0]][~copied], was[~copied])
        factor = rate[rows[0]] / was[parent[rows[0]].astype(int)]
        at_bound = np.isin(rate[rows[0]], np.float32([1e-5, 1e-2]))
        assert (np.isclose(factor, 0.8) | np.isclose(factor, 1.2) | at_bound)[copied].all()
    found = copies(trained.history, 3)
    assert found and {step for step, _, _ in found} <= {3 * STEPS, 6 * STEPS, 9 * STEPS}


@pytest.mark.long
def test_settings_summary_and_text(trained):
    assert [s["seed"] for s in trained.settings] == [7, 8, 9, 10]
    assert trained.members == 4 and trained.has_members
    summary = trained.summary()
    assert summary["members"] == trained.settings
    last = trained.history["pbt/learning_rate"][-1]
    assert [m["learning_rate"] for m in summary["members_at_end"]] == last.tolist()
    assert "4 members from seed 7, entropy_coef, learning_rate by PBT every 3 iterations" in repr(trained)
    assert trained.member_state(2).params is not None and trained.act(np.zeros(4)).shape == ()


@pytest.mark.long
def test_lineage_is_drawn(trained, tmp_path, members):
    figure = msrl.plot_lineage(trained, tmp_path / "lineage.png")
    assert [panel.get_yscale() for panel in figure.axes] == ["linear", "log"], "as entropy_coef and learning_rate are drawn"
    assert (tmp_path / "lineage.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="this run has no lineage; train with pbt"):
        msrl.plot_lineage(members)


@pytest.mark.long
def test_a_run_of_a_population_is_read_again(trained):
    loaded = Result.load(trained.folder)
    assert_same_run(loaded, trained)
    np.testing.assert_array_equal(loaded.act(np.ones((3, 4))), trained.act(np.ones((3, 4))))


@pytest.mark.long
def test_a_run_goes_on_exactly_in_the_middle_of_a_period(trained, tmp_path):
    first = train(chunk=1, seed=7, out=tmp_path / "run", callbacks=[stop_after(7)])
    assert first.history["iteration"][-1] == 7
    with pytest.raises(RunFolderError, match=r"has pbt=.*cannot resume with pbt="):
        train(resume=tmp_path / "run", pbt=dataclasses.replace(FOUR, every=4))
    assert_same_run(msrl.train(resume=tmp_path / "run", devices=jax.devices()[:1], progress=False), trained)


def test_initial_values_may_be_given():
    rates = (1e-3, 2e-3, 3e-3, 4e-3)
    given = make_experiment("ppo", ENV, **{"learning_rate": list(rates), **SMALL}, pbt=FOUR)
    assert given.settings == FOUR.initial(0) | {"learning_rate": rates}


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (envs.log_uniform(1e-3, 3e-3), r"learning_rate=0.004 of member 3 is outside PBT.search, log_uniform"),
        (envs.choice([1e-3, 2e-3, 4e-3]), r"learning_rate=0.003 of member 2 is outside PBT.search, choice"),
    ],
    ids=["range", "options"],
)
def test_initial_values_lie_in_the_search(search, message):
    with pytest.raises(ValueError, match=message):
        train(learning_rate=[1e-3, 2e-3, 3e-3, 4e-3], pbt=dataclasses.replace(FOUR, search={"learning_rate": search}))


def test_bounds_rounded_to_float32_lie_in_the_search():
    pbt = msrl.PBT(search={"learning_rate": envs.log_uniform(1e-6, 1e-3)}, members=2)
    rounded = [float(np.float32(1e-6)), float(np.float32(1e-3))]
    experiment = make_experiment("ppo", ENV, **{"learning_rate": rounded, **SMALL}, pbt=pbt)
    assert rounded[0] < 1e-6 and experiment.members == 2


@pytest.mark.slow
def test_slow_members_are_left_alone():
    result = train(pbt=dataclasses.replace(FOUR, min_episodes=10_000), total_steps=8 * STEPS, eval_episodes=0)
    assert (result.history["pbt/parent"] == np.arange(4)).all()
    assert (np.asarray(result.run_state.inner.standing.num_scores) > 0).all(), "their episodes still count at the next exploit"


def train_unsteady(guard, rate):
    """Two members, one of whose learning rates makes numbers that are no float32 any more."""
    pbt = msrl.PBT(search={"learning_rate": envs.log_uniform(1e-5, 1e30)}, members=2, every=3, fraction=0.5)
    return msrl.train(
        "ppo",
        Faulty(),
        pbt=pbt,
        guard=guard,
        total_steps=9 * 32,
        chunk=1,
        eval_episodes=0,
        devices=jax.devices()[:1],
        progress=False,
        learning_rate=[rate, 1e-3],
        max_grad_norm=1e30,
        num_envs=4,
        unroll_length=8,
        hidden_sizes=(8,),
        num_epochs=1,
        num_minibatches=2,
        normalize_values=False,
    )


@pytest.mark.slow
def test_a_member_whose_updates_are_dropped_goes_on_with_the_others():
    result = train_unsteady("skip", 1e25)
    assert result.status == "finished" and result.history["skipped_updates"][:3, 0].sum() > 0
    assert result.history["skipped_updates"][:3, 1].sum() == 0


@pytest.mark.slow
def test_a_population_goes_back_with_smaller_rates():
    result = train_unsteady("rollback", 2e18)
    assert result.status == "finished" and [r["to"] for r in result.description["rollbacks"]] == [0]
    np.testing.assert_allclose(result.history["pbt/learning_rate"][:3], [[1e18, 5e-4]] * 3, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("validation_fraction", [0.0, 0.5])
def test_agents_that_learn_from_data_are_compared_by_their_validation_loss(validation_fraction):
    run = functools.partial(
        msrl.train,
        "bc",
        ENV,
        pbt=msrl.PBT({"learning_rate": RATE}, members=4, every=2, fraction=0.5),
        data=noise(envs.make(ENV)),
        total_steps=8,
        num_updates=2,
        batch_size=16,
        hidden_sizes=(8,),
        validation_fraction=validation_fraction,
        eval_episodes=0,
        chunk=2,
        devices=jax.devices()[:1],
        progress=False,
    )
    if not validation_fraction:
        with pytest.raises(ValueError, match="pbt ranks offline members by their validation loss; train with"):
            run()
        return
    result = run()
    loss, parent = result.history["validation_loss"], result.history["pbt/parent"].astype(int)
    assert result.history["iteration"].tolist()[:2] == [2, 4]
    order = np.argsort(loss[0])
    assert set(parent[1][order[2:]]) <= set(order[:2]) and (parent[1][order[:2]] == order[:2]).all()


@pytest.mark.slow
def test_a_population_leaves_bad_learning_rates_behind():
    from benchmarks.pbt import compare

    rows = [compare(seed) for seed in (20, 21)]
    assert all(row["pbt"] > row["fixed"] + 300 for row in rows), rows
