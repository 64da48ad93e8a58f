"""Writes `results.md`, the tables of the repository, from the records: `python docs/write_results.py`, when a record is new."""

from pathlib import Path

from msrl_jax.report.pages import index, rows

PAGE = Path(__file__).parent / "results.md"


def page() -> str:
    """The page, whose links lead to files of the repository."""
    return f"{index(rows(), alone=True)}<!-- written by docs/write_results.py, from the records of recipes -->\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
