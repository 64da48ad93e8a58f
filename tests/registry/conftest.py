"""A working directory for algorithms in files."""

import sys

import pytest

from msrl_jax.registry.table import ALGORITHMS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory whose algorithms are forgotten in the end."""
    monkeypatch.chdir(tmp_path)
    modules, known = set(sys.modules), set(ALGORITHMS)
    yield tmp_path
    for name in set(ALGORITHMS) - known:
        del ALGORITHMS[name]
    for name in set(sys.modules) - modules:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
