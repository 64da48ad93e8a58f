"""A working directory for algorithms in files."""

import pytest

from msrl_jax.registry.table import ALGORITHMS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory whose algorithms are forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    known = set(ALGORITHMS)
    yield tmp_path
    for name in set(ALGORITHMS) - known:
        del ALGORITHMS[name]
