"""The notebooks run from top to bottom in a fresh kernel, and show what they say."""

import json
import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

# Runs behind the last cell of the tour: what it found, as data.
INSPECT = """
import json
print(json.dumps({
    "devices": len(jax.devices()),
    "fused": fused.history["episode_return"].tolist(),
    "apart": apart.history["episode_return"].tolist(),
    "stale": stale.history["episode_return"].tolist(),
    "lengths": length.mean(axis=()).tolist(),
    "corridor": corridor.history["episode_return"].tolist(),
}))
"""


def as_a_user_starts_it():
    """This process's environment without its virtual devices, which the notebook makes itself."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return os.environ | {"XLA_FLAGS": " ".join(f for f in flags if "host_platform_device_count" not in f)}


@pytest.fixture(scope="module")
def tour():
    notebook = nbformat.read(NOTEBOOKS / "msrl_jax_tour.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(INSPECT))
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}})
    client.execute(env=as_a_user_starts_it())
    return notebook


def printed(notebook):
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_notebooks_are_valid_and_stored_without_outputs():
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_the_tour_learns_and_its_runs_agree(tour):
    found = json.loads(tour.cells[-1].outputs[0].text)
    assert found["devices"] == 8
    assert found["fused"][-1] > 5 * found["fused"][0]
    assert found["apart"][:8] == pytest.approx(found["fused"][:8], rel=1e-5)
    assert found["stale"][0] == pytest.approx(found["fused"][0], rel=1e-5)
    assert found["stale"][1:] != pytest.approx(found["fused"][1:], rel=1e-2)
    assert sum(found["lengths"][-10:]) > 3 * sum(found["lengths"][:10])
    assert found["corridor"][-1] > 0.9 > 0.5 > found["corridor"][0]


def test_the_tour_shows_plan_and_curves_and_no_warning(tour):
    pictures = [o for c in tour.cells if c.cell_type == "code" for o in c.outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 2
    text = printed(tour)
    assert "crossing placements" in text and "env_step" in text
    assert "Warning" not in text and "Traceback" not in text
