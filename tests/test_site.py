"""The reference pages of the docs name all that there is; Sphinx builds them without a warning."""

import html
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import msrl_jax as msrl
from msrl_jax.cli.commands import COMMANDS
from msrl_jax.configs.names import all_fields

DOCS = Path(__file__).parents[1] / "docs"
NOTEBOOKS = sorted((DOCS.parent / "notebooks").glob("*.ipynb"))
QUICK = """
from IPython.display import HTML

print("six is", 2 * 3)
HTML('<svg data-lanes="2"></svg>')
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The text of every page that is written, by name."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(DOCS))
        importlib.import_module("write_reference").write(folder)
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.md")}


def rows(text):
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_every_field_argument_and_option_has_a_row(pages):
    for name in msrl.algorithms.names():
        assert rows(pages[f"algorithms/{name}.md"]) == [*all_fields(msrl.algorithms.get(name))]
    arguments = [p.name for p in inspect.signature(msrl.train).parameters.values()]
    assert sorted(rows(pages["train.md"])) == sorted("**overrides" if name == "overrides" else name for name in arguments)
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", pages["command_line.md"], re.MULTILINE | re.DOTALL))
    assert list(sections) == list(COMMANDS)
    assert "--total-steps" in rows(sections["train"]) and rows(sections["export"])[:2] == ["RUN", "PATH"]


def test_public_names_are_documented(pages):
    documented = set(re.findall(r"auto(?:class|function):: (\w+)", pages["api.md"])) | {"train"}
    public = {name for name in msrl.__all__ if inspect.isclass(x := getattr(msrl, name)) or inspect.isfunction(x)}
    assert public <= documented


def build(*arguments):
    """Builds a site, whose folder is the last argument; returns its pages by path, and stderr. A warning is an error."""
    pytest.importorskip("myst_nb", reason="pip install '.[docs]'")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=DOCS.parent)
    assert ended.returncode == 0, ended.stderr
    return {path: path.read_text() for path in Path(arguments[-1]).rglob("*.html")}, ended.stderr


def words(text):
    return set(re.findall(r"[^\W\d_]{3,}", text))


def words_of_source(text):
    """The words of a page in Markdown that are shown: without code blocks, comments, tags, pictures and addresses of links."""
    return words(re.sub(r"```.*?```|<.*?>|!\[.*?\]\(.*?\)|\]\(.*?\)", " ", text, flags=re.DOTALL))


def words_of_page(text):
    """The words of the article of a page in HTML."""
    article = text.partition("<article")[2].partition("</article>")[0]
    return words(html.unescape(re.sub(r"<.*?>", " ", article, flags=re.DOTALL)))


@pytest.mark.long
def test_the_site_is_built_without_a_warning(tmp_path):
    site = tmp_path / "site"
    pages, said = build(DOCS, site)
    assert said == "" and len(pages) > 50 and (site / "searchindex.js").exists()
    for path, text in pages.items():
        for link in re.findall(r'href="([^"#:]+)(?:#[^"]*)?"', text):
            assert (path.parent / link.partition("?")[0]).exists(), (path, link)
    for source in DOCS.rglob("*.md"):  # none is overwritten, as search.md would be by the page of Sphinx's own search
        page = pages[site / source.relative_to(DOCS).with_suffix(".html")]
        assert words_of_source(source.read_text()) <= words_of_page(page), source
    results = pages[site / "results" / "index.html"]
    assert all(f">{path.stem}<" in results for path in (DOCS.parent / "benchmarks" / "records").glob("*.json"))
    for notebook in NOTEBOOKS:
        page = pages[site / "notebooks" / f"{notebook.stem}.html"]
        assert f'href="notebooks/{notebook.stem}.html"' in pages[site / "first_hour.html"].partition("<article")[2]
        assert page.count('class="cell docutils container"') == notebook.read_text().count('"cell_type": "code"')
        assert "without outputs" in page and "cell_output" not in page


@pytest.mark.slow
def test_a_site_whose_notebooks_are_executed_has_their_outputs(tmp_path):
    """With the settings of the site, and a notebook that is quick."""
    cells = [nbformat.v4.new_markdown_cell("# Quick"), nbformat.v4.new_code_cell(QUICK)]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "index.ipynb")
    pages, _ = build("-c", DOCS, "-D", "nb_execution_mode=force", tmp_path, tmp_path / "site")
    page = pages[tmp_path / "site" / "index.html"]
    assert '<svg data-lanes="2">' in page and "six is 6" in page


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_page_of_a_notebook_is_the_notebook(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    write_notebooks = importlib.import_module("write_notebooks")
    write_notebooks.write(tmp_path)
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    notebook = nbformat.read(path, as_version=4)
    for executed in (False, True):
        page = nbformat.reads(write_notebooks.page(path.read_text(), path.stem, executed), as_version=4)
        nbformat.validate(page)
        about = page.cells.pop(1).source
        assert path.name in about and ("without outputs" in about) is not executed
        assert [c.source.replace("](../", "](../docs/") for c in page.cells] == [c.source for c in notebook.cells]
