"""The README and its pages tell the truth: their commands, their Python, their tables, their links and the plan."""

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import os
import re
import shlex
import socket
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax import cli, envs
from msrl_jax.cli import launch
from msrl_jax.cli.command import Command, Output
from msrl_jax.cli.commands import COMMANDS
from msrl_jax.configs.fields import OPTIONS, option_classes
from msrl_jax.configs.names import tunable_fields
from msrl_jax.configs.replay_options import Prioritized
from msrl_jax.envs import registry
from msrl_jax.fragments import codecs
from msrl_jax.losses.q_targets import QTarget
from msrl_jax.registry.table import ALGORITHMS as REGISTRY
from msrl_jax.run import Experiment, recipes
from tests.support import processes

ROOT = Path(__file__).parents[1]
README = "README.md"
TITLES = (
    "policies",
    "algorithms",
    "networks",
    "own_algorithm",
    "offline",
    "own_environment",
    "environments",
    "several_agents",
    "runs",
    "performance",
    "guarantees",
    "populations",
    "results",
    "architecture",
    "index",
    "first_hour",
    "concepts",
    "examples",
    "cluster",
    "faq",
)
(
    POLICIES,
    ALGORITHMS,
    NETWORKS,
    OWN_ALGORITHM,
    OFFLINE,
    OWN_ENVIRONMENT,
    ENVIRONMENTS,
    SEVERAL_AGENTS,
    RUNS,
    PERFORMANCE,
    GUARANTEES,
    POPULATIONS,
    RESULTS,
    ARCHITECTURE,
    INDEX,
    FIRST_HOUR,
    CONCEPTS,
    EXAMPLES,
    CLUSTER,
    FAQ,
) = (f"docs/{title}.md" for title in TITLES)
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / README, *sorted((ROOT / "docs").glob("*.md")))}
CODE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TOP = "top"
"""The part of a page above its first `## ` heading."""
SECTIONS = {
    (page, TOP if i == 0 else part.splitlines()[0]): part
    for page, text in PAGES.items()
    for i, part in enumerate(re.split(r"^## ", text, flags=re.MULTILINE))
}
RUN_HERE = (
    (README, TOP),
    (INDEX, TOP),
    (FIRST_HOUR, "Train"),
    (FIRST_HOUR, "Look"),
    (FIRST_HOUR, "Change the policy"),
    (FIRST_HOUR, "Your own environment"),
    (CONCEPTS, "Your own loop"),
    (POLICIES, "Your own policy"),
    (POLICIES, "Functions that the host calls"),
    (PERFORMANCE, "Plan for hardware you do not have"),
    (ALGORITHMS, "Hindsight experience replay"),
    (NETWORKS, "Custom networks"),
    (NETWORKS, "Optimizers"),
    (ALGORITHMS, "Options"),
    (NETWORKS, "Schedules"),
    (SEVERAL_AGENTS, "Self-play"),
    (OWN_ALGORITHM, "From scratch"),
    (OWN_ALGORITHM, TOP),
    (OWN_ALGORITHM, "Your own option"),
    (OWN_ALGORITHM, "From a trained agent"),
    (OFFLINE, "Recording"),
    (OFFLINE, "Offline RL"),
    (OFFLINE, "Learning from data and experience"),
    (OFFLINE, "Estimating a return"),
    (OWN_ENVIRONMENT, TOP),
    (OWN_ENVIRONMENT, "Wrappers"),
    (OWN_ENVIRONMENT, "Goals to reach"),
    (OWN_ENVIRONMENT, "Actions of several integers"),
    (OWN_ENVIRONMENT, "Legal actions"),
    (OWN_ENVIRONMENT, "What the critic sees"),
    (OWN_ENVIRONMENT, "Metrics"),
    (ENVIRONMENTS, "Domain randomization"),
    (ENVIRONMENTS, "Curricula"),
    (OWN_ENVIRONMENT, "Parameters"),
    (SEVERAL_AGENTS, TOP),
    (SEVERAL_AGENTS, "Agents with different spaces"),
    (SEVERAL_AGENTS, "Two-player games"),
    (SEVERAL_AGENTS, "Matches and ratings"),
    (SEVERAL_AGENTS, "MuZero"),
    (ENVIRONMENTS, "Simulators on the host"),
    (RUNS, TOP),
    (RUNS, "Logging"),
    (RUNS, "A run as a value"),
    (PERFORMANCE, TOP),
    (RUNS, "The policy as a file"),
    (RESULTS, TOP),
    (RESULTS, "Reproducing"),
    (RESULTS, "Statistics"),
    (GUARANTEES, "Non-finite values"),
    (POPULATIONS, "Members with different settings"),
    (POPULATIONS, "Sweeps"),
    (POPULATIONS, "Population based training"),
    (POPULATIONS, "Tournaments"),
    (ARCHITECTURE, "Adding a part"),
    (CLUSTER, "Elastic actors"),
    (FAQ, "Coming from another library"),
    (EXAMPLES, "RL-DARTS"),
    (FAQ, "Q-values and probabilities"),
)
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
OWN = CODE.findall(SECTIONS[POPULATIONS, "Members with different settings"])[1][1].partition("\n\nresult")[0]
"""An algorithm of one's own, as the file `my_module.py`."""
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
IN_BLOCKS = [line for _, code in CODE.findall(SECTIONS[CONCEPTS, "From the command line"]) for line in code.splitlines()]
IN_PAGES = [
    line
    for page in PAGES
    for _, code in CODE.findall(PAGES[page])
    for line in code.replace("\\\n", " ").splitlines()
    if line.startswith("msrl-jax ") and line not in IN_BLOCKS
]
IN_TEXT = [line for page in PAGES for line in re.findall(r"`(msrl-jax [^`]+)`", PAGES[page])]


