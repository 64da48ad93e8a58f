"""The notebooks as pages of the site: copies in a folder of the docs, and what is different when they are read from there."""

import json
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
WITHOUT = "This page shows its code [without outputs](../first_hour.md#notebooks)."
WITH = "This page shows it as it ran when the site was built."


def write(folder: Path) -> None:
    """Copies all notebooks into a folder, and changes none that is as it was."""
    folder.mkdir(exist_ok=True)
    for path in NOTEBOOKS.glob("*.ipynb"):
        text, copy = path.read_text("utf-8"), folder / path.name
        if not copy.exists() or copy.read_text("utf-8") != text:
            copy.write_text(text, "utf-8")


def page(text: str, name: str, executed: bool) -> str:
    """The text of a notebook with links that hold in the docs; below the title, what is shown and where the file is."""
    notebook = json.loads(text.replace("](../docs/", "](../"))
    about = f"{WITH if executed else WITHOUT} {{download}}`Download the notebook <../../notebooks/{name}.ipynb>`."
    notebook["cells"].insert(1, {"cell_type": "markdown", "id": "about-this-page", "metadata": {}, "source": [about]})
    return json.dumps(notebook)
