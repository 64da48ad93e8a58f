"""What is in a run's folder is read whole or refused: contradictions, damaged files, foreign files, full disks."""

import itertools
import json
import os
import re
import shutil
import tempfile
import tracemalloc
import warnings

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli
from msrl_jax.run import Result
from msrl_jax.run.disk import checkpoint
from msrl_jax.run.disk.checkpoint import CheckpointError, complete_checkpoints
from msrl_jax.run.disk.folder import NotSavedError, SaveWarning, append_rows, each_row, locked, rewind_rows, write_table
from msrl_jax.run.disk.store import ResumeWarning, check_saved
from msrl_jax.run.disk.store import complete_folder as complete_folder
from msrl_jax.run.experiment.plain_data import RunFolderError, fingerprint
from msrl_jax.run.outcome import Outcome
from tests.support.full_disk import no_file_above
from tests.support.runs import CHUNK, assert_same_run, stop_after, train

CONFLICTS = [
    ({"algo": "dqn"}, r"has algo='ppo', and cannot resume with algo='dqn'"),
    ({"env": "Acrobot-v1"}, r"has env='CartPole-v1:max_steps_in_episode=30'.* env='Acrobot-v1'"),
    ({"seed": 6}, r"has seed=5, and cannot resume with seed=6"),
    ({"num_envs": 16}, r"has num_envs=8, and cannot resume with num_envs=16; leave num_envs out"),
    ({"max_grad_norm": None}, r"has max_grad_norm=0\.5, and cannot resume with max_grad_norm=None"),
    ({"data": "x.npz"}, r"was trained without a data set"),
    ({"total_steps": 100}, r"has done 384 steps already; use a larger"),
    ({"record": "x.npz"}, r"not recorded from its start"),
    ({"out": "elsewhere"}, r"are two folders"),
]


@pytest.mark.long
def test_a_rounded_number_is_the_one_that_was_saved(copy):
    """The run has the learning rate 0.003, and `np.float32(0.003)` is 0.003000000026077032."""
    options = {"devices": jax.devices()[:1], "eval_episodes": 0, "progress": False}
    goes_on = msrl.train(resume=copy, learning_rate=np.float32(0.003), **options)
    assert goes_on.config.learning_rate == 0.003 and goes_on.status == "finished"
    assert msrl.train(resume=copy, learning_rate=jax.numpy.float32(0.003), **options).config == goes_on.config
    with pytest.raises(RunFolderError, match=r"has learning_rate=0\.003, and cannot resume with learning_rate="):
        msrl.train(resume=copy, learning_rate=np.nextafter(np.float32(0.003), np.float32(1)), **options)


@pytest.mark.parametrize(("given", "message"), CONFLICTS, ids=[next(iter(g)) for g, _ in CONFLICTS])
def test_what_contradicts_the_run_is_refused(given, message, stopped):
    before = sorted((p, p.stat().st_mtime_ns) for p in stopped.rglob("*") if p.is_file())
    with pytest.raises(ValueError, match=message):
        msrl.train(resume=stopped, progress=False, **given)
    assert sorted((p, p.stat().st_mtime_ns) for p in stopped.rglob("*") if p.is_file()) == before


def damage(name, text):
    def change(path):
        (path / name).write_text(text)

    return change


def remove_checkpoints(path):
    shutil.rmtree(path / "checkpoints")


def break_config(**changes):
    def change(path):
        config = json.loads((path / "config.json").read_text())
        for name, value in changes.items():
            config |= {name: value}
        (path / "config.json").write_text(json.dumps(config))

    return change


def break_checkpoint(path):
    for saved in complete_checkpoints(path):
        (saved.path / "_METADATA").write_bytes(b"{}")


def damage_seals(path):
    for saved in complete_checkpoints(path):
        (saved.path / "run.json").write_text("[" * 200_000)


def edit_checkpoints(text, other):
    def change(path):
        for saved in complete_checkpoints(path):
            content = (saved.path / "run.json").read_text()
            (saved.path / "run.json").write_text(content.replace(text, other))

    return change


