"""The order of the packages: imports point down only, those for types and those inside of functions included."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

from msrl_jax._rooms import added, rooms

PACKAGE = Path(__file__).parents[1] / "msrl_jax"
ROOMS = set(rooms())
"""Optional folders, which only `__init__.pyi` names."""
LAYERS = [
    {"__init__", "__main__"},
    ROOMS,
    {"cli"},
    {"search", "report"},
    {"run"},
    {"algorithms"},
    {"registry"},
    {"loops"},
    {"agents", "losses"},
    {"returns", "networks"},
    {"kernels"},
    {"data"},
    {"configs"},
    {"policies", "replay"},
    {"envs"},
    {"_files", "_rooms"},
    {"fragments"},
    {"_compat"},
]
"""From the top layer to the bottom; packages of one layer do not import each other."""

FILES = {".".join(p.relative_to(PACKAGE.parent).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py"))}
NAMES = sorted(FILES)


def imported(name):
    """The modules that a module imports, as dotted names: a name from a package is its module if there is one."""
    package, found = name.split(".")[:-1], set()
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{source}.{alias.name}" for alias in node.names}
    return found


def resolved(target):
    """The module of this package that a dotted name leads to; None if it leads elsewhere."""
    parts = target.split(".")
    while parts and parts[0] == "msrl_jax":
        for name in (".".join(parts), ".".join([*parts, "__init__"])):
            if name in FILES:
                return name
        parts.pop()
    return None


IMPORTS = {name: imported(name) for name in NAMES}


def layer(name):
    top = name.split(".")[1]
    (number,) = (i for i, members in enumerate(LAYERS) if top in members)
    return number


def test_every_module_has_a_floor():
    assert {name.split(".")[1] for name in NAMES} == set().union(*LAYERS)


def test_imports_point_down():
    for name in NAMES:
        modules = {module for target in IMPORTS[name] if (module := resolved(target))}
        up = {m for m in modules if layer(m) <= layer(name) and m.split(".")[1] != name.split(".")[1]}
        assert not up, f"{name} imports {sorted(up)} of its own layer or from above"


def test_the_core_names_neither_a_room_nor_what_rooms_add():
    """Not in texts either, such as messages; a room may be left out."""
    assert {"elastic", "games", "meta", "nonfinite", "offline_evaluation", "rnd", "tournament"} <= ROOMS
    words = {*(f"msrl_jax[./]{room}" for room in ROOMS), *added("algorithms"), *added("environments")}
    core = {name for name in NAMES if name.split(".")[1] not in {*ROOMS, "_rooms"}}  # whose docstring has an example
    found = {name: re.findall(rf"\b(?:{'|'.join(words)})\b", FILES[name].read_text()) for name in core}
    assert not {name: of for name, of in found.items() if of}


def test_train_alone_looks_up_how_a_room_executes_a_run():
    texts = {name: FILES[name].read_text() for name in NAMES}
    uses = {name: text.count("EXECUTIONS[") for name, text in texts.items() if "EXECUTIONS[" in text}
    assert uses == {"msrl_jax.run.training": 1} and "actors_at" in added("executions")
    named = [name for name, text in texts.items() if name.startswith("msrl_jax.run.") and "actors_at" in text]
    assert named == ["msrl_jax.run.training"]


def test_no_module_imports_itself_by_way_of_others():
    graph = {name: {m for target in IMPORTS[name] if (m := resolved(target)) and m != name} for name in NAMES}
    graphlib.TopologicalSorter(graph).prepare()


def test_the_floors_of_the_compiler_import_those_below():
    layers = [
        "support",
        "codecs",
        "counters",
        "metrics",
        "placement",
        "graph",
        "passes",
        "runtime",
        "plan",
        "program",
        "measure",
        "compiler",
        "progress",
        "__init__",
    ]
    inside = {name: name.split(".")[2] for name in NAMES if name.startswith("msrl_jax.fragments.")}
    modules = {(name, resolved(target)) for name in inside for target in IMPORTS[name]}
    assert not {(a, b) for a, b in modules if b in inside and layers.index(inside[a]) < layers.index(inside[b])}


def test_the_floors_of_a_run_import_those_below():
    below = ["outputs", "result", "outcome", "summary", "loop", "disk", "experiment", "evaluation", "processes", "streams"]
    inside = {name: name.split(".")[2] for name in NAMES if name.startswith("msrl_jax.run.")}
    folders = {name for name, module in inside.items() if FILES[name].parent.name != "run"}
    assert {inside[name] for name in folders} < set(below)
    for name in folders:
        used = {inside[module] for target in IMPORTS[name] if (module := resolved(target)) in inside}
        assert used <= set(below[below.index(inside[name]) :]), f"{name} imports {sorted(used)}"


def test_environments_know_of_the_engine_counters_means_and_how_the_host_is_called():
    used = {module for n in NAMES if n.startswith("msrl_jax.envs.") for t in IMPORTS[n] if (module := resolved(t))}
    engine = {module.removeprefix("msrl_jax.fragments.") for module in used if module.startswith("msrl_jax.fragments.")}
    assert {name for name in engine if not name.startswith("support.")} == {"counters", "metrics", "graph.host_calls"}


def test_fragments_and_policies_need_nothing_else_of_the_package():
    """They could be a distribution of their own."""
    own = {"fragments", "policies", "_compat"}
    names = [name for name in NAMES if name.split(".")[1] in own]
    assert len(names) > 40
    used = {(name, m) for name in names for target in IMPORTS[name] if (m := resolved(target))}
    assert not {(name, m) for name, m in used if m.split(".")[1] not in own}


def test_no_public_class_is_defined_in_two_modules():
    classes = [(n.name, name) for name in NAMES for n in ast.parse(FILES[name].read_text()).body if isinstance(n, ast.ClassDef)]
    modules = {each: [name for other, name in classes if other == each] for each, _ in classes if not each.startswith("_")}
    assert not {each: found for each, found in modules.items() if len(found) > 1}


def test_the_root_has_what_all_packages_share():
    root = {name.split(".")[1] for name in NAMES if name.count(".") == 1}
    assert root == {"__init__", "__main__", "_compat", "_files", "_rooms"}


def test_algorithms_know_no_distribution_policy():
    algorithms = [name for name in NAMES if name.startswith("msrl_jax.algorithms.")]
    assert len(algorithms) > 14
    assert not {n for n in algorithms for target in IMPORTS[n] if target.startswith("msrl_jax.policies")}


def test_what_objects_bring_is_not_named_by_algorithms_that_work_without_it():
    """A core, a custom module, an option and an adaptive learning rate come with the config; others register themselves.

    Files that are imported by a file's package, such as all options by that of algorithms, do not count.
    """
    networks = ("recurrent", "custom_core", "custom_network", "convolutions", "discrete_policies", "simba")
    brought = {f"networks.{name}" for name in networks}
    brought |= {"agents.adaptive_rate", "loops.core_windows", "loops.sequence_replay"}
    brought |= {f"losses.{option}" for option in ("atoms", "quantiles", "implicit_quantiles", "munchausen", "cross_q")}
    for algorithm in ("ppo", "dqn", "sac", "td3"):
        seen, todo = set(), [f"msrl_jax.algorithms.{algorithm}"]
        while todo:
            name = todo.pop()
            seen.add(name)
            todo += {m for target in IMPORTS[name] if (m := resolved(target))} - seen
        assert not {f"msrl_jax.{name}" for name in brought} & seen and len(seen) > 20
        assert not {name for name in seen if name.startswith("msrl_jax.registry.")}


def test_only_one_file_reaches_into_jax():
    def reaching(*inner):
        return {n for n in NAMES for t in IMPORTS[n] if any(f"{t}.".startswith(f"{module}.") for module in inner)}

    assert reaching("jax.extend", "jax.interpreters") == {"msrl_jax._compat"}
    assert reaching("jax._src") == set()


def test_a_folder_s_init_is_a_table_of_contents():
    for name in (name for name in NAMES if name.endswith(".__init__")):
        docstring, *rest = ast.parse(FILES[name].read_text()).body
        assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant), name
        for node in rest:
            is_alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Name | ast.Call)
            assert is_alias or isinstance(node, ast.Import | ast.ImportFrom), f"{name}: {ast.unparse(node)}"


@pytest.mark.parametrize("stub", sorted(PACKAGE.rglob("__init__.pyi")), ids=lambda stub: str(stub.parent.relative_to(PACKAGE)))
def test_no_name_of_a_package_is_that_of_a_module_in_it(stub):
    """The import of the module would take the place of the name."""
    package = ".".join(stub.parent.relative_to(PACKAGE.parent).parts)
    imports = re.findall(r"^from (\S+) import (\w+)", stub.read_text(), re.MULTILINE)
    assert not {name for module, name in imports if module != package} & {path.stem for path in stub.parent.iterdir()}
