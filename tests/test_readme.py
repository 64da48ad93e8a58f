"""The README tells the truth: its commands, its Python, its table and its plan."""

import contextlib
import inspect
import io
import re
import shlex
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli, codecs
from msrl_jax.envs import registry
from msrl_jax.training.setup import resolve_policy

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTIONS = {part.splitlines()[0]: part for part in re.split(r"^## ", README, flags=re.MULTILINE)[1:]}
COMMANDS = [line for _, code in CODE.findall(SECTIONS["From the command line"]) for line in code.splitlines()]


def blocks(section, language):
    return [code for found, code in CODE.findall(SECTIONS[section]) if found == language]


@pytest.fixture
def run_section(tmp_path, monkeypatch):
    """Runs a section's Python blocks in one namespace, with every run cut to 2 iterations; returns namespace and output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    def run(section):
        namespace, output = {"__name__": "readme"}, io.StringIO()
        for code in blocks(section, "python"):
            short = re.sub(r"total_steps=[\d_]+", "total_steps=4096", code)
            with contextlib.redirect_stdout(output):
                exec(compile(short, f"README.md: {section}", "exec"), namespace)
        return namespace, output.getvalue()

    return run


@pytest.mark.parametrize("command", ["pip install . && msrl-jax train", "pip install -e '.[test]' && pytest"])
def test_the_two_commands_stand_in_blocks_of_their_own(command):
    assert f"\n```\n{command}\n```\n" in README


def test_the_console_script_exists():
    (script,) = (s for s in entry_points(group="console_scripts") if s.name == "msrl-jax")
    assert script.load() is cli.main


def test_extras_are_those_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"'\.\[(\w+)\]'", README)) == set(declared)


def test_links_lead_somewhere():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links and all((ROOT / link).exists() for link in links)


def test_the_table_names_the_policies():
    rows = re.findall(r"^\| `(\w+)` \|", section("Distribution policies"), re.MULTILINE)
    assert rows == list(msrl.policies.POLICIES)


def test_the_table_names_the_algorithms():
    table = section("Algorithms").split("None of them knows")[0]
    assert set(re.findall(r"`(\w+)`(?=[,` \w]*\|)", table)) == set(msrl.algorithms.ALGORITHMS)


def test_returns_and_losses_are_named_and_documented_with_their_shapes():
    modules = msrl.algorithms.returns, msrl.algorithms.losses
    functions = {
        name: function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__.startswith(module.__name__) and function.__name__ == name
    }
    (paragraph,) = (p for p in README.split("\n\n") if "`msrl.algorithms.returns`" in p)
    assert set(re.findall(r"`(\w+)`", paragraph)) == set(functions)
    for name, function in functions.items():
        arguments, _, results = inspect.getdoc(function).partition("\nReturns:")
        entries = dict(re.findall(r"^  (\w+): (.*?)(?=^  \w|^\w|\Z)", arguments, re.MULTILINE | re.DOTALL))
        signature = inspect.signature(function)
        assert list(entries) == list(signature.parameters), name
        arrays = [k for k, parameter in signature.parameters.items() if parameter.annotation is jax.Array]
        assert arrays and all("`[" in entries[k] for k in arrays), name
        assert "`[" in results or signature.return_annotation is not jax.Array, name


def test_the_table_names_the_codecs():
    rows = re.findall(r'^\| `"([^"]+)"` \|', section("Distribution policies"), re.MULTILINE)
    assert rows == [*codecs.CODECS, "frame_stack(n)"]
    assert codecs.get(rows[-1].replace("n", "4")).lossless


def section(title):
    """The README's text under a heading."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_every_python_block_is_run_here():
    tested = ("Distribution policies", "From Python", "Data", "Your own algorithm", "Your own environment")
    assert sum(len(blocks(section, "python")) for section in tested) == README.count("```python")


def test_a_policy_of_ones_own(run_section):
    namespace, _ = run_section("Distribution policies")
    description = namespace["result"].description
    assert description["policy"] == "HalfAndHalf" and description["devices"]["count"] == 8


def test_from_python(run_section, tmp_path):
    namespace, output = run_section("From Python")
    assert "Result: ppo on CartPole-v1, GPUOnly on 8 cpu devices" in output and "128 episodes" in output
    assert (tmp_path / "curve.png").stat().st_size > 0
    result = namespace["result"]
    assert result.seeds == 8 and result.history["episode_return"].shape == (2, 8)
    assert msrl.Result.load(tmp_path / "saved").description["total_steps"] == 4096


def test_data(run_section, tmp_path):
    namespace, output = run_section("Data")
    assert "Dataset(20,000 rows" in output and len(namespace["dataset"]) == 4096
    assert len(namespace["training"]) + len(namespace["validation"]) == 4096
    assert namespace["result"].config.data == "medium.npz" and len(namespace["result"].state.data.items) == 6
    assert len(msrl.data.load(tmp_path / "medium.npz")) == 20_000


def test_an_algorithm_of_ones_own_learns_and_its_plan_is_the_printed_one(run_section):
    namespace, output = run_section("Your own algorithm")
    returns = namespace["returns"]
    assert returns[:10].mean() < 100 and returns[-50:].mean() > 400

    printed = [" ".join(line.split()) for line in output.splitlines()]
    (excerpt,) = blocks("Your own algorithm", "text")
    for line in excerpt.splitlines():
        start = " ".join(line.split()).removesuffix("...")
        assert any(p == start or (line.endswith("...") and p.startswith(start)) for p in printed), line


def test_an_environment_of_ones_own(run_section):
    namespace, _ = run_section("Your own environment")
    result = namespace["result"]
    assert result.behavior.env.length == 10 and np.isfinite(result.history["episode_return"]).all()


@pytest.mark.parametrize("line", COMMANDS)
def test_the_command_line_understands_the_examples(line, monkeypatch):
    program, command, *arguments = shlex.split(line)
    assert program == "msrl-jax"
    seen = {}
    monkeypatch.setitem(cli.COMMANDS, command, (cli.COMMANDS[command][0], lambda *given: seen.update(given=given) or 0))
    monkeypatch.setattr(cli, "_use_cpu_devices", lambda count: seen.update(devices=count))
    assert cli.main([command, *arguments]) == 0
    args, config = seen["given"]
    assert seen["devices"] == (8 if "--cpu-devices 8" in line else None)
    assert config == ({"learning_rate": 3e-4} if "--learning-rate" in line else {})
    named = getattr(args, "policy", ())
    for policy in map(resolve_policy, [named] if isinstance(named, str) else named):
        assert policy.layout(jax.devices()[:8], {"env": 64}).devices