def edit_rows(change):
    def edit(path):
        file = path / "metrics.jsonl"
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

    return edit


def replace_by_folder(name):
    def change(path):
        (path / name).unlink()
        (path / name).mkdir()

    return change


DAMAGES = [
    (damage("config.json", "[" * 200_000), r"config\.json is damaged \(it is nested too deeply"),
    (damage_seals, r"no checkpoint that is whole: .* run\.json cannot be read \(ValueError: it is nested too deeply"),
    (damage("config.json", "[1]"), r"config\.json lacks 'algorithm'"),
    (lambda p: (p / "config.json").unlink(), r"holds no run: config\.json is missing"),
    (break_config(algorithm="pppo"), r"not what the run was saved with|cannot read the config of the run in .*: .*pppo"),
    (
        break_config(config={"num_envs": 3, "no_such_field": 1}),
        r"not what the run was saved with|cannot read the config of the run in .*: .*no_such_field",
    ),
    (break_checkpoint, r"no checkpoint that is whole"),
    (
        break_config(config={"hidden_sizes": [16], "num_envs": 8, "unroll_length": 8, "num_minibatches": 2}),
        r"not what the run was saved with|does not fit: state",
    ),
    (break_config(config=5), r"config\.json: 'config' is 5, and should be an object; restore the file"),
    (break_config(eval_every="often"), r"config\.json: 'eval_every' is 'often', and should be an integer or null"),
    (break_config(seed=7), r"config\.json is not what the run was saved with"),
    (edit_checkpoints('"iteration": ', '"iteration": 1'), r"no checkpoint that is whole: .* run\.json is not what was written"),
    (edit_checkpoints('"rows": ', '"rows": 0'), r"no checkpoint that is whole: .* run\.json"),
    pytest.param(replace_by_folder("metrics.jsonl"), r"metrics\.jsonl cannot be read", marks=pytest.mark.long),
    pytest.param(
        damage("metrics.jsonl", '{"step": 64, "iteration": 1}\n'),
        r"metrics\.jsonl has fewer rows than the 2",
        marks=pytest.mark.long,
    ),
    (damage("metrics.jsonl", "nonsense\n" * 9), r"line 1 of .*metrics\.jsonl is damaged"),
    pytest.param(edit_rows(lambda rows: rows[::-1]), r"line 2 of .*metrics\.jsonl is damaged", marks=pytest.mark.slow),
    pytest.param(
        edit_rows(lambda rows: [row[:-2] + ', "x": "a"}\n' for row in rows]),
        r"line 1 of .*metrics\.jsonl is damaged",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("change", "message"), DAMAGES, ids=range(len(DAMAGES)))
def test_a_damaged_folder_is_never_read_silently(change, message, copy):
    change(copy)
    kept = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file() and "checkpoints" in p.parts}
    with pytest.raises(RunFolderError, match=message):
        msrl.train(resume=copy, devices=jax.devices()[:1], progress=False)
    for path, content in kept.items():
        assert path.read_bytes() == content, path
    if "metrics" not in message:
        with pytest.raises(RunFolderError, match=message):
            Result.load(copy)
        return
    with pytest.warns(ResumeWarning, match=rf"{message}.*; the history of the run is left out"):
        loaded = Result.load(copy)
    assert not any(map(len, loaded.history.values())) and loaded.status == "stopped" and loaded.act(np.zeros(4)).shape == ()


@pytest.mark.parametrize("name", ["metrics.csv", "summary.json", "lock"])
def test_a_folder_in_place_of_a_file_is_told_before_anything_is_written(name, copy, capsys):
    (copy / name).unlink(missing_ok=True)
    (copy / name).mkdir()
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
    with pytest.raises(RunFolderError, match=rf"{name} is a folder, but the run needs a file there; move it"):
        msrl.train(resume=copy, devices=jax.devices()[:1], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResumeWarning)  # a summary is left out
        assert cli.main(["report", str(copy), "--out", str(copy.parent / "page.html")]) == 0
    assert {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()} == before


