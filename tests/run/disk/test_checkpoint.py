"""Checkpoints on disk: any state, any devices, and whatever happens to the files."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from msrl_jax.run.disk import checkpoint
from msrl_jax.run.disk.checkpoint import (
    SEAL,
    CheckpointError,
    CheckpointWriter,
    complete_checkpoints,
    load_checkpoint,
    newest,
    verify,
)
from tests.support import processes
from tests.support.full_disk import no_file_above
from tests.support.runs import assert_same_state


class State(NamedTuple):
    params: dict
    keys: jax.Array
    other: tuple


@pytest.fixture
def state():
    return State(
        params={"kernel": jnp.arange(12.0).reshape(3, 4), "a.b": {"c": jnp.int8(3)}, "a": {"b.c": jnp.bool(True)}},
        keys=jax.random.split(jax.random.key(0), 8),
        other=(jax.random.key(1, impl="rbg"), jnp.ones((2, 0)), jnp.bfloat16([1.5]), None),
    )


def write(path, *saves, keep=9, scores=()):
    """Writes states as the checkpoints after 1, 2, ... iterations; returns the complete ones, the newest first."""
    writer = CheckpointWriter(path, keep)
    for number, state in enumerate(saves, 1):
        score = scores[number - 1] if scores else None
        writer.save(number, state, (), {"rows": number, "text": "ä"}, score)
    writer.wait()
    writer.close()
    return complete_checkpoints(path)


def no_note(text):
    raise AssertionError(text)


def test_any_state_round_trips(state, tmp_path):
    (saved,) = write(tmp_path, state)
    verify(saved)
    loaded, registers = load_checkpoint(saved, jax.eval_shape(lambda: state))
    assert_same_state(loaded, state)
    assert registers == () and saved.progress == {"rows": 1, "text": "ä"} and newest(tmp_path, no_note) == saved
    np.testing.assert_array_equal(jax.random.normal(loaded.keys[5]), jax.random.normal(state.keys[5]))
    np.testing.assert_array_equal(jax.random.normal(loaded.other[0]), jax.random.normal(state.other[0]))


def test_what_is_saved_is_the_state_at_that_time(tmp_path):
    """The run donates the state to the next chunk while its checkpoint is still being written."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    writer, x = CheckpointWriter(tmp_path, 9), jnp.zeros(500_000)
    for i in range(4):
        writer.save(i, {"x": x}, (), {}, None)
        for _ in range(3):
            x = step(x)
    writer.wait()
    writer.close()
    for saved in complete_checkpoints(tmp_path):
        np.testing.assert_array_equal(load_checkpoint(saved, {"x": x})[0]["x"], 3.0 * saved.iteration)


