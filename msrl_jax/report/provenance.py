"""The provenance of measured numbers: the code of this package, versions, the processor, and the devices of a run."""

import datetime
import hashlib
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from msrl_jax import policies
from msrl_jax._files import parse_json
from msrl_jax.envs.suites.catalog import packages_of
from msrl_jax.envs.workers import processors
from msrl_jax.fragments.placement import Device, DistributionPolicy
from msrl_jax.fragments.support.naming import check_trust
from msrl_jax.run import Result
from msrl_jax.run.disk.folder import versions, write_json
from msrl_jax.run.experiment.trust import code_of
from msrl_jax.run.recipes import RecordError

PACKAGE = Path(__file__).parents[1]
_ORIGIN = "origin.json"  # in the folder of a run


def commit() -> str:
    """Returns the git commit of this package, with `+` if it has changes; empty if no git repository tracks it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(PACKAGE), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed package may be inside another repository
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "*.py", "*.toml"))
    except (OSError, subprocess.SubprocessError):
        return ""


def source_checksum() -> str:
    """Returns a checksum of the code of this package."""
    found = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        found.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]


def origin(env: str) -> dict[str, Any]:
    """Returns the provenance of a run that trains in an environment now, as plain data."""
    return {
        "versions": versions(*packages_of(env)),
        "commit": commit(),
        "sources": source_checksum(),
        "processor": processor(),
        "cores": processors(),
        "date": datetime.date.today().isoformat(),
    }


def write_origin(path: Path, env: str) -> None:
    """Writes the provenance of a run to its folder, unless the file exists."""
    if not (path / _ORIGIN).exists():
        write_json(path / _ORIGIN, origin(env))


def origin_of(path: Path) -> dict[str, Any]:
    """Returns the provenance of a run; raises RecordError if it is unknown or has other versions than the current ones."""
    try:
        found = parse_json((path / _ORIGIN).read_text("utf-8"))
        was = dict(found["versions"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{path / _ORIGIN} does not describe what trained the run ({error}); delete {path}") from None
    if changed := [f"{name} {was.get(name)}, not {now}" for name, now in versions(*was).items() if was.get(name) != now]:
        raise RecordError(f"{path} was trained with {', '.join(changed)} as now; delete it, or choose another folder (--out)")
    return found


def processor() -> str:
    """Returns the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())


def place_of(
    run: Result, devices: Sequence[Device] | None = None, *, trust: bool = False
) -> tuple[DistributionPolicy, Sequence[Device]]:
    """Returns the policy of a run, and the same number of devices as it had, from `devices` or from all.

    Raises:
      ValueError: if there are fewer devices.
    """
    count, here = run.description["devices"]["count"], jax.devices() if devices is None else devices
    if len(here) < count:
        raise ValueError(f"the run had {count} devices, but here are {len(here)}; use --cpu-devices {count} for virtual ones")
    check_trust(f"the run in {run.folder}", code_of({"policy": run.description["policy"]}), trust)
    return policies.get(run.description["policy"]), here[:count]