def test_without_its_summary_an_agent_acts(copy):
    (copy / "summary.json").write_text("{")
    with pytest.warns(ResumeWarning, match=r"summary\.json is damaged .*; the outcome of the run is left out"):
        loaded = Result.load(copy)
    assert loaded.status == "unfinished" and loaded.act(np.zeros(4)).shape == ()


def test_an_ended_run_misses_its_newest_checkpoint(copy):
    last, before = complete_checkpoints(copy)
    (last.path / "run.json").unlink()
    with pytest.warns(ResumeWarning, match=rf"{last.path.name} is damaged: run.json is missing; .* {before.iteration} is used"):
        loaded = Result.load(copy)
    assert loaded.status == "unfinished" and loaded.history["iteration"][-1] == before.iteration


def test_the_status_tells_whether_a_checkpoint_is_the_newest(copy):
    last, before = (c.iteration for c in complete_checkpoints(copy))
    for which, status in [(before, "earlier checkpoint"), (last, Result.load(copy).status)]:
        loaded = Result.load(copy, checkpoint=which)
        assert loaded.status == status != "unfinished" and f"({status}" in repr(loaded)
    (copy / "summary.json").unlink()  # as in a run that was killed
    assert Result.load(copy, checkpoint=before).status == "earlier checkpoint"
    assert Result.load(copy, checkpoint=last).status == "unfinished"


def test_what_is_no_run_is_refused(tmp_path):
    for resume, message in [(tmp_path / "none", "does not exist; give"), (tmp_path, r"holds no run: config\.json is missing")]:
        with pytest.raises(RunFolderError, match=message):
            msrl.train(resume=resume, progress=False)
    with pytest.raises(ValueError, match=r"resume=True needs the folder of the run"):
        msrl.train(resume=True, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "resume"), [("sweep.json", False), ("thesis.tex", True)])