def test_a_state_is_read_onto_other_devices_than_it_was_saved_from(state, tmp_path):
    def spread(state, count):
        mesh = Mesh(np.array(jax.devices()[:count]), ("env",))
        return jax.tree.map(lambda x: NamedSharding(mesh, P("env") if x.shape[:1] == (8,) else P()), state)

    saves = [jax.device_put(state, spread(state, count)) for count in (8, 2)]
    for saved in write(tmp_path, *saves):
        for to in (spread(state, 4), spread(state, 1), jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[2]), state)):
            loaded, _ = load_checkpoint(saved, jax.eval_shape(lambda: state), (), jax.tree.leaves(to))
            assert_same_state(loaded, state)
            for x, at in zip(jax.tree.leaves(loaded), jax.tree.leaves(to), strict=True):
                assert x.sharding.is_equivalent_to(at, x.ndim)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s._replace(params={"kernel": s.params["kernel"]}), r"state\.params\['a'\].* only in the checkpoint"),
        (lambda s: s._replace(params=s.params | {"bias": jnp.ones(3)}), r"state\.params\['bias'\] is not in the checkpoint"),
        (lambda s: s._replace(params=s.params | {"kernel": jnp.ones(3)}), r"is float32\[3, 4\] there and float32\[3\] here"),
        (lambda s: s._replace(params=s.params | {"kernel": jnp.ones((3, 4), jnp.int32)}), r"float32\[3, 4\] .* int32\[3, 4\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit_says_where(state, tmp_path, change, message):
    (saved,) = write(tmp_path, state)
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(saved, change(state))


@pytest.mark.parametrize("change", [{"score": 9.0}, {"progress": {"rows": 1, "text": "other"}}, {"iteration": 3}])
def test_a_seal_that_was_edited_is_damaged(change, tmp_path):
    """Its own sum covers what the host goes on with, such as the number of rows; it stays JSON."""
    newer, older = write(tmp_path, {"x": jnp.ones(3)}, {"x": jnp.ones(3)})
    seal = json.loads((newer.path / SEAL).read_text())
    (newer.path / SEAL).write_text(json.dumps(seal | change))
    with pytest.raises(CheckpointError, match=r"000000000002 is damaged: run\.json is not what was written"):
        verify(newer)
    found, _ = complete_checkpoints(tmp_path)
    assert not found.is_readable and found.score is None and found.progress == {}
    with pytest.warns(UserWarning, match="iteration 1 is used instead"):
        assert newest(tmp_path, lambda text: warnings.warn(text, stacklevel=1)) == older


def test_damaged_checkpoints_do_not_count_among_those_that_are_kept(tmp_path):
    x = {"x": jnp.ones(3)}
    for damaged in write(tmp_path, x, x, x)[:2]:
        cut(damaged.path / SEAL)
    writer = CheckpointWriter(tmp_path, keep=2)
    writer.save(4, x, (), {}, None)
    writer.wait()
    writer.close()
    assert [c.iteration for c in complete_checkpoints(tmp_path) if c.is_readable] == [4, 1]


def test_the_newest_and_the_best_are_kept(tmp_path):
    x = {"x": jnp.ones(3)}
    found = write(tmp_path, x, x, x, x, x, x, keep=2, scores=(1.0, 7.0, 3.0, None, 2.0, 5.0))
    assert [c.iteration for c in found] == [6, 5, 2]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [f"{i:012d}" for i in (2, 5, 6)]


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip, lambda file: file.unlink()], ids=["cut", "flip", "remove"])
@pytest.mark.parametrize("name", ["_METADATA", "d", "ocdbt.process_0", SEAL])
def test_a_damaged_checkpoint_is_never_read(damage, name, tmp_path):
    newer, older = write(tmp_path, {"x": jnp.arange(3000.0)}, {"x": jnp.arange(3000.0) + 1})
    files = (
        [newer.path / name]
        if (newer.path / name).is_file()
        else sorted(p for p in (newer.path / name).rglob("*") if p.is_file())
    )
    damage(files[0])
    notes = []
    found = newest(tmp_path, notes.append)
    assert found == older
    if (newer.path / SEAL).exists():
        assert len(notes) == 1 and str(newer.path) in notes[0] and "damaged" in notes[0]
    damage(older.path / "manifest.ocdbt")
    if (newer.path / SEAL).exists():
        with pytest.raises(CheckpointError, match=r"no checkpoint that is whole"):
            newest(tmp_path, notes.append)
    else:
        with pytest.raises(CheckpointError, match=r"no checkpoint that is whole.*manifest\.ocdbt"):
            newest(tmp_path, notes.append)


def test_a_failed_save_raises_names_the_checkpoint_and_harms_no_other(tmp_path, monkeypatch):
    x = {"x": jnp.ones(3)}
    (before,) = write(tmp_path, x)
    monkeypatch.setattr(
        checkpoint, "_file_checksums", lambda path: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    writer = CheckpointWriter(tmp_path, 1)
    writer.save(2, x, (), {}, None)
    with pytest.raises(OSError, match=r"checkpoints/000000000002 cannot be written: .*No space left"):
        writer.wait()
    monkeypatch.undo()
    assert complete_checkpoints(tmp_path) == [before]
    writer.save(3, x, (), {}, None)  # and the next one works
    writer.wait()
    writer.close()
    assert [c.iteration for c in complete_checkpoints(tmp_path)] == [3]


def test_what_a_failed_save_wrote_is_removed_at_once(tmp_path):
    """Else a full disk stays full for the rest of the run."""
    writer = CheckpointWriter(tmp_path, 1)
    writer.save(1, {"x": jnp.ones(3)}, (), {}, None)
    writer.wait()
    numbers = {"x": np.random.default_rng(0).random(500_000)}
    for number in (2, 3):
        with no_file_above(2**16), pytest.raises(OSError, match=f"00000000000{number} cannot be written: File too large"):
            writer.save(number, numbers, (), {}, None)
            writer.wait()
        assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["000000000001"]
    writer.close()


def test_a_save_that_fails_before_it_begins_leaves_nothing_and_what_is_left_stops_no_other(tmp_path, monkeypatch):
    """A part of the same checkpoint may be there that could not be removed."""
    writer, folder = CheckpointWriter(tmp_path, 1), tmp_path / "checkpoints"
    with monkeypatch.context() as patch:

        def fails(checkpointer, path, **options):
            path.mkdir()
            raise OSError(28, "No space left on device")

        patch.setattr("orbax.checkpoint.AsyncCheckpointer.save", fails)
        with pytest.raises(OSError, match=r"000000000001 cannot be written: .*No space left"):
            writer.save(1, {"x": jnp.ones(3)}, (), {}, None)
    assert not any(folder.iterdir())
    (folder / "000000000001").mkdir()
    writer.save(1, {"x": jnp.ones(3)}, (), {}, None)
    writer.wait()
    writer.close()
    verify(complete_checkpoints(tmp_path)[0])


def test_what_is_newer_than_the_resumed_iteration_is_set_aside_and_nothing_else(tmp_path):
    write(tmp_path, *[{"x": jnp.full(3, number)} for number in range(3)])
    writer = CheckpointWriter(tmp_path, 9)
    writer.set_aside(2)
    writer.close()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "000000000001",
        "000000000002",
        "000000000003.damaged",
    ]


