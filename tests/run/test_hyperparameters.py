"""Members with different settings: their runs, their results, what goes on, and what is refused."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import msrl_jax as msrl
from msrl_jax import algorithms, envs
from msrl_jax.agents.agent import innermost
from msrl_jax.run import Result
from msrl_jax.run.experiment.members import with_numbers
from msrl_jax.run.prepare import make_experiment

from .test_members import ENV, assert_member

RATES, DISCOUNTS = [1e-4, 1e-2], [0.9, 0.99]


@pytest.fixture(scope="module")
def options(tiny, one_device):
    return {"total_steps": 6 * 64, "chunk": 2, "eval_episodes": 4, "devices": one_device, "progress": False, **tiny}


@pytest.fixture(scope="module")
def swept(options, tmp_path_factory):
    """Two settings with three seeds each."""
    return msrl.train(
        "ppo",
        ENV,
        seed=3,
        seeds=3,
        learning_rate=RATES,
        discount=np.array(DISCOUNTS),
        eval_every=2 * 64,
        out=tmp_path_factory.mktemp("runs") / "run",
        **options,
    )


@pytest.mark.long
def test_a_member_is_the_run_with_its_setting_and_seed(swept, options):
    setting, seed = 1, 1
    alone = msrl.train(
        "ppo", ENV, seed=3 + seed, learning_rate=RATES[setting], discount=DISCOUNTS[setting], eval_every=2 * 64, **options
    )
    assert_member(swept, 3 * setting + seed, alone)
    assert_near(swept.member_state(3 * setting + seed).params, alone.state.params)
    assert swept.settings[3 * setting + seed] == {
        "seed": 3 + seed,
        "learning_rate": RATES[setting],
        "discount": DISCOUNTS[setting],
    }


@pytest.mark.long
def test_the_result_says_which_member_has_which_setting(swept):
    assert swept.members == 6 and swept.seeds == 3 and swept.history["episode_return"].shape == (3, 6)
    summary = swept.summary()
    assert summary["members"] == swept.settings and len(summary["eval_return_per_member"]) == 6
    best = swept.settings[swept.best]
    assert f"(seed {best['seed']}, learning_rate={best['learning_rate']:g}" in repr(swept)
    assert "2 settings of learning_rate, discount" in repr(swept)


@pytest.mark.long
def test_a_figure_has_a_line_for_each_setting(swept):
    panel = msrl.plot(swept, metrics=("entropy",)).axes[0]
    labels = [line.get_label() for line in panel.lines]
    assert labels == ["learning_rate=0.0001, discount=0.9", "learning_rate=0.01, discount=0.99"]
    np.testing.assert_allclose(panel.lines[1].get_ydata(), swept.history["entropy"][:, 3:].mean(1))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
@pytest.mark.parametrize("policy", ["GPUOnly", "SingleLearnerCoarse", "MultiLearner"])
def test_twelve_members_are_the_same_under_every_policy(policy, devices, options):
    """Four settings with three seeds; on eight devices the environments of a member are split as well as they can be."""
    few = options | {"eval_episodes": 0, "total_steps": 4 * 64, "seeds": 3, "learning_rate": [1e-4, 1e-3, 3e-3, 1e-2]}
    one = twelve(few)
    split = msrl.train("ppo", ENV, policy=policy, **few | {"devices": jax.devices()[:devices]})
    for name in ("entropy", "learning_rate", "episode_length"):
        np.testing.assert_allclose(split.history[name], one.history[name], rtol=1e-4, atol=1e-5, err_msg=name)
    assert_near(split.state.params, one.state.params)


def assert_near(params, others):
    """That parameters differ by less than 1e-5 of the largest one of their array."""
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())


_twelve = []


def twelve(few):
    if not _twelve:
        _twelve.append(msrl.train("ppo", ENV, **few))
    return _twelve[0]


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(name, marks=pytest.mark.long if name == "SingleLearnerCoarse" else pytest.mark.slow)
        for name in msrl.policies.names()
    ],
)
def test_members_that_divide_are_split_and_nothing_is_summed_over_devices(policy, tiny):
    overrides = {"learning_rate": [1e-4, 1e-3], **tiny, "num_envs": 5}
    setup = make_experiment("ppo", ENV, seeds=2, total_steps=1000, **overrides)
    program = setup.compile(msrl.policies.get(policy), jax.devices()[:4])
    assert [c for p in program.explain().programs for c in p.collectives] == []
    placed = innermost(program.unwrap(setup.start(program))).obs.sharding
    assert placed.spec == P("devices") and len(placed.device_set) in (2, 4), "five environments divide by none of these"


@pytest.mark.slow
def test_a_run_goes_on_and_is_loaded(swept, options, tmp_path):
    loaded = Result.load(swept.folder)
    assert loaded.settings == swept.settings and loaded.member(5) == 5
    obs = np.zeros(4, np.float32)
    np.testing.assert_array_equal(loaded.probabilities(obs, member=4), swept.probabilities(obs, member=4))
    part = msrl.train(
        "ppo",
        ENV,
        seed=3,
        seeds=3,
        learning_rate=RATES,
        discount=DISCOUNTS,
        eval_every=2 * 64,
        out=tmp_path / "run",
        callbacks=[lambda tick: tick.iteration == 2],
        **options,
    )
    assert part.status == "stopped"
    rest = msrl.train(resume=tmp_path / "run", learning_rate=RATES, devices=options["devices"], progress=False)
    assert jax.tree.all(jax.tree.map(np.array_equal, rest.state.params, swept.state.params))
    np.testing.assert_array_equal(rest.history["entropy"], swept.history["entropy"])
    with pytest.raises(ValueError, match=r"has learning_rate=\[0.0001, 0.01\], and cannot resume with learning_rate=0.1"):
        msrl.train(resume=tmp_path / "run", learning_rate=0.1)


def assert_close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_selected_settings_go_on_as_they_would_have(options, tmp_path):
    """Of four settings, the third and the first: each goes on as in the run of all."""
    rates = [1e-4, 1e-3, 1e-2, 3e-2]
    settings = {"seeds": 2, "learning_rate": rates, "eval_every": None}
    whole = msrl.train("ppo", ENV, **settings, **options)
    part = msrl.train("ppo", ENV, callbacks=[lambda tick: tick.iteration == 2], **settings, **options)
    chosen = part.select([2, 0])
    assert chosen.members == 4 and [s["learning_rate"] for s in chosen.settings] == [1e-2, 1e-2, 1e-4, 1e-4]
    chosen.save(tmp_path / "some")
    rest = msrl.train(resume=tmp_path / "some", devices=options["devices"], progress=False)
    for member, of_whole in enumerate((4, 5, 0, 1)):
        assert_close(rest.member_state(member).params, whole.member_state(of_whole).params)
        assert rest.evaluation.mean_return[member] == whole.evaluation.mean_return[of_whole]
    one = part.select(member=5)
    assert one.members == 1 and one.settings == [{"seed": 1, "learning_rate": 1e-2}]
    one.save(tmp_path / "one")
    rest = msrl.train(resume=tmp_path / "one", devices=options["devices"], progress=False)
    assert_close(rest.member_state(0).params, whole.member_state(5).params)
    for bad in ([], [4], [0, 0], [-1], [True], ["a"]):
        with pytest.raises(ValueError, match="this run has settings 0 to 3; list at least one of them, each once"):
            part.select(bad)


@pytest.mark.long
def test_one_seed_of_several_goes_on_alone(members, one_device, tmp_path):
    one = members.select(member=1)
    assert not one.has_members and one.description["seed"] == 4 and one.evaluation.returns.shape == (4,)
    one.save(tmp_path / "one")
    rest = msrl.train(resume=tmp_path / "one", total_steps=8 * 64, devices=one_device, progress=False)
    assert rest.history["iteration"][-1] == 8 and rest.history["entropy"].ndim == 1
    with pytest.raises(ValueError, match="this run has only one setting"):
        members.select([0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_envs": [8, 16]}, r"PPO.num_envs=\[8, 16\]: num_envs changes the program .* learning_rate"),
        ({"learning_rate": [1e-3, -1.0]}, r"member 2 \(learning_rate=-1\): PPO.learning_rate=-1.0: use a finite"),
        ({"learning_rate": [1e-3, "fast"]}, r"PPO.learning_rate\[1\]='fast': use a number"),
        ({"learning_rate": [1e-3, 10**400]}, r"learning_rate\[1\]=1000.*: use a number that float32 holds"),
        ({"learning_rate": [1e-3, 1e-46]}, r"member 2 .*PPO.learning_rate=1e-46: use a number that float32 holds"),
        ({"learning_rate": []}, "learning_rate has 0 values"),
        ({"learning_rate": [1e-3, 1e-4], "discount": [0.9]}, "learning_rate has 2, discount has 1 values"),
        ({"learning_rate": np.ones((2, 2))}, r"learning_rate\[0\]=\[1.0, 1.0\]: use a number"),
    ],
    ids=["shape", "negative", "text", "huge", "tiny", "empty", "lengths", "matrix"],
)
def test_bad_settings_are_refused_before_anything_compiles(fields, message, tiny):
    with pytest.raises(ValueError, match=message):
        msrl.train("ppo", ENV, seeds=2, total_steps=6 * 64, progress=False, **tiny | fields)


def test_a_population_that_does_not_fit_says_how_many_bytes(monkeypatch):
    monkeypatch.setattr("msrl_jax.fragments.runtime.memory._limits_of_container", lambda: [10**8])
    with pytest.raises(ValueError, match=r"takes [\d,]+ bytes"):
        msrl.train("dqn", ENV, seeds=50, learning_rate=[1e-3, 1e-4], replay="replay:100_000", total_steps=1e6, progress=False)


def test_an_algorithm_that_branches_on_a_field_is_told_so(tiny):
    def build(config):
        return config.build(envs.make(ENV)) if config.learning_rate > 0 else None

    agent = with_numbers(build, algorithms.get("ppo")(**tiny), ("learning_rate",))
    with pytest.raises(jax.errors.TracerBoolConversionError) as raised:
        jax.eval_shape(agent.init, jax.random.key(0), {"learning_rate": np.float32(1e-3)})
    assert "differ in learning_rate of PPO," in raised.value.__notes__[0]