def test_no_run_is_written_among_other_files(name, resume, tmp_path, tiny):
    (tmp_path / name).write_text("{}")
    with pytest.raises(RunFolderError, match=rf"holds files that are not of a run \({name}\); choose a new or empty folder"):
        msrl.train(out=tmp_path, resume=resume, total_steps=64, progress=False, **tiny)
    assert [p.name for p in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("given", [{"out": ""}, {"resume": ""}], ids=str)
def test_an_empty_path_is_refused(given, tmp_path, monkeypatch, tiny):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^{next(iter(given))}='' is not a path; pass one, or omit it"):
        msrl.train(total_steps=64, progress=False, **given, **tiny)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_run_without_a_checkpoint_starts_again(copy, stopped):
    remove_checkpoints(copy)
    with pytest.raises(CheckpointError, match=r"has no checkpoint 'newest'"):
        Result.load(copy)
    with pytest.raises(CheckpointError, match=r"has ended, but its checkpoints are gone; restore checkpoints"):
        msrl.train(resume=copy, progress=False)
    (copy / "summary.json").unlink()  # as in a run that was killed
    with pytest.warns(ResumeWarning, match=r"has no checkpoint yet, and starts again from its seed"):
        again = msrl.train(resume=copy, devices=jax.devices()[:1], progress=False, callbacks=[stop_after(6)])
    np.testing.assert_array_equal(again.history["iteration"], [CHUNK, 2 * CHUNK])
    first = Result.load(stopped)
    for name in ("entropy", "episode_return"):
        np.testing.assert_array_equal(again.history[name], first.history[name])


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(copy):
    found = complete_checkpoints(copy)
    (found[0].path / "manifest.ocdbt").unlink()
    message = (
        rf"{found[0].path.name} is damaged: manifest\.ocdbt is missing; the checkpoint after iteration {found[1].iteration}"
    )
    with pytest.warns(ResumeWarning, match=message):
        loaded = Result.load(copy)
    assert loaded.history["iteration"][-1] == found[1].iteration and loaded.status == "unfinished"
    with pytest.raises(CheckpointError, match="damaged"):
        Result.load(copy, checkpoint=found[0].iteration)
    with pytest.raises(CheckpointError, match=r"has no checkpoint 77: those after iterations"):
        Result.load(copy, checkpoint=77)


@pytest.mark.long
def test_damaged_checkpoints_are_set_aside_and_made_anew(copy):
    newer, older = complete_checkpoints(copy)
    (newer.path / "_sharding").write_bytes(b"")
    foreign = copy / "checkpoints" / "mine"
    shutil.copytree(older.path, foreign)
    with pytest.warns(ResumeWarning, match="_sharding is not what was written"):
        result = msrl.train(
            resume=copy, devices=jax.devices()[:1], progress=False, callbacks=[stop_after(6)], keep_checkpoints=1
        )
    assert [c.iteration for c in complete_checkpoints(copy)] == [newer.iteration] and foreign.is_dir()
    assert newer.path.with_name(f"{newer.path.name}.damaged").is_dir()
    assert_same_run(Result.load(copy), result)


def test_columns_that_come_later_are_added_to_the_table(tmp_path):
    append_rows(tmp_path, [{"step": 8.0, "iteration": 1.0, "x": 2.0}])
    append_rows(tmp_path, [{"step": 16.0, "iteration": 2.0, "y": np.array([3.0, 4.0])}])
    append_rows(tmp_path, [{"step": 24.0, "iteration": 3.0, "x": 5.0}])
    write_table(tmp_path)
    assert (tmp_path / "metrics.csv").read_text().splitlines() == [
        "step,iteration,x,y,y/0,y/1",
        "8,1,2.0,,,",
        "16,2,,3.5,3.0,4.0",
        "24,3,5.0,,,",
    ]
    rewind_rows(tmp_path, 2)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_the_table_of_a_run_is_written_row_by_row(tmp_path):
    """The memory of writing, reading and rewinding is that of a row, however many there are."""

    def peak(rows):
        folder = tmp_path / str(rows)
        folder.mkdir()
        append_rows(folder, ({"step": i, "iteration": i, "x": np.arange(500) / 7 + i} for i in range(1, rows + 1)))
        tracemalloc.start()
        write_table(folder)
        assert sum(1 for _ in each_row(folder)) == rows
        rewind_rows(folder, rows - 1)
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        table = (folder / "metrics.csv").read_text().splitlines()
        assert len(table) == rows + 1 and table[-1].startswith(f"{rows},{rows},")
        assert len((folder / "metrics.jsonl").read_text().splitlines()) == rows - 1
        return used

    few, many = peak(10), peak(40)
    assert many < 1.2 * few


def test_a_folder_tells_how_its_run_ended_and_what_its_steps_are(copy):
    """A run that diverged has its checkpoint from before; any other summary of other steps is of a checkpoint that is gone."""
    config, summary = (json.loads((copy / name).read_text()) for name in ("config.json", "summary.json"))
    for status, told in {"diverged": "diverged", "finished": "unfinished"}.items():
        (copy / "summary.json").write_text(json.dumps(summary | {"status": status, "total_steps": 10**6}))
        assert Outcome.read(copy).status == Result.load(copy).status == told
    for unit in ("environment steps", "updates"):
        (copy / "config.json").write_text(json.dumps(config | {"unit": unit}))
        assert Outcome.read(copy).unit == unit and f" {unit.split()[-1]}/s" in str(Outcome.read(copy))
    of_rates = [fingerprint(config | {"rollbacks": [{"to": 1, "learning_rate": rate}]}) for rate in (0.1, 0.2)]
    assert len({*of_rates, fingerprint(config)}) == 3


def test_a_line_that_a_crash_cut_off_does_not_count(copy, stopped):
    rows = copy / "metrics.jsonl"
    with rows.open("a") as file:
        file.write(rows.read_text().splitlines()[-1][:40])
    expected = Result.load(stopped)
    loaded = Result.load(copy)
    np.testing.assert_array_equal(loaded.history["entropy"], expected.history["entropy"])
    rewind_rows(copy, len(expected.history["step"]))  # as a run that goes on does
    assert rows.read_bytes() == (stopped / "metrics.jsonl").read_bytes()


def test_two_runs_cannot_write_to_one_folder(copy):
    message = r"another process writes to the run in .* \(process \d+ on "
    with locked(copy), pytest.raises(RunFolderError, match=message):
        msrl.train(resume=copy, progress=False)
    assert not (copy / "lock").exists()


def test_a_disk_that_is_full_at_the_start_is_named(tmp_path):
    path = tmp_path / "run"
    with no_file_above(0), pytest.raises(OSError, match=r"File too large: .*/run/lock") as caught, locked(path):
        pass
    assert os.path.dirname(caught.value.filename) == str(path) and not path.exists()


@pytest.mark.long
def test_a_disk_that_fails_ends_no_run_and_loses_no_agent(tmp_path, tiny, one_device):
    """A file takes the place of the folder of checkpoints; rows cannot be appended to a folder."""
    path = tmp_path / "run"

    def spoil(tick):
        if tick.iteration == 1:
            (path / "checkpoints").write_text("")
            (path / "metrics.jsonl").unlink()
            (path / "metrics.jsonl").mkdir()

    with pytest.warns(SaveWarning) as caught:
        result = train("ppo", path, devices=1, iterations=6, callbacks=[spoil], chunk=1, eval_episodes=0)
    texts = [str(w.message) for w in caught]
    assert sum("the run continues with its metrics in memory" in t for t in texts) == 1
    assert any("continues without a new checkpoint" in t for t in texts)
    assert any(f"could not be saved in {path} (" in t and f"it is saved in {result.folder}" in t for t in texts)
    assert result.status == "finished" and result.folder != path and len(result.history["step"]) == 6
    assert str(path) in result.save_error and result.summary()["save_error"] == result.save_error
    assert f"not saved in its folder: {result.save_error}" in str(result) and f"saved in {result.folder}" in str(result)
    assert_same_run(Result.load(result.folder), result)
    shutil.rmtree(result.folder.parent)


@pytest.mark.long
def test_a_run_that_can_be_saved_nowhere_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))

    def spoil(tick):
        if tick.iteration == 1:
            (tmp_path / "run" / "checkpoints").write_text("")

    with pytest.warns(SaveWarning) as caught:
        result = train("ppo", tmp_path / "run", devices=1, iterations=3, callbacks=[spoil], chunk=1, eval_episodes=0)
    assert "only the result in memory has it" in str(caught[-1].message)
    assert result.folder is None and "checkpoints" in result.save_error
    first, *_, last = str(result).splitlines()
    assert first.endswith("(finished, NOT SAVED)") and "result.save(FOLDER)" in last
    with pytest.raises(NotSavedError, match="checkpoints"):
        check_saved(result)
    assert_same_run(Result.load(result.save(tmp_path / "again")), result)


