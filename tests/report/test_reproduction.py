"""Recipes are what the command line reads; a reproduction agrees with its record, or says that it does not."""

import dataclasses
import functools
import json
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli
from msrl_jax.report import provenance, reproduction
from msrl_jax.run import recipes
from msrl_jax.run.disk.folder import versions
from msrl_jax.run.loop.hooks import Evaluating
from tests.cli.test_config_file import experiment_of
from tests.support import processes
from tests.support.transitions import noise

ROOT = Path(__file__).parents[2]
TOML = """# Small, for tests.
# Two lines.
algo = "ppo"
env = "CartPole-v1"
total_steps = 12_000
num_envs = 8
unroll_length = 32
hidden_sizes = [16, 16]
num_minibatches = 2
eval_episodes = 4
policy = "GPUOnly:num_devices=1"
"""

SMALL = msrl.Experiment(
    algorithm=msrl.algorithms.PPO(num_envs=8, unroll_length=32, hidden_sizes=(16, 16), num_minibatches=2), total_steps=12_000
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with one recipe, `small`, in place of those of the package; records are looked for in it, too."""
    path = tmp_path / "recipes"
    path.mkdir()
    (path / "small.toml").write_text(TOML)
    monkeypatch.setattr(recipes, "FOLDER", path)
    monkeypatch.setattr(recipes, "RECORDS", (path,))
    return path


def reproduced(out, **options):
    return msrl.reproduce("small", out=out, **{"progress": False, "seeds": 5, **options})


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A reproduction without a record, and the folder of the recipe."""
    path = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(recipes, "FOLDER", path)
        patched.setattr(recipes, "RECORDS", (path,))
        (path / "small.toml").write_text(TOML)
        found = reproduced(path / "out")
    return found


def scores(record):
    return np.array([record.last, record.best])


@pytest.mark.long
def test_a_record_has_the_curves_and_scores_of_every_seed(first):
    record, result = first.record, msrl.Result.load(first.folder / "seeds-0-4")
    assert first.verdict == "no record" and record.seeds == [0, 1, 2, 3, 4]
    assert result.experiment == dataclasses.replace(SMALL, seeds=5)
    np.testing.assert_array_equal(record.steps, result.history["step"])
    np.testing.assert_allclose(np.array(record.returns, float), result.history["episode_return"].T, rtol=1e-5)
    np.testing.assert_allclose(record.last, result.final("episode_return"), rtol=1e-5)
    assert all(step in record.evaluations for step in record.best_steps) and len(record.evaluations) == 20


@pytest.mark.long
def test_the_best_agent_is_that_of_its_best_evaluation(first):
    """Its parameters act as those of the run that stopped there."""
    run = first.folder / "seeds-0-4"
    hook = reproduction.BestAgents()
    hook.read(run)
    result = msrl.Result.load(run)
    columns = result.history["eval_return"]
    np.testing.assert_array_equal(hook.scores, np.nanmax(columns, axis=0))
    where = np.nanargmax(columns, axis=0)
    np.testing.assert_array_equal(hook.steps, result.history["step"][where])
    at_end = [m for m in range(5) if where[m] == len(columns) - 1]
    taken = result.behavior.take(result.run_state)
    for leaf, kept in zip(taken, hook.leaves, strict=True):
        for m in range(5):
            assert np.array_equal(leaf[m], kept[m]) == (m in at_end) or leaf[m].size == 1


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_best_agents_play_with_other_keys_than_their_evaluations(seeds, monkeypatch):
    """Else their score would be that of the luckiest evaluation."""
    keys = []
    chosen = SimpleNamespace(
        evaluate_leaves=lambda leaves, key: keys.append(key) or SimpleNamespace(means={"eval_return": np.zeros(seeds)}),
        env=None,
        teams=(),
    )
    for module in ("msrl_jax.report.best_agents", "msrl_jax.run.loop.hooks"):
        monkeypatch.setattr(f"{module}.make_evaluator", lambda *args, **options: chosen)
    monkeypatch.setattr("msrl_jax.report.best_agents.close_simulators", lambda env: None)
    key = jax.random.key(0) if seeds == 1 else jax.random.split(jax.random.key(0), seeds)
    experiment = SimpleNamespace(
        behavior=SimpleNamespace(leaf_types=[]), has_members=seeds > 1, members=seeds, seeds=seeds, rank_by="return", key=key
    )
    reproduction.BestAgents().play(experiment, 4)
    keys += [Evaluating(experiment, 4, None)._key, key]
    data = np.concatenate([jax.random.key_data(x).reshape(-1, 2) for x in keys])
    assert len(np.unique(data, axis=0)) == 3 * seeds


@pytest.mark.slow
def test_a_broken_loss_does_not_agree(folder, first, tmp_path, monkeypatch, capsys):
    first.record.write(folder / "small.json")
    loss = msrl.algorithms.ppo.ppo_loss  # what is better than expected becomes less likely:
    monkeypatch.setattr(msrl.algorithms.ppo, "ppo_loss", lambda *args: loss(*args[:4], -args[4], *args[5:]))
    command = ["reproduce", "small", "--out", str(tmp_path / "broken"), "--progress", "none", "--json"]
    assert cli.main(command) == 1
    text, line = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert "seeds 0 to 4: does not agree" in text and json.loads(line)[0]["verdict"] == "does not agree"


@pytest.mark.long
def test_a_finished_reproduction_is_not_trained_again_and_agrees_with_itself(first, folder, monkeypatch):
    first.record.write(folder / "small.json")
    monkeypatch.setattr(sys.modules["msrl_jax.run.training"], "loop", None)
    found = reproduced(first.folder, seeds=None)
    assert found.verdict == "agrees" and found.record.seeds == first.record.seeds
    np.testing.assert_array_equal(scores(found.record), scores(first.record))
    assert [each.probability for each in found.agreements.values()] == [1.0, 1.0]


@pytest.mark.slow
def test_a_killed_one_goes_on_to_the_same_record(folder, first, tmp_path):
    out = tmp_path / "out"
    code = f"""
import sys
from pathlib import Path
from msrl_jax import cli
from msrl_jax.run import recipes
recipes.FOLDER, recipes.RECORDS = Path({str(folder)!r}), ()
sys.exit(cli.main(["reproduce", "small", "--seeds", "5", "--out", {str(out)!r}, "--progress", "none"]))
"""
    process = processes.start([sys.executable, "-c", code])
    best, end = out / "small" / "seeds-0-4" / "best.npz", time.monotonic() + 240
    while not best.exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert best.exists() and not (out / "small" / "small.json").exists()
    done = processes.run([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    record = recipes.Record.read(out / "small" / "small.json")
    np.testing.assert_array_equal(scores(record), scores(first.record))
    assert record.returns == first.record.returns


@pytest.mark.parametrize(("given", "message"), [({"seeds": 10**9}, "at most 10000"), ({"seed": 2**32 - 3}, "32 bits")])
def test_seeds_that_cannot_be_trained_are_refused(folder, tmp_path, given, message):
    with pytest.raises(ValueError, match=message):
        reproduced(tmp_path, **given)


LEARNED = (
    "ppo-cartpole",
    "a2c-acrobot",
    "dqn-cartpole",
    "r2d2-cartpole",
    "impala-cartpole",
    "a3c-cartpole",
    "pqn-cartpole",
    "es-cartpole",
    "ppo-pendulum",
    "sac-pendulum",
    "td3-pendulum",
    "ppo-cnn-breakout",
    "dqn-breakout",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNED)
def test_recipes_agree_with_their_records(name, tmp_path):
    """These learn: a score that is as high as the one on record is that of an algorithm that works."""
    found = msrl.reproduce(name, out=tmp_path, progress=False)
    assert found.verdict == "agrees", found


@pytest.fixture
def again(first, tmp_path):
    """A copy of the folder of `first`, where the command looks for `small`."""
    shutil.copytree(first.folder, tmp_path / "again" / "small")
    return tmp_path / "again" / "small"


def update(again, *options):
    return cli.main(["reproduce", "small", "--out", str(again.parent), "--update", "--progress", "none", *options])


@pytest.mark.long
def test_a_record_gives_way_to_none_of_fewer_seeds(folder, first, again, monkeypatch, capsys):
    first.record.write(folder / "small.json")
    assert update(again, "--seed", "3", "--seeds", "1") == 2
    message = capsys.readouterr().err
    assert "would replace the record of small, of seeds 0 to 4, by one of fewer seeds" in message
    assert "leave --seed and --seeds out" in message
    three = dataclasses.replace(first.record, seeds=[3])
    monkeypatch.setattr(reproduction, "_make_record", lambda *args: three)
    assert reproduced(again).record.seeds == [3]
    assert recipes.Record.read(again / "small.json").seeds == [0, 1, 2, 3, 4]
    dataclasses.replace(first.record, seeds=[9, 8]).write(again / "small.json")
    reproduced(again)
    assert recipes.Record.read(again / "small.json").seeds == [9, 8]  # which the other one is no part of


@pytest.mark.long
def test_a_folder_has_the_record_of_one_recipe_and_the_agents_of_its_runs(folder, first, again, tmp_path):
    (folder / "small.toml").write_text(TOML.replace("num_minibatches = 2", "num_minibatches = 4"))
    with pytest.raises(recipes.RecordError, match=r"small.json is of num_minibatches=2, and the recipe has 4 now; move"):
        reproduced(again)
    assert recipes.Record.read(again / "small.json") == first.record
    (folder / "small.toml").write_text(TOML)
    best = again / "seeds-0-4" / "best.npz"
    with np.load(best) as file:
        np.savez(best, **{**file, "scores": file["scores"] + 1})
    with pytest.raises(recipes.RecordError, match=r"best.npz of the seeds from 0 on is of another run; delete its folder"):
        reproduced(again)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"the folder .*/out cannot be created \(Not a directory\); choose another one"):
        reproduced(tmp_path / "file" / "out")


@pytest.mark.long
def test_seeds_that_are_too_few_to_be_told_from_the_record_are_named_before(folder, first, again, capsys):
    three = {name: getattr(first.record, name)[:3] for name in ("seeds", "returns", "last", "best", "best_steps")}
    dataclasses.replace(first.record, **three).write(folder / "small.json")
    assert cli.main(["reproduce", "small", "--seeds", "5", "--out", str(again.parent), "--progress", "none"]) == 0
    told = capsys.readouterr()
    assert told.err == "small: seeds: 5 are too few to compare with the 3 of its record; use --seeds 9 or more\n"
    assert "seeds 0 to 4: too few" in told.out


@pytest.mark.long
def test_a_record_says_what_trained_its_seeds(folder, first, again):
    file = again / "seeds-0-4" / "origin.json"
    origin = json.loads(file.read_text())
    assert (origin["commit"], origin["versions"]) == (first.record.commit, first.record.versions)
    file.write_text(json.dumps(origin | {"sources": "others", "commit": "abc", "processor": "Another"}))
    found = reproduced(again)
    assert found.is_of_other_code and "trained before, by other code of this package; delete" in repr(found)
    assert (found.record.commit, found.record.hardware["processor"]) == ("abc", "Another")
    assert not first.is_of_other_code and "trained before" not in repr(first)
    changed = f"commit abc (recorded {first.record.commit or 'unknown'})"
    assert changed in repr(dataclasses.replace(found, recorded=first.record))
    assert "commit" not in repr(dataclasses.replace(first, recorded=first.record))
    file.write_text(json.dumps(origin | {"versions": origin["versions"] | {"jax": "0.1"}}))
    with pytest.raises(recipes.RecordError, match=r"seeds-0-4 was trained with jax 0\.1, not .* as now; delete it, or choose"):
        reproduced(again)
    file.unlink()
    with pytest.raises(recipes.RecordError, match=r"origin.json does not describe what trained the run .* delete"):
        reproduced(again)


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (TOML, "", "algo is missing in the recipe .*small.toml; write a value such as algo ="),
        ('"ppo"', '"ppo', "small.toml cannot be read: .*line 3"),
        ("eval_episodes = 4", "num-envs = 9", "num-envs and num_envs are the same key in the recipe .*small.toml"),
        ("12_000", '"12000"', "total_steps is '12000' in the recipe"),
        ("num_envs = 8", "learning_rate = [1e-3, 1e-2]", r"has several settings \(learning_rate\)"),
        ("eval_episodes = 4", "eval_episodes = 0", "eval_episodes is 0"),
        ("GPUOnly:num_devices=1", "Nowhere", "the recipe .*small.toml: .*Nowhere"),
    ],
)
def test_a_bad_recipe_is_one_sentence_and_stops_no_other(folder, tmp_path, was, now, message):
    (folder / "small.toml").write_text(TOML.replace(was, now))
    (folder / "ppo-other.toml").write_text(TOML)
    with pytest.raises(ValueError, match=message):
        reproduced(tmp_path)
    assert list(tmp_path.iterdir()) in ([], [folder])
    (folder / "ppo-other.toml").rename(folder / "ppo-zoo.toml")
    if "missing" in message or "read" in message or "total" in message:
        assert recipes.of_pair("ppo", "CartPole-v1").name == "ppo-zoo"


