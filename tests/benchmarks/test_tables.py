"""Each table that a benchmark wrote into a page is the one of its record, and the tables of `results.md` are parts of these."""

import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = {
    "actors": "actors.page",
    "changes": "changes.page",
    "gpu": "gpu.page",
    "groups": "groups.table",
    "jaxmarl": "comparison.table",
    "kernels": "kernels.table",
    "offline": "offline.page",
    "pgx": "comparison.table",
    "purejaxrl": "comparison.table",
    "reactor": "reactor.table",
    "rejax": "comparison.table",
    "rllib": "compare_rllib.tables",
    "scaling": "scaling.page",
    "suite_trainers": "suite_trainers.tables",
    "thesis": "thesis.page",
    "unseen_seeds": "unseen_seeds.page",
}


@pytest.fixture
def write_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("write_results")


def marked():
    """The marked parts of the pages, by name."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
    text = "\n".join(page.read_text() for page in pages)
    return dict(re.findall(r"<!-- (\w+): begin -->\n\n(.*?)\n\n<!-- \1: end -->", text, re.DOTALL))


def test_every_table_is_known(write_results):
    assert set(marked()) == {*TABLES, *write_results.tables()}


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table_of_its_record(name):
    module, function = TABLES[name].split(".")
    record = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    assert marked()[name] == getattr(importlib.import_module(f"benchmarks.{module}"), function)(record).strip("\n")


def test_the_results_are_rows_of_these_tables_and_of_the_records_of_recipes(write_results):
    remedy = "python docs/write_results.py"
    assert write_results.RESULTS.read_text() == write_results.results_page(), remedy
    assert write_results.RECORDS.read_text() == write_results.recipes_page(), remedy
