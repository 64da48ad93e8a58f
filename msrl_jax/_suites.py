"""Suites of environments: their names, read from their code without importing them, and how to install them."""

import ast
import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path

from msrl_jax import _jaxmarl, _pgx


@dataclasses.dataclass(frozen=True)
class Suite:
    """A collection of environments that is published as a package; `PREFIX:NAME` names one of them.

    Attributes:
      prefix: what stands before the colon.
      package: the package on PyPI.
      oldest: the first two numbers of the oldest version that will do.
      extra: the extra of this package that installs it.
      adapter: the module of `msrl_jax.envs` with the function `make(name, **params)`.
      read: its own names of its environments, from its code; none if it is not installed.
      title: the suite's name in text.
    """

    prefix: str
    package: str
    oldest: tuple[int, int]
    extra: str
    adapter: str
    read: Callable[[], tuple[str, ...]]
    title: str

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'msrl-jax[{self.extra}]'"

    def version(self) -> str | None:
        """The version that is installed; None if there is none."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def names(self) -> list[str]:
        """The names of its environments here; none if it is not installed."""
        return [f"{self.prefix}:{name}" for name in self.read()]

    def check_installed(self) -> None:
        """Raises ImportError if it is not installed, or too old; the message says how to install it."""
        oldest, version = ".".join(map(str, self.oldest)), self.version()
        needed = f"environments named {self.prefix}:... need {self.package} {oldest} or later"
        if version is None:
            raise ImportError(f"{needed}, which is not installed; install it with: {self.install}")
        if tuple(int(part) for part in version.split(".")[:2]) < self.oldest:
            raise ImportError(f"{needed}, and {version} is installed; install it with: {self.install}")


def _code(module: str) -> list[ast.stmt]:
    """The code of a module, which is not imported; nothing if it is not there."""
    package, *parts = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return []
    path = Path(spec.submodule_search_locations[0], *parts)
    file = next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)
    return ast.parse(file.read_text(encoding="utf-8")).body if file else []


def _keys(*modules: str) -> tuple[str, ...]:
    """The keys of the tables `_envs` of modules."""
    tables = [
        node.value
        for module in modules for node in _code(module)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_envs" and isinstance(node.value, ast.Dict)
    ]  # fmt: skip
    return tuple(str(key.value) for table in tables for key in table.keys if isinstance(key, ast.Constant))


def _registered(module: str) -> tuple[str, ...]:
    """The names in the calls `register(id=NAME, ...)` of a module."""
    calls = [node.value for node in _code(module) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    ids = [k.value for call in calls if ast.unparse(call.func) == "register" for k in call.keywords if k.arg == "id"]
    return tuple(str(name.value) for name in ids if isinstance(name, ast.Constant))


@functools.cache
def _brax() -> tuple[str, ...]:
    return _keys("brax.envs")


@functools.cache
def _playground() -> tuple[str, ...]:
    return _keys(*(f"mujoco_playground._src.{part}" for part in ("dm_control_suite", "locomotion", "manipulation")))


@functools.cache
def _craftax() -> tuple[str, ...]:
    words = [node.value for tree in _code("craftax.craftax_env") for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    names = [word for word in words if isinstance(word, str) and word.endswith("-v1") and "AutoReset" not in word]
    return tuple(dict.fromkeys(names))


@functools.cache
def _gymnasium() -> tuple[str, ...]:
    return _registered("gymnasium.envs")


@functools.cache
def _xminigrid() -> tuple[str, ...]:
    return _registered("xminigrid")


@functools.cache
def _navix() -> tuple[str, ...]:
    spec = importlib.util.find_spec("navix")
    folders = spec.submodule_search_locations if spec else None
    files = sorted(Path(folders[0], "environments").glob("*.py")) if folders else []
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    words = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return tuple(sorted({word for word in words if re.fullmatch(r"Navix-[\w-]+-v\d+", word)}))


@functools.cache
def _jumanji() -> tuple[str, ...]:
    return _registered("jumanji")


SUITES: dict[str, Suite] = {
    suite.prefix: suite
    for suite in (
        Suite("brax", "brax", (0, 14), "brax", "suites.brax_env", _brax, "Brax"),
        Suite("craftax", "craftax", (1, 5), "craftax", "suites.craftax_env", _craftax, "Craftax"),
        Suite("envpool", "envpool", (1, 2), "envpool", "suites.envpool_env", tuple, "EnvPool"),  # names need its import
        Suite("gymnasium", "gymnasium", (1, 0), "gymnasium", "suites.gymnasium_env", _gymnasium, "Gymnasium"),
        Suite("jaxmarl", "jaxmarl", (0, 2), "marl", "agents.jaxmarl_env", _jaxmarl.available, "JaxMARL"),
        Suite("jumanji", "jumanji", (1, 1), "jumanji", "suites.jumanji_env", _jumanji, "Jumanji"),
        Suite("navix", "navix", (4, 0), "navix", "suites.navix_env", _navix, "NAVIX"),
        Suite("pgx", "pgx", (2, 6), "marl", "agents.pgx_env", _pgx.games, "Pgx"),
        Suite("playground", "playground", (0, 2), "playground", "suites.playground_env", _playground, "MuJoCo Playground"),
        Suite("xminigrid", "xminigrid", (0, 9), "xminigrid", "suites.xminigrid_env", _xminigrid, "XLand-MiniGrid"),
    )
}  # fmt: skip
"""The suites by prefix."""


def suite_of(name: str) -> Suite | None:
    """The suite that a name of an environment belongs to; None if to none."""
    prefix, colon, _ = name.partition(":")
    return SUITES.get(prefix) if colon else None


def names() -> list[str]:
    """The names of the environments of all suites that are installed."""
    return [name for suite in SUITES.values() for name in suite.names()]
