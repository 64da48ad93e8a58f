"""The docs as a site: `python -m sphinx -W -b html docs build/site`, with what `pip install '.[docs]'` brings; no network.

With `-D nb_execution_mode=force` the notebooks run while it is built, and their pages have outputs.
"""

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import write_notebooks  # noqa: E402  # in this folder
import write_reference  # noqa: E402

from msrl_jax.report.pages import write_pages  # noqa: E402

project, author = "msrl_jax", "the authors of msrl_jax"
copyright = author
version = release = version_of("msrl-jax")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
nb_execution_mode, nb_execution_timeout, nb_execution_raise_on_error = "off", 600, True
nb_merge_streams = True
default_role = "code"
add_module_names = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_numpy_docstring = False
napoleon_use_rtype, napoleon_use_ivar = False, True
html_theme = "furo"  # with a search and a dark mode
html_title = f"msrl_jax {version}"
html_static_path, html_css_files = ["site.css"], ["site.css"]
pygments_style, pygments_dark_style = "friendly", "monokai"


SITE_LINKS = {
    "": {
        "../notebooks/": "notebooks/",
        "../benchmarks/README.md": "reference/benchmarks.md",
        "../benchmarks/records/README.md": "results/index.md",
    },
    "reference/benchmarks": {"../docs/": "../", "records/README.md": "../results/index.md"},
}
"""What links of the repository are on the site, by the page that has them; "" is any other page."""


def spaced(app, what, name, value, options, lines):
    """Code is followed by what may follow it in Markdown, such as the s of a plural."""
    lines[:] = re.sub(r"(`[^`]+`)(\w?)", lambda m: f"{m[1]}\\ {m[2]}" if m[2] else m[1], "\n".join(lines)).split("\n")


def read(app, page, source):
    """Links are those of the repository; on the site, notebooks and benchmarks are pages, and recipes have curves."""
    if page.startswith("notebooks/"):
        source[0] = write_notebooks.page(source[0], page.removeprefix("notebooks/"), app.config.nb_execution_mode != "off")
        return
    for theirs, ours in SITE_LINKS.get(page, SITE_LINKS[""]).items():
        source[0] = source[0].replace(f"]({theirs}", f"]({ours}")


def write(app, config):
    """Writes the results from the records, the reference from the package, and the notebooks, before the pages are read."""
    write_pages(HERE / "results")
    write_reference.write(HERE / "reference")
    (HERE / "reference" / "benchmarks.md").write_text((HERE.parent / "benchmarks" / "README.md").read_text("utf-8"), "utf-8")
    write_notebooks.write(HERE / "notebooks")


def setup(app):
    """Adds the steps of the site to Sphinx."""
    app.connect("config-inited", write)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", spaced)