def blocks(page, title, language):
    return [code for found, code in CODE.findall(SECTIONS[page, title]) if found == language]


@pytest.fixture
def run_sections(tmp_path, monkeypatch):
    """Runs the Python blocks of sections in an empty folder, each in a namespace of its own.

    A block that begins with the name of a file is that file. Runs are cut to `steps` steps, or updates, which may be a number
    for each run; None runs them whole. Other numbers of the code may be made smaller by name. Returns the namespaces, one per
    other block, and the output.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    def run(page, *titles, steps=4096, **shorter):
        namespaces, output, shortened = [], io.StringIO(), set()
        lengths = itertools.repeat(steps) if isinstance(steps, int) else iter(steps or ())
        for title in titles:
            assert (page, title) in RUN_HERE
            for code in blocks(page, title, "python"):
                if file := re.match(r"# (\w+)\.py\n", code):
                    Path(f"{file[1]}.py").write_text(code)
                    continue
                code = code.replace(DEVICES, "assert len(jax.devices()) == 8")  # JAX has started, with eight devices
                if steps is not None:
                    code = re.sub(r"(total|round)_steps=[\d_]+", lambda found: f"{found[1]}_steps={next(lengths)}", code)
                for name, number in shorter.items():
                    code, count = re.subn(rf"\b{name}=\d+", f"{name}={number}", code)
                    shortened |= {name} if count else set()
                namespaces.append({"__name__": "page"})
                with contextlib.redirect_stdout(output):
                    exec(compile(code, f"{page}: {title}", "exec"), namespaces[-1])
        assert shortened == set(shorter)
        return namespaces, output.getvalue()

    with mock.patch.dict(REGISTRY):  # a page may register one
        yield run


@pytest.mark.parametrize("command", ["pip install . && msrl-jax train", "pip install -e '.[test]' && pytest"])
def test_the_two_commands_stand_in_blocks_of_their_own(command):
    assert f"\n```\n{command}\n```\n" in SECTIONS[README, TOP]


def test_the_console_script_exists():
    (script,) = (s for s in entry_points(group="console_scripts") if s.name == "msrl-jax")
    assert script.load() is cli.main


def test_the_table_of_extras_names_all():
    rows = re.findall(r"^\| (`.*?`) \| .* \|$", SECTIONS[FIRST_HOUR, "Extras"], re.MULTILINE)
    named = [extra for row in rows for extra in re.findall(r"`(\w+)`", row)]
    assert len(named) == len(set(named)) and set(named) == set(EXTRAS)


def anchors(text):
    """What links may have behind a `#`: the headings as GitHub writes them there."""
    headings = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [*PAGES, "CONTRIBUTING.md", "benchmarks/README.md", "benchmarks/records/README.md"])
def test_links_lead_somewhere(page):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", CODE.sub("", (ROOT / page).read_text())) if "://" not in link]
    written = [ROOT / folder for folder in (ROOT / ".gitignore").read_text().split() if folder.startswith("docs/")]
    for link in links:
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        assert target.exists(), link
        assert not any(target.resolve().is_relative_to(folder) for folder in written), f"{link} is not in the repository"
        assert not anchor or anchor in anchors(target.read_text()), link


def test_the_files_that_the_architecture_names_exist():
    files = {str(path.relative_to(ROOT)) for folder in ("msrl_jax", "tests") for path in (ROOT / folder).rglob("*.py")}
    named = set(re.findall(r"`([\w/]+\.py)`", PAGES[ARCHITECTURE]))
    assert not {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}


def test_the_first_page_of_the_site_lists_every_other_page():
    listed = {f"docs/{name}.md" for name in re.findall(r"^\w+$", PAGES[INDEX], re.MULTILINE)}
    assert listed == set(PAGES) - {README, INDEX}


def test_the_table_names_the_policies():
    rows = re.findall(r"^\| `(\w+)` \|", SECTIONS[POLICIES, "The policies"], re.MULTILINE)
    assert rows == list(msrl.policies.POLICIES)


def test_the_table_names_the_algorithms():
    table = SECTIONS[ALGORITHMS, "The algorithms"]
    names = "".join(re.findall(r"^\| (`\w+`.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", names)) == set(msrl.algorithms.names())


def test_the_table_names_the_options():
    fields = {field for name in msrl.algorithms.names() for field in dataclasses.fields(msrl.algorithms.get(name))}
    kinds = {kind for field in fields for kind in option_classes(field)} | {Prioritized}
    named = re.findall(r"`(\w+)\((.*?)\)`", SECTIONS[ALGORITHMS, "Options"].partition("\nA field takes")[0])
    assert {name for name, _ in named} == {kind.__name__ for kind in kinds}
    options = {kind.__name__: ", ".join(f.name for f in dataclasses.fields(kind)) for kind in kinds}
    assert all(arguments in ("...", options[name]) for name, arguments in named)


def test_returns_and_losses_are_named_and_documented_with_their_shapes():
    modules = msrl.returns, msrl.losses
    functions = {
        name: function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__.startswith(module.__name__) and function.__name__ == name
    }
    listed = re.findall(r"^- `msrl\.\w+`.*?\.$", PAGES[OWN_ALGORITHM], re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`(\w+)`", "".join(listed))) == set(functions)
    for name, function in functions.items():
        arguments, _, results = inspect.getdoc(function).partition("\nReturns:")
        entries = dict(re.findall(r"^  (\w+): (.*?)(?=^  \w|^\w|\Z)", arguments, re.MULTILINE | re.DOTALL))
        signature = inspect.signature(function)
        assert list(entries) == list(signature.parameters), name
        arrays = [k for k, parameter in signature.parameters.items() if parameter.annotation is jax.Array]
        assert arrays and all("`[" in entries[k] for k in arrays), name
        assert "`[" in results or signature.return_annotation is not jax.Array, name


def test_the_table_names_the_codecs():
    rows = re.findall(r'^\| `"([^"]+)"` \|', SECTIONS[POLICIES, "Packing"], re.MULTILINE)
    assert rows == [*codecs.CODECS, "frame_stack(n)"]
    assert codecs.get(rows[-1].replace("n", "4")).lossless


def test_every_python_block_is_run_here():
    run = sum(len(blocks(*section, "python")) for section in RUN_HERE)
    assert run == sum(text.count("```python") for text in PAGES.values())


@pytest.mark.long
def test_virtual_devices_can_be_asked_for_where_the_pages_do():
    """In a process in which JAX has not started, as the pages' readers have it."""
    asking = [code for section in RUN_HERE for code in blocks(*section, "python") if DEVICES in code]
    starts = [code[: code.index(DEVICES) + len(DEVICES)] for code in asking]
    assert len(starts) == 3
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    command = [sys.executable, "-c", "\n".join([*starts, "print(len(jax.devices()))"])]
    done = processes.run(command, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (0, "8\n"), done.stderr


@pytest.mark.long
def test_runs(run_sections):
    (namespace,), _ = run_sections(RUNS, TOP, steps=None)
    result = namespace["result"]
    assert result.status == "finished" and result.history["step"][-1] == 60_000 // 4096 * 4096
    assert [entry["before"]["total_steps"] for entry in result.description["resumed"]] == [40_000, 40_000]


@pytest.mark.long
def test_actors_that_ray_starts(tmp_path):
    """In a process of its own, whose end ends those of Ray."""
    ray = pytest.importorskip("ray")
    (code,) = blocks(CLUSTER, "Elastic actors", "python")
    with socket.socket() as probe:
        probe.bind(("", 0))
        code = code.replace("7000", str(probe.getsockname()[1])).replace("100_000", "20_000")
    paths = os.pathsep.join([str(ROOT), str(Path(ray.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    done = processes.run([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"^(\d+) \[(\d+), (\d+)\]$", done.stdout, re.MULTILINE)
    assert found, done.stdout
    steps, *unrolls = map(int, found.groups())
    assert steps == 19_968 and sum(unrolls) >= 39


@pytest.mark.long
def test_logging(run_sections, monkeypatch):
    """What stands for the package wandb takes what it is called with."""
    pytest.importorskip("tensorboardX")
    run = mock.Mock()
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock(init=mock.Mock(return_value=run)))
    (board, wandb), output = run_sections(RUNS, "Logging", steps=8192)
    assert [row[0] for row in board["rows"]] == [4096, 8192] and output == f"{board['rows'][-1]}\n"
    (events,) = Path("board").iterdir()
    assert all(name in events.read_bytes() for name in (b"episode_return", b"entropy", b"eval_return"))
    assert sys.modules["wandb"].init.call_args.kwargs["config"] == wandb["experiment"].to_json()
    assert [call.kwargs["step"] for call in run.log.call_args_list] == [4096, 8192] and run.finish.called


@pytest.mark.long
def test_a_run_as_a_value(run_sections):
    (namespace,), output = run_sections(RUNS, "A run as a value")
    assert output.startswith("('seed', 0, 1)\n") and "GPUOnly()" in output
    assert [result.description["seed"] for result in namespace["results"]] == [0, 1]
    described = namespace["results"][0].description
    assert Experiment.from_json(described).difference(namespace["first"]) is None


@pytest.mark.slow
def test_the_policy_as_a_file(run_sections):
    _, output = run_sections(RUNS, "The policy as a file", steps=None)
    inputs, action = output.splitlines()
    assert inputs == "{'obs': 'float32[B, 4]'}" and action in ("[0]", "[1]")


@pytest.mark.slow
def test_profiling(run_sections):
    _, output = run_sections(PERFORMANCE, TOP, steps=None)
    assert "simulation" in output and "gradients" in output
    assert Path("profile.svg").exists() and Path("profile.trace.json.gz").exists()


@pytest.mark.long
def test_recipes(run_sections, tmp_path, monkeypatch):
    """A short recipe stands for the one that the page reproduces."""
    (one, _), output = run_sections(RESULTS, TOP, "Statistics")
    assert one["result"].experiment.seed == 7 and "Evaluation(64 episodes" in output and "agrees" in output
    (tmp_path / "recipes").mkdir()
    settings = 'algo = "ppo"\nenv = "CartPole-v1"\ntotal_steps = 4096\nunroll_length = 16\neval_episodes = 2\n'
    (tmp_path / "recipes" / "ppo-cartpole.toml").write_text(f"# Short.\n{settings}")
    monkeypatch.setattr(recipes, "FOLDER", tmp_path / "recipes")
    monkeypatch.setattr(recipes, "RECORDS", (tmp_path / "recipes",))
    first = msrl.reproduce("ppo-cartpole", seeds=5, progress=False)  # in the folder of the page, which then trains no more
    first.record.write(tmp_path / "recipes" / "ppo-cartpole.json")
    (namespace,), output = run_sections(RESULTS, "Reproducing")
    assert namespace["found"].verdict == "agrees" and "seeds 0 to 4: agrees" in output


@pytest.mark.long
def test_parts_of_ones_own(run_sections):
    (averaged, plateau), output = run_sections(ARCHITECTURE, "Adding a part", steps=1024)
    result = averaged["result"]
    own, mean = result.run_state.inner
    assert jax.tree.map(np.shape, own.params) == jax.tree.map(np.shape, mean)
    agent = averaged["PPO"](num_envs=8, unroll_length=32).build(envs.make("CartPole-v1"))
    inner = agent.init(jax.random.key(0))
    reference = inner.params
    program = jax.jit(lambda state, count: agent.iteration(state, msrl.algorithms.Progress(count, 4)))
    counter = msrl.counters.counter()
    for _ in range(4):
        inner, _ = program(inner, counter)
        counter = msrl.counters.advance(counter)
        reference = jax.tree.map(lambda m, p: 0.9 * m + 0.1 * p, reference, inner.params)
    for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(mean), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.testing.assert_array_equal(result.act(obs), agent.act(own._replace(params=mean), obs, None, ())[0])
    assert plateau["result"].status in ("finished", "stopped") and "at best" in output


@pytest.mark.long
def test_the_same_run_under_two_policies(run_sections):
    (namespace,), output = run_sections(README, TOP, steps=None)
    losses = [namespace[name].history["value_loss"] for name in ("apart", "together")]
    np.testing.assert_allclose(*losses, rtol=1e-5)

    def curves(text):
        lines = re.findall(r"^(\w+) +\[([^]]*)\]$", text, re.MULTILINE)
        return {name: np.array(numbers.split(), float) for name, numbers in lines}

    (shown,), found = map(curves, blocks(README, TOP, "text")), curves(output)
    assert list(shown) == list(found) == ["together", "apart"]
    np.testing.assert_array_equal(shown["apart"], shown["together"])
    np.testing.assert_allclose(found["apart"], found["together"], rtol=1e-3)  # two decimals
    np.testing.assert_allclose(found["together"][:2], shown["together"][:2], rtol=1e-3)
    assert len(found["apart"]) == len(shown["apart"]) == 4


@pytest.mark.long
def test_a_loop_of_ones_own(run_sections):
    (namespace,), output = run_sections(CONCEPTS, "Your own loop")
    gain, distance = namespace["state"][0], namespace["metrics"]["distance"]
    assert abs(gain - 1) < 0.05, "steps back to where it should be, but for the noise"
    assert distance[0] == pytest.approx(2, abs=0.1) and distance[-1] == pytest.approx(np.sqrt(2 / np.pi), abs=0.1)
    (said,) = re.findall(r"from about (\S+) to (\S+)$", SECTIONS[CONCEPTS, "Your own loop"], re.MULTILINE)
    assert [float(x) for x in said] == pytest.approx(distance[[0, -1]], abs=0.1)
    assert np.array(output.strip("[]\n").split(), float) == pytest.approx(distance[[0, -1]])


@pytest.mark.long
def test_the_first_hour(run_sections):
    (train, look, own), output = run_sections(FIRST_HOUR, "Train", "Look", "Your own environment")
    assert "Result: ppo on CartPole-v1, GPUOnly on 8 cpu devices" in output and "64 episodes" in output and "Hallway" in output
    assert look["result"].status == "finished" and look["result"].description["total_steps"] == 4096
    assert train["result"].members == 8 and train["result"].history["episode_return"].shape[1:] == (8,)
    assert msrl.Result.load("saved").members == 8
    assert all(Path(name).stat().st_size for name in ("rates.png", "curve.png", "first.gif", "first.html", "hallway.gif"))
    assert msrl.video(own["result"], max_steps=2).episodes[0].shape == (3, 20, 200, 3)


@pytest.mark.slow
def test_one_word_changes_where_it_runs(run_sections):
    (home,), _ = run_sections(INDEX, TOP)
    (hour,), output = run_sections(FIRST_HOUR, "Change the policy")
    for first, second in ((home["result"], home["again"]), (hour["one"], hour["two"])):
        np.testing.assert_allclose(*(r.final("episode_return") for r in (first, second)), rtol=1e-5)
    assert "SingleLearnerCoarse(learners=2)" in output and Path("cartpole.gif").exists()


@pytest.mark.long
def test_networks_of_ones_own(run_sections):
    steps = 4096, 2048, 1088, 4096  # of SAC, with an update for every other step, only as many as it needs to begin
    (namespace, whole, remembering), _ = run_sections(NETWORKS, "Custom networks", steps=steps)
    torso = namespace["result"].state.params["params"]["actor_torso"]
    assert torso["module"]["Dense_1"]["kernel"].shape == (128, 128)
    other = namespace["other"]
    assert other.description["config"]["network"] == "torsos:linear"
    assert other.state.params["params"]["torso"]["module"]["kernel"].shape == (4, 64)
    assert set(whole["result"].state.params["actor"]["params"]) == {"torso"}
    assert remembering["result"].state.params["core"]["kernel"].shape == (64, 32)
    assert remembering["result"].description["config"]["core"] == "cores:fading"


def test_options_are_values_or_their_text(run_sections):
    (namespace,), _ = run_sections(ALGORITHMS, "Options")
    assert namespace["config"].returns.v_max == 200 and namespace["same"].replay.priorities.alpha == 0.4


@pytest.mark.slow
def test_a_network_that_is_found(run_sections):
    (namespace,), _ = run_sections(EXAMPLES, "RL-DARTS")
    supernet, again = (namespace[name].config.network for name in ("result", "again"))
    assert supernet.cell is None and again.cell == namespace["found"].cell and len(again.cell) == 3


@pytest.mark.long
def test_optimizers_and_schedules(run_sections):
    (own, frozen, scheduled), _ = run_sections(NETWORKS, "Optimizers", "Schedules", steps=8192)
    assert "learning_rate" not in own["result"].history
    biases = {name: layer for name, layer in frozen["result"].state.params["params"].items() if name.startswith("actor")}
    assert not biases["actor_torso"]["Dense_1"]["bias"].any() and biases["actor_head"]["bias"].all()  # they begin with 0
    np.testing.assert_allclose(scheduled["result"].history["learning_rate"][-1], 1.5e-3, rtol=1e-5)


@pytest.mark.long
def test_training_inside_a_program_of_ones_own_is_that_of_train(run_sections):
    (namespace,), _ = run_sections(FAQ, "Coming from another library", length=3)
    returns = namespace["returns"]
    assert returns.total.shape == (8, 3) and len(set(np.asarray(returns.total[:, -1]).tolist())) == 8
    expected = msrl.train("ppo", total_steps=3 * 4096, learning_rate=1e-4, eval_episodes=0, progress=False, chunk=1)
    alone = namespace["train"](jax.random.key(0), 1e-4)
    np.testing.assert_allclose(alone.total / alone.count, expected.history["episode_return"], rtol=1e-5)


@pytest.mark.long
def test_a_policy_of_ones_own(run_sections):
    (namespace,), output = run_sections(POLICIES, "Your own policy")
    description = namespace["result"].description
    assert description["policy"] == "HalfAndHalf" and description["devices"]["count"] == 8
    assert "HalfAndHalf on 8 cpu devices" in output


@pytest.mark.long
def test_action_values_of_a_trained_agent(run_sections):
    (namespace,), _ = run_sections(FAQ, "Q-values and probabilities")
    values = np.asarray(namespace["values"])
    assert values.shape == (1, 2) and values.argmax(-1) == np.asarray(namespace["result"].act([[0.0, 0.1, 0.02, -0.1]]))


@pytest.mark.slow
def test_data(run_sections, tmp_path, monkeypatch):
    settings = msrl.offline_evaluation.FittedQ(discount=0.5, num_updates=1000, batch_size=64, tau=0.05)  # quick
    estimate = functools.partial(msrl.offline_evaluation.estimate_return, settings=settings)
    monkeypatch.setattr(msrl.offline_evaluation, "estimate_return", estimate)
    titles = ("Recording", "Offline RL", "Learning from data and experience", "Estimating a return")
    (recorded, offline, both, estimated), output = run_sections(OFFLINE, *titles, steps=1024)
    assert "Dataset(20,000 rows" in output and len(recorded["dataset"]) == 1024
    assert len(recorded["training"]) + len(recorded["validation"]) == 1024
    assert np.isfinite(offline["offline"].history["validation_loss"]).all()
    assert both["result"].config.data == "medium.npz" and len(both["result"].state.data.items) == 6
    assert len(msrl.data.load(tmp_path / "medium.npz")) == 20_000
    assert estimated["estimate"].value == pytest.approx(2, abs=0.1)  # a reward of 1 per step


@pytest.mark.long
def test_an_algorithm_of_ones_own_begins_to_learn_and_its_plan_is_the_printed_one(run_sections, tmp_path):
    (namespace,), _ = run_sections(OWN_ALGORITHM, "From scratch", steps=65_536)
    returns = namespace["result"].history["episode_return"]
    assert returns[0] < 40 and np.mean(returns[-len(returns) // 4 :]) > 80

    own = msrl.run.Experiment(algorithm=namespace["ActorCritic"]())
    explained = own.compile(msrl.policies.SingleLearnerCoarse()).explain()
    plan = str(explained)
    printed = [" ".join(line.split()) for line in plan.splitlines()]
    (excerpt,) = blocks(PERFORMANCE, "Reading the plan", "text")
    for line in excerpt.splitlines():
        start = " ".join(line.split()).removesuffix("...")
        assert any(p == start or (line.endswith("...") and p.startswith(start)) for p in printed), line
    drawn, now = (set(re.findall(r"data-[^>]*", svg)) for svg in ((ROOT / "docs/plan.svg").read_text(), explained.svg()))
    assert drawn == now

    arguments = ["--algo", "actor_critic:ActorCritic", "--learning-rate", "1e-3,1e-2", "--num-envs", "8", "--out", "run"]
    assert cli.main(["train", *arguments, "--total-steps", "512", "--eval-episodes", "1", "--progress", "none"]) == 0
    saved = msrl.Result.load(tmp_path / "run")
    assert saved.members == 2 and saved.config.num_envs == 8 and saved.history["step"][-1] == 512


@pytest.mark.long
def test_a_copy_of_ones_own(run_sections):
    (namespace,), _ = run_sections(OWN_ALGORITHM, TOP)
    result = namespace["result"]
    assert type(result.experiment.algorithm) is namespace["PPO"] and result.experiment.algorithm.clip_ratio == 0.1


@pytest.mark.long
def test_an_option_of_ones_own(run_sections):
    with mock.patch.dict(OPTIONS[QTarget]):
        (namespace,), _ = run_sections(OWN_ALGORITHM, "Your own option", steps=2048)
        assert msrl.algorithms.DQN(target="mixed:0.2") == namespace["result"].config
        assert str(namespace["result"].config.target) == "mixed:share=0.2"


@pytest.mark.long
def test_self_play(run_sections):
    (namespace,), output = run_sections(SEVERAL_AGENTS, "Self-play")
    assert namespace["table"].shape == (2, 6, 3)
    assert 0 < float(output.splitlines()[-1]) < 1


@pytest.mark.slow
def test_search(run_sections):
    _, output = run_sections(SEVERAL_AGENTS, "Two-player games", games=20)
    assert re.findall(r"^Match\((\d+) games", output, re.MULTILINE) == ["20", "20"]


@pytest.mark.slow
def test_ratings(run_sections):
    _, output = run_sections(SEVERAL_AGENTS, "Matches and ratings", games=2)
    assert re.search(r"^at random +0 +fixed", output, re.MULTILINE) and output.count("\nminimax") == 2


@pytest.mark.slow
def test_search_in_a_learned_model(run_sections):
    _, output = run_sections(SEVERAL_AGENTS, "MuZero", episodes=2)
    assert output.count("Evaluation(2 episodes") == 2


@pytest.mark.long
def test_a_plan_for_named_devices(run_sections):
    (namespace,), output = run_sections(PERFORMANCE, "Plan for hardware you do not have")
    assert namespace["program"].devices == (jax.devices()[0],) and "GPUOnly()" in output and "learn" in output


@pytest.mark.long
def test_an_environment_of_ones_own(run_sections):
    (corridor, dials), _ = run_sections(OWN_ENVIRONMENT, TOP, "Actions of several integers")
    result = corridor["result"]
    assert result.behavior.env.length == 10 and np.isfinite(result.history["episode_return"]).all()
    for run in (result, dials["result"]):
        report = envs.check(run.behavior.env, steps=20)
        assert report.ok, report
    assert dials["result"].act([2, 4]).shape == (2,) and dials["result"].probabilities([2, 4]).shape == (2, 5)


@pytest.mark.slow
def test_goals_in_hindsight(run_sections):
    (maze,), _ = run_sections(ALGORITHMS, "Hindsight experience replay", steps=2048)
    (bits,), _ = run_sections(OWN_ENVIRONMENT, "Goals to reach")
    for run in (maze["result"], bits["result"]):
        assert run.config.hindsight.share == 0.8
        assert run.evaluation.metrics["success"].shape == run.evaluation.returns.shape
    report = envs.check(bits["env"], steps=40)
    assert report.ok and not report.notes


@pytest.mark.long
def test_a_wrapper_of_ones_own_changes_the_reward_alone(run_sections):
    (namespace,), _ = run_sections(OWN_ENVIRONMENT, "Wrappers")
    inside = envs.make("Pendulum-v1")
    gentle = namespace["Gentle"](inside, price=0.5)
    key, action = jax.random.key(0), np.float32([-1.5])
    state, _ = gentle.reset(key)
    (a, b) = (env.step(key, state, action) for env in (inside, gentle))
    assert float(a[2] - b[2]) == pytest.approx(0.5 * 1.5, rel=1e-5)
    jax.tree.map(np.testing.assert_array_equal, (*a[:2], *a[3:]), (*b[:2], *b[3:]))
    env = namespace["result"].behavior.env
    assert env.observation_space.shape == (6,) and env.render(env.reset(key)[0]).ndim == 3, "that of the environment inside"


@pytest.mark.long
def test_training_from_a_trained_agent(run_sections):
    (namespace,), output = run_sections(OWN_ALGORITHM, "From a trained agent")
    agent = namespace["TunedPPO"]().build(envs.make("CartPole-v1"))
    params = agent.init(jax.random.key(0)).params
    jax.tree.map(np.testing.assert_array_equal, params, namespace["first"].state.params)
    assert "Evaluation(64 episodes" in output and namespace["result"].behavior.env.params.gravity == 15


@pytest.mark.slow
def test_metrics_of_an_environment(run_sections):
    (cliff,), _ = run_sections(OWN_ENVIRONMENT, "Metrics")
    assert envs.check(cliff["Cliff"]()).ok and (cliff["result"].history["episode_success"] <= 1).all()


@pytest.mark.slow
def test_parameters_as_data(run_sections):
    (poles, levels), _ = run_sections(ENVIRONMENTS, "Domain randomization", "Curricula")
    (springs,), _ = run_sections(OWN_ENVIRONMENT, "Parameters")
    for run in (poles["result"], poles["harder"], levels["result"]):
        lengths = run.history["env_params/length"]
        assert ((lengths > 0.25) & (lengths < 1)).all()
    assert springs["result"].description["env_params"] == {"stiffness": "log_uniform(0.1, 10)"}


@pytest.mark.long
def test_a_function_that_the_host_calls(run_sections):
    (namespace,), output = run_sections(POLICIES, "Functions that the host calls")
    step, position, rewards = 0.3, 0.0, []
    for _ in range(5):
        position += step
        rewards.append(1 - abs(position))
        step *= np.sign(rewards[-1])
    np.testing.assert_allclose(namespace["metrics"]["reward"], rewards, rtol=1e-5)
    assert "called by the host" in output and "measure" in output


@pytest.mark.slow
def test_simulators_on_the_host(run_sections):
    (namespace,), output = run_sections(ENVIRONMENTS, "Simulators on the host", steps=1024)
    assert namespace["result"].evaluation.lengths.max() <= 100 and output.startswith("Evaluation(4 episodes")


@pytest.mark.long
def test_an_environment_with_legal_actions(run_sections):
    (namespace,), _ = run_sections(OWN_ENVIRONMENT, "Legal actions")
    result, obs = namespace["result"], msrl.envs.MaskedObservation([1.0], [True, False, False])
    assert result.act(obs) == 0 and result.evaluation.finished.all()


@pytest.mark.long
def test_an_environment_whose_critic_sees_more(run_sections):
    (namespace,), _ = run_sections(OWN_ENVIRONMENT, "What the critic sees")
    params = namespace["result"].state.params["params"]
    first = [params[f"{part}_torso"]["Dense_0"]["kernel"].shape[0] for part in ("actor", "critic")]
    assert first == [1, 2] and namespace["result"].act([0.5]).shape == (1,)


@pytest.mark.long
def test_an_environment_with_several_agents(run_sections):
    (namespace, lamp), _ = run_sections(SEVERAL_AGENTS, TOP, "Agents with different spaces")
    assert np.isfinite(namespace["result"].history["episode_return"]).all()
    assert envs.vectorize(lamp["env"], 2).agents == ("speaker", "listener") and lamp["obs"].shape == (2, 4)
    assert lamp["env"].action_mask(lamp["state"]).tolist() == [[True] * 4, [True] * 3 + [False]]


@pytest.mark.long
def test_the_page_shows_where_a_nan_comes_from(run_sections):
    _, output = run_sections(GUARANTEES, "Non-finite values")
    assert "\n1 env_step [1].reward\n" in output
    assert output.count("returned a reward of nan: fragment 'env_step' (role 'env')") == 2


def write_config_files():
    """The file of the page, and an empty one."""
    Path("run").mkdir()
    Path("run/run.toml").touch()
    (file,) = blocks(RUNS, "A run as a file", "toml")
    Path("run.toml").write_text(file)


@pytest.mark.long
@pytest.mark.parametrize("line", [*IN_BLOCKS, *IN_TEXT])
def test_the_command_line_understands_the_examples(line, monkeypatch, run_sections):
    name, command, *arguments = shlex.split(line)
    assert name == "msrl-jax"
    write_config_files()
    if "--algo my_ppo.py" in line:
        msrl.algorithms.copy("ppo", "my_ppo.py")
    seen = {}
    for module, code in {"actor_critic": blocks(OWN_ALGORITHM, "From scratch", "python")[0], "my_module": OWN}.items():
        Path(f"{module}.py").write_text(code)
    monkeypatch.setattr(Command, "__call__", lambda self, given: seen.update(given=given) or Output())
    monkeypatch.setattr(launch, "use_cpu_devices", lambda count: seen.update(devices=count))
    assert cli.main([command, *arguments]) == 0
    known, given = COMMANDS[command].options(), seen["given"]
    config = {name: x for name, x in given.items() if name not in known}
    assert seen["devices"] == (8 if "--cpu-devices 8" in line else None)
    rates = {"3e-4": 3e-4, "1e-3,1e-2": (1e-3, 1e-2), "1e-4,3e-4,1e-3": (1e-4, 3e-4, 1e-3)}
    rate = arguments[arguments.index("--learning-rate") + 1] if "--learning-rate" in arguments else None
    assert config.get("learning_rate") == rates.get(rate)
    assert "--recipe" in arguments or all(f"--{field.replace('_', '-')}" in arguments for field in config)
    named = given.get("policy", ())
    names = [named] if isinstance(named, str) else named
    for policy in map(msrl.policies.get, (name for name in names if name != "auto")):
        assert policy.layout(jax.devices()[:8], {"env": 64}).devices


@pytest.mark.long
@pytest.mark.parametrize("line", IN_PAGES)
def test_the_command_line_understands_the_pages(line, monkeypatch, run_sections):
    for name in re.findall(r"--algo my_(\w+)\.py", line):
        msrl.algorithms.copy(name, f"my_{name}.py")
    write_config_files()
    _, command, *arguments = shlex.split(line.partition(" > ")[0])
    seen = []
    monkeypatch.setattr(Command, "__call__", lambda self, given: seen.append(given) or Output())
    monkeypatch.setattr(launch, "start", lambda argv, **options: None)
    assert cli.main([command, *arguments]) == 0 and len(seen) == ("--print-config" not in line)


@pytest.mark.slow
def test_settings_and_sweeps(run_sections):
    (settings, own, swept), _ = run_sections(POPULATIONS, "Members with different settings", "Sweeps", num=4)
    assert settings["result"].members == 12 and Path("rates.png").exists()
    assert tunable_fields(own["MyAlgorithm"]) == ("step_size",) and own["result"].members == 2
    assert len(swept["swept"].trials) == 4 and Path("sweep.png").exists() and swept["best"].has_members


@pytest.mark.slow
def test_tournaments(run_sections):
    (namespace,), _ = run_sections(POPULATIONS, "Tournaments", rounds=2)
    assert len(namespace["board"].rounds) == 2


@pytest.mark.slow
def test_population_based_training(run_sections):
    (namespace,), _ = run_sections(POPULATIONS, "Population based training", steps=4 * 4096, every=2)
    result = namespace["result"]
    assert result.members == 8 and result.history["pbt/learning_rate"].shape[1] == 8
    assert Path("lineage.png").exists()
