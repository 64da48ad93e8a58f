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
    checksum = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        checksum.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return checksum.hexdigest()[:16]


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
        origin_data = parse_json((path / _ORIGIN).read_text("utf-8"))
        saved_versions = dict(origin_data["versions"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{path / _ORIGIN} does not describe what trained the run ({error}); delete {path}") from None
    if changes := [
        f"{name} {saved_versions.get(name)}, not {version}"
        for name, version in versions(*saved_versions).items()
        if saved_versions.get(name) != version
    ]:
        raise RecordError(f"{path} was trained with {', '.join(changes)} as now; delete it, or choose another folder (--out)")
    return origin_data


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
    count, available = run.description["devices"]["count"], jax.devices() if devices is None else devices
    if len(available) < count:
        raise ValueError(
            f"the run had {count} devices, but here are {len(available)}; use --cpu-devices {count} for virtual ones"
        )
    check_trust(f"the run in {run.folder}", code_of({"policy": run.description["policy"]}), trust)
    return policies.get(run.description["policy"]), available[:count]
