"""The docs as a site: `python -m sphinx -W -b html docs build/site`, with what `pip install '.[docs]'` brings; no network."""

import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import write_reference  # noqa: E402  # in this folder

project, author = "msrl_jax", "the authors of msrl_jax"
copyright = author
version = release = version_of("msrl-jax")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
default_role = "code"
add_module_names = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_numpy_docstring = False
napoleon_use_rtype, napoleon_use_ivar = False, True
html_theme = "furo"  # with a search and a dark mode
html_title = f"msrl_jax {version}"
pygments_style, pygments_dark_style = "friendly", "monokai"


def spaced(app, what, name, value, options, lines):
    """Code is followed by what may follow it in Markdown, such as the s of a plural."""
    lines[:] = re.sub(r"(`[^`]+`)(\w?)", lambda m: f"{m[1]}\\ {m[2]}" if m[2] else m[1], "\n".join(lines)).split("\n")


def setup(app):
    """Writes the reference from the package itself, before the pages are read."""
    app.connect("autodoc-process-docstring", spaced)
    app.connect("config-inited", lambda app, config: write_reference.write(HERE / "reference"))
