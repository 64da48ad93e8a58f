"""The notebooks run from top to bottom in a fresh kernel, and show what they say."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"

INSPECT_TOUR = """
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

INSPECT_SEVERAL = """
import json
first_and_last = lambda means: [means[:10].mean(), means[-10:].mean()]
print(json.dumps({
    "driving": first_and_last(driving["episode_return"]),
    "catching": first_and_last(catching["episode_return"]),
    "surprise": [float(catching["surprise"][s].mean()) for s in (slice(10), slice(-10, None))],
    "walking": first_and_last(walking["episode_return"]),
    "progress": [float(walking["progress_per_step"][s].mean()) for s in (slice(10), slice(-10, None))],
    "plans": [str(shown) for shown in Out.values() if isinstance(shown, msrl.Plan)],
}))
"""


def as_a_user_starts_it():
    """This process's environment without its virtual devices, which the notebook makes itself."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    return os.environ | {"XLA_FLAGS": " ".join(f for f in flags if "host_platform_device_count" not in f)}


def execute(name, inspect, **shorter):
    """Runs a notebook, and behind it a cell that prints what it found as JSON; returns notebook and findings.

    Numbers of its code may be made smaller by name.
    """
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    for number, value in shorter.items():
        counts = 0
        for cell in notebook.cells:
            cell.source, count = re.subn(rf"\b{number}( ?= ?)[\d_]+", rf"\g<1>{value}", cell.source)
            counts += count
        assert counts, number
    notebook.cells.append(nbformat.v4.new_code_cell(inspect))
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": NOTEBOOKS}})
    client.execute(env=as_a_user_starts_it())
    return notebook, json.loads(notebook.cells[-1].outputs[0].text)


INSPECT_INSIDE = """
acted = policy.call(obs=obs)["action"].tolist(), result.act(obs).tolist()
print(json.dumps({"acted": acted, "films": len(list((folder / "videos").iterdir())), "page": page.stat().st_size}))
"""


INSPECT_SB3 = """
import json
columns = ("episode_return", "value_loss", "entropy")
print(json.dumps({
    "one": {name: one.history[name][:5].tolist() for name in columns},
    "eight": {name: eight.history[name][:5].tolist() for name in columns},
    "devices": [run.description["devices"]["count"] for run in (one, eight)],
    "returns": [float(run.final("episode_return")) for run in (one, eight)],
    "cartpole": result.evaluation.returns.mean().item(),
    "acted": [int(run.act([0.0, 0.1, 0.02, -0.1])) for run in (result, loaded)],
    "seeds": list(seeds.history["episode_return"].shape),
}))
"""


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def printed(notebook):
    return "".join(output.text for output in outputs_of(notebook) if output.output_type == "stream")


def pictures(notebook):
    return [output for output in outputs_of(notebook) if "image/png" in output.get("data", {})]


def shown_as_html(notebook):
    return [str(output.get("data", {}).get("text/html", "")) for output in outputs_of(notebook)]


def plans_in(notebook):
    return [html for html in shown_as_html(notebook) if 'class="msrl-plan"' in html]


def films_in(notebook):
    return [html for html in shown_as_html(notebook) if "data:image/gif;base64," in html]


@pytest.mark.slow
def test_inside_a_run_shows_its_curve_plan_and_film():
    notebook, found = execute("inside_a_run.ipynb", INSPECT_INSIDE)
    assert found["acted"][0] == found["acted"][1] and found["films"] == 3 and found["page"] > 100_000
    assert sum("<svg" in html for html in shown_as_html(notebook)) == 2, "the card of the result, and the plan"
    assert len(plans_in(notebook)) == len(films_in(notebook)) == 1


@pytest.mark.slow
def test_from_sb3_to_eight_devices_is_the_same_training_under_both_policies():
    notebook, found = execute("from_sb3_to_eight_devices.ipynb", INSPECT_SB3)
    assert found["devices"] == [1, 8]
    for name, values in found["one"].items():
        assert found["eight"][name] == pytest.approx(values, rel=1e-5), name
    # Of the seeds 10000 to 10031 the lowest returned 239; 22 is chance. Last bits, and so the path, are those of the processor.
    assert found["cartpole"] > 150 and found["acted"][0] == found["acted"][1] and found["seeds"][1] == 4
    assert all(0.7 < final <= 0.875 for final in found["returns"])
    assert "equal to the last bit" in printed(notebook) and "Traceback" not in printed(notebook)
    (plans,) = plans_in(notebook)
    assert plans.count("<svg") == 2 and len(films_in(notebook)) == 1 and len(pictures(notebook)) == 2


@pytest.fixture(scope="module")
def short_tour():
    return execute("msrl_jax_tour.ipynb", INSPECT_TOUR, TOTAL_STEPS=8192, total_steps=4096)


@pytest.fixture(scope="module")
def several():
    return execute("several_learners.ipynb", INSPECT_SEVERAL)


def test_notebooks_are_valid_and_stored_without_outputs():
    for path in NOTEBOOKS.glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        nbformat.validate(notebook)
        assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_first_cell_installs_the_package_or_says_what_to_do(path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    code = TransformerManager().transform_cell(next(c.source for c in notebook.cells if c.cell_type == "code"))
    commands, found = [], {"msrl_jax": None}
    shell = SimpleNamespace(run_line_magic=lambda magic, line: commands.append(f"{magic} {line}"))
    monkeypatch.setattr("importlib.util.find_spec", found.get)
    with pytest.raises(ModuleNotFoundError, match=r"from '\.\.'; set SOURCE"):
        exec(code, {"get_ipython": lambda: shell})
    assert commands == ['pip install --quiet "{SOURCE}"']
    assert 'name = "msrl-jax"' in (NOTEBOOKS / ".." / "pyproject.toml").read_text(), "that is what '..' is"
    found["msrl_jax"] = "installed"
    exec(code, {"get_ipython": None})


@pytest.mark.slow
def test_the_tour_learns_and_its_runs_agree():
    _, found = execute("msrl_jax_tour.ipynb", INSPECT_TOUR)
    assert found["devices"] == 8
    assert found["fused"][-1] > 5 * found["fused"][0]
    assert found["apart"][:5] == pytest.approx(found["fused"][:5], rel=1e-5)
    assert found["stale"][0] == pytest.approx(found["fused"][0], rel=1e-5)
    assert found["stale"][1:] != pytest.approx(found["fused"][1:], rel=1e-2)
    assert sum(found["lengths"][-10:]) > 3 * sum(found["lengths"][:10])
    assert found["corridor"][-1] > 0.9 > 0.5 > found["corridor"][0]


@pytest.mark.long
def test_a_short_tour_shows_plan_curves_and_film_and_no_warning(short_tour):
    notebook, found = short_tour
    assert found["apart"] == pytest.approx(found["fused"], rel=1e-5)
    assert found["stale"][0] == pytest.approx(found["fused"][0], rel=1e-5)
    text = printed(notebook)
    assert len(pictures(notebook)) == 2 and len(films_in(notebook)) == 1
    (plan,) = plans_in(notebook)
    assert "env_step" in plan
    assert "Warning" not in text and "Traceback" not in text


@pytest.mark.slow
def test_several_learners_all_learn(several):
    notebook, found = several
    assert found["driving"][0] < 100 and found["driving"][1] > 400
    assert found["catching"][0] < 0 and found["catching"][1] > 0.9
    assert found["surprise"][1] < 0.5 * found["surprise"][0], "the critic knows what is coming"
    assert found["walking"][0] < 0.6 and found["walking"][1] > 0.95
    assert found["progress"][1] > found["progress"][0] + 0.1
    rows = re.findall(r"(\w+) +PPO +(\d+) +Q-learning +(\d+)", printed(notebook))
    alone = {kind: [int(n) for n in steps] for kind, *steps in rows}
    assert all(after > 3 * before for before, after in zip(alone["untrained"], alone["trained"], strict=True)), alone


@pytest.mark.slow
def test_several_learners_stay_apart_and_train_as_one_program_does(several):
    notebook, found = several
    text = printed(notebook)
    differences = re.findall(r"returns differ by (\S+), parameters by (\S+) at most", text)
    assert len(differences) == 3 and all(float(r) == 0 and float(p) < 1e-4 for r, p in differences)
    assert len(plans_in(notebook)) == len(found["plans"]) == 3
    rows = re.findall(r"^  learn_(\w+) +learner:(\w+) +(\w+) +1 .* (\d+)$", "\n".join(found["plans"]), re.MULTILINE)
    calls = {"ppo": 1, "q": 1, "actor": 1, "critic": 4, "manager": 1, "worker": 8}
    assert rows == [(name, name, name, str(calls[name])) for name in ("ppo", "q", "critic", "actor", "worker", "manager")]
    assert len(pictures(notebook)) == 3 and "Traceback" not in text