def test_what_was_saved_in_part_elsewhere_does_not_stay(trained, tmp_path, monkeypatch):
    """Both disks are full; what is left of the second attempt would fill the one for temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def fails(result, path):
        path.mkdir()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Result, "save", fails)
    with pytest.warns(SaveWarning, match="only the result in memory has it"):
        result = complete_folder(trained, tmp_path / "run", OSError("full"))
    assert result.folder is None and result.save_error == "full" and not any((tmp_path / "temporary").iterdir())


@pytest.mark.slow
def test_a_checkpoint_that_failed_is_not_the_best_so_far(tmp_path, monkeypatch):
    """Scores are 1, 5, 3, 4 and 2; the second one cannot be saved, so the fourth is kept as the best."""
    sums, calls, scores = checkpoint._file_checksums, itertools.count(1), [1.0, 5.0, 3.0, 4.0, 2.0]

    def failing(path):
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        return sums(path)

    monkeypatch.setattr(checkpoint, "_file_checksums", failing)
    monkeypatch.setattr("msrl_jax.run.loop.hooks.score", lambda run: scores[run.iteration - 1])
    options = {"eval_episodes": 2, "eval_every": 64, "checkpoint_every": 3 * 64, "keep_checkpoints": 9}
    with pytest.warns(SaveWarning, match="without a new checkpoint: .*No space left"):
        train("ppo", tmp_path / "run", devices=1, iterations=5, chunk=1, **options)
    found = complete_checkpoints(tmp_path / "run")
    assert [c.iteration for c in found] == [5, 4, 3, 1] and checkpoint.best(found) == found[1]


@pytest.mark.long
@pytest.mark.parametrize("full", ["checkpoint._file_checksums", pytest.param("folder.append_rows", marks=pytest.mark.slow)])
def test_an_error_that_ends_a_run_does_not_hide_that_it_was_not_saved(full, tmp_path, monkeypatch):
    def no_space(*args):
        raise OSError(28, "No space left on device")

    def failing(tick):
        raise RuntimeError("of a callback")

    monkeypatch.setattr(f"msrl_jax.run.disk.{full}", no_space)
    with pytest.raises(RuntimeError, match="of a callback"), pytest.warns(SaveWarning) as caught:
        train("ppo", tmp_path / "run", devices=1, iterations=2, callbacks=[failing], chunk=1, eval_episodes=0)
    assert re.search("ended with an error, and could not be saved: .*No space left", str(caught[-1].message))


def test_bad_folders_are_one_line_on_the_command_line(copy, capsys):
    (copy / "config.json").write_text("{")
    for arguments, message in [
        (["train", "--out", copy, "--resume"], "config.json is damaged"),
        (["train", "--resume"], "--resume needs --out"),
        (["evaluate", copy], "config.json is damaged"),
        (["train", "--out", copy], "already holds a run (config.json); resume it (resume=True, or --resume)"),
    ]:
        assert cli.main([str(word) for word in arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and message in err and len(err.splitlines()) == 1, err


@pytest.mark.long
def test_rows_alone_that_cannot_be_written_take_the_run_elsewhere(tmp_path):
    """Its checkpoint counts rows that its folder lacks."""
    rows = tmp_path / "run" / "metrics.jsonl"

    def spoil(tick):
        if tick.iteration == 2:
            rows.unlink()
            rows.mkdir()

    with pytest.warns(SaveWarning) as caught:
        result = train("ppo", tmp_path / "run", devices=1, iterations=3, callbacks=[spoil], chunk=1, eval_episodes=0)
    assert f"it is saved in {result.folder}" in str(caught[-1].message)
    assert "metrics.jsonl" in result.save_error
    assert_same_run(Result.load(result.folder), result)
    shutil.rmtree(result.folder.parent)


@pytest.mark.slow
def test_rows_that_wait_for_a_while_are_in_the_folder_at_the_end(tmp_path):
    rows, aside = tmp_path / "run" / "metrics.jsonl", tmp_path / "aside"

    def spoil(tick):
        if tick.iteration == 1:
            rows.rename(aside)
            rows.mkdir()
        elif tick.iteration == 2:
            rows.rmdir()
            aside.rename(rows)

    with pytest.warns(SaveWarning, match="continues with its metrics in memory"):
        result = train("ppo", tmp_path / "run", devices=1, iterations=3, callbacks=[spoil], chunk=1, eval_episodes=0)
    assert result.folder == tmp_path / "run" and not result.save_error
    assert_same_run(Result.load(result.folder), result)


@pytest.mark.slow
def test_a_checkpoint_that_fails_late_is_followed_by_the_next_one(tmp_path, monkeypatch):
    """A disk that is full for a while: the state at the end is saved in the folder of the run."""
    sums, calls = checkpoint._file_checksums, itertools.count(1)

    def failing(path):
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        return sums(path)

    monkeypatch.setattr(checkpoint, "_file_checksums", failing)
    with pytest.warns(SaveWarning, match="without a new checkpoint: .*No space left"):
        result = train(
            "ppo", tmp_path / "run", devices=1, iterations=3, chunk=1, eval_episodes=0, checkpoint_every=64, keep_checkpoints=9
        )
    assert result.folder == tmp_path / "run" and not result.save_error
    assert [c.iteration for c in checkpoint.complete_checkpoints(result.folder)] == [3, 1]
