"""The reference pages of the docs name all that there is; Sphinx builds them without a warning."""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import msrl_jax as msrl
from msrl_jax.cli.actions import COMMANDS

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The text of every page that is written, by name."""
    folder = tmp_path_factory.mktemp("reference")
    paths = str(DOCS), str(folder)
    code = "import sys; sys.path.insert(0, sys.argv[1]); import write_reference as w; w.write(w.Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=300, cwd=DOCS.parent)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.md")}


def rows(text):
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_every_field_argument_and_option_has_a_row(pages):
    for name in msrl.algorithms.names():
        fields = [field.name for field in dataclasses.fields(msrl.algorithms.get(name))]
        assert rows(pages[f"algorithms/{name}.md"]) == fields
    arguments = [p.name for p in inspect.signature(msrl.train).parameters.values()]
    assert sorted(rows(pages["train.md"])) == sorted("**overrides" if name == "overrides" else name for name in arguments)
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", pages["command_line.md"], re.MULTILINE | re.DOTALL))
    assert list(sections) == list(COMMANDS)
    assert "--total-steps" in rows(sections["train"]) and rows(sections["export"])[:2] == ["RUN", "FILE"]


def test_public_names_are_documented(pages):
    documented = set(re.findall(r"auto(?:class|function):: (\w+)", pages["api.md"])) | {"train"}
    public = {name for name in msrl.__all__ if inspect.isclass(x := getattr(msrl, name)) or inspect.isfunction(x)}
    assert public <= documented


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(DOCS), str(tmp_path / "site")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=DOCS.parent)
    assert (ended.returncode, ended.stderr) == (0, "")
    site = tmp_path / "site"
    pages = {path: path.read_text() for path in site.rglob("*.html")}
    assert len(pages) > 50 and (site / "searchindex.js").exists()
    for path, text in pages.items():
        for link in re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', text):
            assert (path.parent / link.partition("?")[0]).exists(), (path, link)