def test_keys_and_names_may_be_written_as_flags_and_in_capitals(folder):
    text = "\ufeff" + TOML.replace("num_envs", "num-envs").replace("total_steps", "total-steps")
    (folder / "PPO-Small.toml").write_text(text)
    assert msrl.recipe("ppo-small") == SMALL and "ppo-small" in recipes.names()


@pytest.mark.slow
def test_agents_that_learn_from_data_are_scored_by_their_evaluations(folder, tmp_path):
    msrl.data.save(noise(msrl.envs.make("CartPole-v1")), tmp_path / "data.npz")
    text = f"""algo = "bc"\nenv = "CartPole-v1"\ntotal_steps = 200\ndata = "{tmp_path / "data.npz"}"\nhidden_sizes = [8]\n"""
    (folder / "small.toml").write_text(text)
    record = reproduced(tmp_path / "out", seeds=2).record
    known = np.array(record.returns, float)
    known = known[:, ~np.isnan(known[0])]
    assert known.shape == (2, len(record.evaluations)) and np.isfinite(scores(record)).all()


def test_seeds_that_could_not_be_saved_end_it(folder, tmp_path, monkeypatch):
    """It reads their folder again."""
    monkeypatch.setattr(reproduction, "train", lambda *args, **options: SimpleNamespace(save_error="No space left on device"))
    with pytest.raises(msrl.run.NotSavedError, match="No space left on device"):
        reproduced(tmp_path / "out")