def test_a_checkpoint_without_a_seal_is_damage_only_once_the_run_has_ended(tmp_path):
    """A killed process leaves one behind, and the run starts again."""
    (tmp_path / "checkpoints" / "000000000002").mkdir(parents=True)
    assert newest(tmp_path, no_note) is None
    (tmp_path / "summary.json").touch()
    with pytest.raises(CheckpointError, match=r"no checkpoint that is whole: .*000000000002 is damaged: run\.json is missing"):
        newest(tmp_path, no_note)


def test_checkpoints_leave_no_threads_files_or_writers_behind(tmp_path):
    """What stays is a few strings for each entry, which TensorStore leaks: `docs/runs.md`."""

    def held():
        gc.collect()
        writers = sum(type(x).__name__ == "AsyncCheckpointer" for x in gc.get_objects())
        return writers, threading.active_count(), len(os.listdir("/proc/self/fd"))

    writer, x = CheckpointWriter(tmp_path, 1), {"x": jnp.arange(30_000.0)}
    counts = []
    for number in range(1, 13):
        writer.save(number, x, (), {}, None)
        writer.wait()
        counts.append(held() if number in (4, 12) else None)
    writer.close()
    assert counts[3][0] == 0 and all(later <= before for later, before in zip(counts[11], counts[3], strict=True))


SAVES = """
import itertools, sys, jax.numpy as jnp
from pathlib import Path
from msrl_jax.run.disk.checkpoint import CheckpointWriter, newest
path = Path(sys.argv[1])
found = newest(path, print)
writer = CheckpointWriter(path, 2)
for i in itertools.count(found.iteration + 1 if found else 1):
    writer.save(i, {"x": jnp.full((300, 400), i), "y": jnp.full(7, -i)}, (), {"rows": i}, float(i % 5))
    print(i, flush=True)
"""


def kill_while_saving(path, kills, rng):
    """Kills a process that saves without a pause; each time the newest checkpoint has to be whole."""
    last, like = 0, {"x": jnp.ones((300, 400), jnp.int32), "y": jnp.ones(7, jnp.int32)}
    for _ in range(kills):
        with processes.start([sys.executable, "-c", SAVES, path], stdout=subprocess.PIPE, text=True) as process:
            for _ in range(1 + int(rng.integers(3))):
                line = process.stdout.readline()
            time.sleep(rng.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            announced = int(([line, *process.stdout.read().split()])[-1])
        found = newest(path, no_note)
        if found is None:
            continue
        assert last <= found.iteration <= announced + 1
        last = found.iteration
        state, _ = load_checkpoint(found, like)
        assert (state["x"] == last).all() and (state["y"] == -last).all() and found.progress == {"rows": last}
        assert json.loads((found.path / SEAL).read_text())["iteration"] == last
    return last


@pytest.mark.long
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path):
    assert kill_while_saving(tmp_path, 2, np.random.default_rng(0)) > 0


@pytest.mark.slow
def test_a_process_killed_a_hundred_times_while_it_saves(tmp_path):
    assert kill_while_saving(tmp_path, 100, np.random.default_rng(1)) > 50
