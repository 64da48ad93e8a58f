"""Pages and workers of benchmarks."""

import textwrap

import pytest


@pytest.fixture
def page(tmp_path):
    """A page with a stale table, by the name of its markers."""

    def made(name):
        path = tmp_path / "page.md"
        path.write_text(f"# Page\n\n<!-- {name}: begin -->\nstale\n<!-- {name}: end -->\n")
        return path

    return made


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Makes a benchmark start a worker without JAX, from its source, instead of its own."""

    def made(benchmark, name, source):
        (tmp_path / name).write_text(textwrap.dedent(source))
        monkeypatch.setattr(benchmark, "__file__", str(tmp_path / "benchmark.py"))

    return made
