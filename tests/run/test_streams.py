"""Text that cannot be written is dropped, and a file that cannot be written is named in the error."""

import contextlib
import io
import resource
import sys

import numpy as np
import pytest

from msrl_jax import data
from msrl_jax._files import writing
from msrl_jax.run.disk import folder
from msrl_jax.run.streams import TolerantStream, tolerant_streams


def test_a_stream_without_a_character_writes_a_question_mark():
    raw = io.BytesIO()
    stream = TolerantStream(io.TextIOWrapper(raw, encoding="ascii"))
    print("5 ± 1", file=stream, flush=True)
    assert raw.getvalue() == b"5 ? 1\n" and stream.error is None


def test_a_closed_stream_takes_text():
    closed = io.StringIO()
    closed.close()
    for stream in (TolerantStream(closed), TolerantStream(None)):
        print("text", file=stream, flush=True)
        assert not stream.isatty()


def test_the_standard_streams_come_back(monkeypatch):
    before = sys.stdout, sys.stderr
    with pytest.raises(KeyError), tolerant_streams():
        assert sys.stdout is not before[0]
        raise KeyError
    assert (sys.stdout, sys.stderr) == before


@contextlib.contextmanager
def small_files():
    """No file may grow beyond 100 bytes: the operating system refuses, and names no file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def rows(count):
    zeros = np.zeros((count, 3), np.float32)
    return data.Dataset(zeros, np.arange(count), np.arange(count), np.zeros(count), np.zeros(count), zeros)


def test_a_full_disk_is_reported_with_the_file(tmp_path):
    write = {
        "config.json": lambda path: folder.write_json(path, list(range(1000))),
        "rows.npz": lambda path: data.save(rows(500), path),
    }
    for name, function in write.items():
        with small_files(), pytest.raises(OSError, match=name) as raised:
            function(tmp_path / name)
        assert raised.value.filename == str(tmp_path / name)


def test_an_error_that_names_its_file_stays(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, writing(tmp_path / "other"):
        (tmp_path / "no" / "file").write_text("text")
    assert raised.value.filename == str(tmp_path / "no" / "file")
