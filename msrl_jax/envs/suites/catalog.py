"""Environment suites: their names, read from their files without importing them, and how to install them."""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Suite:
    """A package of environments: `PREFIX:NAME` names one of them, and `envs/suites/PREFIX_env.py` makes it."""

    prefix: str
    package: str  # on PyPI
    oldest: tuple[int, int]  # major and minor number of the oldest supported version
    extra: str  # the extra of this package that installs it
    title: str
    files: tuple[str, ...] = ()  # files that contain its names: patterns of paths relative to site-packages
    pattern: str = ""  # a regular expression with one group that finds the names in these files
    hidden: str = "(?!)"  # a regular expression of the names that cannot be made here
    needs: tuple[tuple[str, str], ...] = ()  # packages that it does not install, with regular expressions of the names for them
    code: tuple[str, ...] = ()  # parameters, at any depth, that name programs to run, pickles to load or files to write

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'msrl-jax[{self.extra}]'"

    def version(self) -> str | None:
        """Returns the installed version; None if there is none."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None

    def lacks(self, name: str) -> str | None:
        """Returns the package that an environment needs and that is not installed; None if none is missing."""
        return next((package for package in self.needed(name) if importlib.util.find_spec(package) is None), None)

    def needed(self, name: str) -> list[str]:
        """Returns the packages that an environment needs and that the suite does not install."""
        return [package for package, names in self.needs if re.fullmatch(names, name)]

    @functools.cached_property
    def own_names(self) -> tuple[str, ...]:
        """The suite's names of the environments that can be made here; none if it is not installed."""
        names = dict.fromkeys(_found(self.files, self.pattern))
        return tuple(name for name in names if not re.fullmatch(self.hidden, name) and not self.lacks(name))

    def names(self) -> list[str]:
        """Returns the names of its environments here; none if it is not installed."""
        return [f"{self.prefix}:{name}" for name in self.own_names]

    def check_installed(self) -> None:
        """Raises ImportError if it is not installed or too old; the message says how to install it."""
        oldest, version = ".".join(map(str, self.oldest)), self.version()
        fact = f"environments named {self.prefix}:... need {self.package} {oldest} or later"
        if version is None:
            raise ImportError(f"{fact}, which is not installed; install it with: {self.install}")
        if tuple(int(part) for part in version.split(".")[:2]) < self.oldest:
            raise ImportError(f"{fact}, and {version} is installed; install it with: {self.install}")


def _found(files: tuple[str, ...], pattern: str) -> list[str]:
    """Returns the matches of a pattern in files of packages, without importing them; none if they are not installed."""
    matches: list[str] = []
    for package, _, path in (file.partition("/") for file in files):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations if spec else None) or ():
            for file in sorted(Path(folder).glob(path)):
                matches += re.findall(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    return matches


_ID = r'^[^#\n]*\bid="([^"]+)"'
_IN_LIST = r'^    "(.+)",$'
_IN_TABLE = r"""^    ["'](\w+)["']: """
_MUJOCO = r"(Reacher|Pusher|Inverted\w*|HalfCheetah|Hopper|Swimmer|Walker2d|Ant|Humanoid\w*)-v\d"

SUITES: dict[str, Suite] = {
    suite.prefix: suite
    for suite in (
        Suite("brax", "brax", (0, 14), "brax", "Brax", ("brax/envs/__init__.py",), _IN_TABLE),
        Suite(
            "craftax",
            "craftax",
            (1, 5),
            "craftax",
            "Craftax",
            ("craftax/craftax_env.py",),
            r'"(Craftax-[\w-]+-v1)"',
            hidden=".*AutoReset.*",
        ),
        # ViZDoom runs the program `vzd_path`, or the one in the file `cfg_path`; its `game_args` may name files to write.
        Suite(
            "envpool",
            "envpool",
            (1, 2),
            "envpool",
            "EnvPool",
            code=("vzd_path", "cfg_path", "wad_path", "iwad_path", "base_path", "game_args", "lmp_save_dir"),
        ),
        # Versions that Gymnasium keeps only for an error message have no class path; Pusher-v4 needs an old MuJoCo.
        Suite(
            "gymnasium",
            "gymnasium",
            (1, 0),
            "gymnasium",
            "Gymnasium",
            ("gymnasium/envs/__init__.py",),
            r'id="([^"]+)",\s+entry_point="',
            hidden="Pusher-v4",
            needs=(("mujoco", _MUJOCO), ("Box2D", r"(LunarLander|BipedalWalker|CarRacing).*")),
        ),
        Suite(
            "jaxmarl",
            "jaxmarl",
            (0, 2),
            "marl",
            "JaxMARL",
            ("jaxmarl/registration.py",),
            _IN_LIST,
            hidden="LearnedPolicyEnemySMAX",  # which takes a policy and its parameters
            needs=(
                ("brax", r"ant_4x2|halfcheetah_6x1|hopper_3x1|humanoid_9\|8|walker2d_2x3"),
                ("jaxrobotarium", "JaxRobotarium.*"),
            ),
            code=("dir_path",),
        ),  # JaxNav's maps, which are pickled
        Suite("jumanji", "jumanji", (1, 1), "jumanji", "Jumanji", ("jumanji/__init__.py",), _ID),
        Suite("navix", "navix", (4, 0), "navix", "NAVIX", ("navix/environments/*.py",), r'"(Navix-[\w-]+-v\d+)"'),
        Suite(
            "pgx",
            "pgx",
            (2, 6),
            "marl",
            "Pgx",
            ("pgx/core.py",),
            _IN_LIST,
            hidden="2048|bridge_bidding|sparrow_mahjong|minatar-.*",
        ),  # not two-player games
        Suite(
            "playground",
            "playground",
            (0, 2),
            "playground",
            "MuJoCo Playground",
            tuple(f"mujoco_playground/_src/{k}/__init__.py" for k in ("dm_control_suite", "locomotion", "manipulation")),
            _IN_TABLE,
        ),
        Suite("xminigrid", "xminigrid", (0, 9), "xminigrid", "XLand-MiniGrid", ("xminigrid/__init__.py",), _ID),
    )
}
"""The suites by prefix."""


def gymnax_names() -> list[str]:
    """Returns the names of gymnax's environments, including those registered with it."""
    registration = sys.modules.get("gymnax.registration")
    return list(registration.registered_envs if registration else _found(("gymnax/registration.py",), _IN_LIST))


def suite_of(name: str) -> Suite | None:
    """Returns the suite that an environment name belongs to, if any."""
    prefix, colon, _ = name.partition(":")
    return SUITES.get(prefix) if colon else None


def packages_of(name: str) -> list[str]:
    """Returns the packages that simulate a suite's environment, e.g. `gymnasium:Hopper-v4:frame_skip=2`; none for other
    names.
    """
    suite = suite_of(name)
    return [] if suite is None else [suite.package, *suite.needed(name.split(":")[1])]


def names() -> list[str]:
    """Returns the names of gymnax's environments and of those of all installed suites."""
    return gymnax_names() + [name for suite in SUITES.values() for name in suite.names()]
