"""The tables that benchmarks wrote into pages: each is what its record in `benchmarks/results` gives."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
TABLES = {
    "actors": "actors.page", "changes": "changes.page", "gpu": "gpu.page", "groups": "groups.table",
    "jaxmarl": "comparison.table", "kernels": "kernels.table", "offline": "offline.page", "pgx": "comparison.table",
    "purejaxrl": "comparison.table", "reactor": "reactor.table", "rejax": "comparison.table", "rllib": "compare_rllib.tables",
    "suite_trainers": "suite_trainers.tables", "thesis": "thesis.page", "unseen_seeds": "unseen_seeds.page",
}  # fmt: skip


def marked():
    """The marked parts of the pages, by name."""
    pages = "\n".join(page.read_text() for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"])
    return dict(re.findall(r"<!-- (\w+): begin -->\n\n(.*?)\n\n<!-- \1: end -->", pages, re.DOTALL))


def test_every_table_is_known():
    assert set(marked()) == set(TABLES)


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table_of_its_record(name):
    module, function = TABLES[name].split(".")
    record = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    assert marked()[name] == getattr(importlib.import_module(f"benchmarks.{module}"), function)(record).strip("\n")