def test_groups_that_were_begun_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "memory_of", lambda *args: (4, 1, 1))
    groups = functools.partial(reproduction._split_seeds, SMALL, msrl.policies.GPUOnly(), None)
    assert groups(range(10), tmp_path) == [range(3), range(3, 7), range(7, 10)]
    (tmp_path / "seeds-2-6").mkdir()
    assert groups(range(10), tmp_path) == [range(2), range(2, 7), range(7, 10)]
    assert groups(range(3, 5), tmp_path) == [range(3, 5)]


def test_what_trained_an_environment_has_the_packages_that_simulate_it(tmp_path):
    for env, packages in (("CartPole-v1", set()), ("gymnasium:Hopper-v4:frame_skip=2", {"gymnasium", "mujoco"})):
        found = provenance.origin(env)["versions"]
        assert found == found | versions() and found.keys() - versions().keys() == packages
    for name, was in (("new", found), ("old", versions()), ("other", found | {"mujoco": "1.0"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "origin.json").write_text(json.dumps({"versions": was}))
    assert provenance.origin_of(tmp_path / "new")["versions"] == found
    assert provenance.origin_of(tmp_path / "old")["versions"] == versions()  # before simulators were recorded
    with pytest.raises(recipes.RecordError, match=r"other was trained with mujoco 1\.0, not .* as now"):
        provenance.origin_of(tmp_path / "other")


def test_names_and_patterns(folder, capsys):
    assert msrl.recipe("small") == msrl.recipe("SMALL") == SMALL
    for name, message in (("smal", "did you mean 'small'"), (3, "name of a recipe, .* not"), ("", "no recipe is named ''")):
        with pytest.raises(ValueError, match=message):
            msrl.recipe(name)
    (folder / "small-two.toml").write_text(TOML.replace("12_000", "13_000"))
    assert recipes.matching(["small*", "small"]) == ["small", "small-two"]
    assert cli.main(["reproduce", "large*"]) == 2 and "no recipe is named 'large*'" in capsys.readouterr().err
    assert cli.main(["list", "--recipes", "--json"]) == 0
    assert [row["about"] for row in json.loads(capsys.readouterr().out)] == ["Small, for tests. Two lines."] * 2
    (folder / "small-three.toml").write_text("algo")
    assert cli.main(["list", "--recipes"]) == 0
    told = capsys.readouterr()
    assert told.out.count("no record") == 2 and "small-three.toml cannot be read" in told.err


def test_train_takes_a_recipe_and_flags_win(folder, tmp_path, capsys):
    words = ["train", "--recipe", "small", "--print-config"]
    assert cli.main([*words, "--num-envs", "16"]) == 0
    text = capsys.readouterr().out
    assert "\nnum_envs = 16\n" in text and "\nhidden_sizes = [16, 16]\n" in text and "recipe" not in text
    assert cli.main(["train", "--recipe", "none"]) == 2 and "no recipe is named 'none'" in capsys.readouterr().err
    assert cli.main([*words, "--config", "x.toml"]) == 2 and "--recipe and --config are both given" in capsys.readouterr().err
    assert cli.main(["train", "--recipe"]) == 2 and "--recipe needs a name" in capsys.readouterr().err
    (tmp_path / "x.toml").write_text('recipe = "small"\n')
    assert cli.main(["train", "--config", str(tmp_path / "x.toml")]) == 2
    assert "recipe belongs on the command line" in capsys.readouterr().err


def test_defaults_name_the_recipe_of_their_environment(folder, capsys, monkeypatch):
    (folder / "small.toml").rename(folder / "ppo-cart.toml")
    monkeypatch.setattr(sys.modules["msrl_jax.run.training"], "_begin_run", None)  # what is said before it is enough
    train = functools.partial(msrl.train, "ppo", "CartPole-v1", total_steps=4096, eval_episodes=0, progress="lines")
    with pytest.raises(TypeError, match="not callable"):
        train()
    assert capsys.readouterr().err.startswith("using defaults; the recipe ppo-cart has hyperparameters for this environment\n")
    with pytest.raises(TypeError, match="not callable"):
        train(learning_rate=1e-3)
    assert "recipe" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",  # those of other suites import them
    [pytest.param(n, marks=[pytest.mark.long] if ":" in recipes.find(n).values["env"] else []) for n in recipes.names()],
)
def test_every_recipe_is_what_the_command_line_reads_and_has_its_record(name):
    recipe = recipes.find(name)
    assert msrl.recipe(name) == experiment_of(recipe.path)
    assert recipe.about and set(recipe.values) >= {"algo", "env", "total_steps"}
    record = recipes.record_of(recipe, recipes.records_folder())
    assert record is not None and record.recipe == name and len(record.seeds) >= 3
    assert record.config == msrl.recipe(name).to_json()["config"]
    assert np.isfinite(scores(record)).all() and scores(record).shape == (2, len(record.seeds))


def test_names_of_recipes_are_those_of_algorithms_options_and_one_word_for_each_environment():
    found, words = [recipes.find(name) for name in recipes.names()], {}
    for recipe in found:
        *options, word = recipe.name.removeprefix(f"{recipe.values['algo']}-").split("-")
        assert recipe.name == "-".join([recipe.values["algo"], *options, word])
        assert words.setdefault(recipe.values["env"], word) == word
    assert len({*words.values()}) == len(words)


def test_records_are_those_of_the_clone_of_the_package_or_of_the_working_directory(tmp_path, monkeypatch):
    assert recipes.records_folder() == ROOT / "benchmarks" / "records"
    monkeypatch.setattr(recipes, "RECORDS", (tmp_path / "site-packages" / "benchmarks" / "records", recipes.RECORDS[1]))
    monkeypatch.chdir(tmp_path)  # as a wheel has it
    assert recipes.records_folder() is None
    monkeypatch.chdir(ROOT)
    assert recipes.records_folder().samefile("benchmarks/records")
    assert recipes.records_folder(tmp_path) == tmp_path


@pytest.mark.slow
def test_without_records_a_sentence_says_so_and_recipes_are_trained_all_the_same(folder, first, again, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RECORDS", ())
    assert msrl.recipe("small") == SMALL
    assert cli.main(["list", "--recipes"]) == 0
    told = capsys.readouterr()
    assert told.err == f"{recipes.NO_RECORDS}\n" and "no record" in told.out
    command = ["reproduce", "small", "--seeds", "5", "--out", str(again.parent), "--progress", "none"]
    assert cli.main(command) == 0
    told = capsys.readouterr()
    assert told.err == f"{recipes.NO_RECORDS}\n" and "seeds 0 to 4: no record" in told.out
    assert scores(recipes.Record.read(again / "small.json")).shape == (2, 5)
    for option in ("--update", "--pages=docs"):
        assert cli.main([*command, option]) == 2 and recipes.NO_RECORDS in capsys.readouterr().err
    found = reproduced(again, progress="lines")
    assert found.verdict == "no record" and recipes.NO_RECORDS in capsys.readouterr().err


@pytest.mark.long
def test_a_folder_of_records_may_be_named(folder, first, again, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(recipes, "RECORDS", ())
    records = tmp_path / "records"
    command = ["reproduce", "small", "--out", str(again.parent), "--progress", "none", "--records", str(records)]
    assert cli.main(command) == 2 and f"the folder of records {records} does not exist" in capsys.readouterr().err
    records.mkdir()
    assert cli.main([*command, "--seeds", "5", "--update"]) == 0
    assert [path.name for path in records.iterdir()] == ["small.json"]
    assert cli.main(command) == 0 and "seeds 0 to 4: agrees" in capsys.readouterr().out
    assert reproduced(again, seeds=None, records=records).verdict == "agrees"
    assert cli.main(["list", "--recipes", "--json", "--records", str(records)]) == 0
    assert json.loads(capsys.readouterr().out)[0]["seeds"] == 5
    assert cli.main(["list", "--records", str(records)]) == 2 and "--records needs --recipes" in capsys.readouterr().err
