"""How JAX starts: on virtual CPU devices, with XLA programs of earlier starts from disk; and compiling in other threads.

On disk is JAX's persistent compilation cache, in the user's cache folder; it is on unless JAX already has a cache. The
environment variable MSRL_JAX_CACHE is `off`, `on` or a folder. JAX never replaces an incomplete file. It can bound the folder's
size, but then every reading takes a lock, and a process that is killed while it writes ends all later writing. So incomplete
files and the least recently used ones are removed here, at the start of a process.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import shutil
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_THREAD = "msrl-jax in the background"

VARIABLE = "MSRL_JAX_CACHE"

MOST_CPU_DEVICES = 1024
"""Maximum number of virtual CPU devices that start within seconds; each has its own threads."""

MOST_BYTES = 2**30
"""Maximum size of all programs on disk, at the start of a process."""

MIN_SECONDS = 0.2
"""Programs that compile faster than this are not stored."""

_FREE_BYTES = 2**27
"""A disk with less free space counts as full."""

_CHECKED = ".checked"

_MACHINE_FOLDERS = f"jaxlib-*-{'[0-9a-f]' * 12}"
"""The folders that `machine` names."""


class CacheWarning(UserWarning):
    """Compiled programs cannot be stored on disk."""


def use_cpu_devices(count: int | None) -> None:
    """Makes JAX start with this many virtual CPU devices; None changes nothing."""
    if count is None:
        return
    if not 1 <= count <= MOST_CPU_DEVICES:
        raise ValueError(f"--cpu-devices {count}: use 1 to {MOST_CPU_DEVICES}")
    # With many devices on few cores, some may reach a collective late; this is not a deadlock.
    limits = {"warn_stuck": 300, "terminate": 1200}
    patience = [f"--xla_cpu_collective_call_{name}_timeout_seconds={seconds}" for name, seconds in limits.items()]
    os.environ["XLA_FLAGS"] = " ".join([*patience, os.environ.get("XLA_FLAGS", "")])
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def user_folder() -> Path:
    """Returns the folder for compiled programs among the user's caches; raises RuntimeError if the user has no home folder."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "msrl-jax" / "programs"
    cache = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(cache) if os.path.isabs(cache) else Path.home() / ".cache") / "msrl-jax" / "programs"


def machine() -> str:
    """Identifies jaxlib and this machine's CPU: programs for other CPU instructions would crash here."""
    facts = [platform.machine(), platform.processor()]
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        fields = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
        facts += [line for line in first.splitlines() if line.partition(":")[0].strip() in fields]
    return f"jaxlib-{importlib.metadata.version('jaxlib')}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Stores compiled programs on disk within the context, unless JAX already has a cache or the user wants none.

    If no folder is writable, warns once and continues without a cache.
    """
    import jax

    is_enabled: bool = jax.config.jax_enable_compilation_cache  # pyright: ignore[reportAttributeAccessIssue]
    user_cache: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    folder = _prepare_folder(os.environ.get(VARIABLE) or "on") if is_enabled and user_cache is None else None
    if folder is None:
        yield
        return
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update("jax_compilation_cache_dir", folder)
    if name.upper() not in os.environ:
        jax.config.update(name, MIN_SECONDS)
    try:
        yield
    finally:
        if jax.config.jax_compilation_cache_dir == folder:  # pyright: ignore[reportAttributeAccessIssue]
            jax.config.update("jax_compilation_cache_dir", None)
            jax.config.update(name, before)
            reset_cache()


@functools.cache
def _prepare_folder(choice: str) -> str | None:
    """Creates the folder of this machine, and removes damaged and excess files; None if there is to be no cache."""
    choice = choice.strip() or "on"
    if choice.lower() in ("off", "0", "no", "none", "false", "disabled"):
        return None
    try:
        if "://" in choice:
            raise OSError(f"{choice} is not a folder of this machine")
        folder = user_folder() if choice.lower() in ("on", "1", "yes", "true") else Path(choice).expanduser().absolute()
        machine_folder, is_new = folder / machine(), not folder.exists()
        machine_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(machine_folder, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write to {machine_folder}")
        if shutil.disk_usage(machine_folder).free < _FREE_BYTES:
            raise OSError(f"the disk of {machine_folder} is full")
        _remove_excess_files(folder, machine_folder)
    except (OSError, RuntimeError) as error:
        warnings.warn(
            f"compiled programs are not stored on disk, so each start compiles them again: {error}. Set {VARIABLE} to another "
            "folder, or to off to silence this warning",
            CacheWarning,
            stacklevel=2,
        )
        return None
    if is_new:
        print(f"compiled programs are stored in {folder} for the next start; {VARIABLE}=off disables this", file=sys.stderr)
    return str(machine_folder)


def _remove_excess_files(folder: Path, machine_folder: Path) -> None:
    """Removes incomplete programs of any machine, then the least recently used ones until the rest is small enough.

    A file in `machine_folder` has the time of the last check. Other files in the folder are the user's, and stay.
    """
    checked, checking = machine_folder / _CHECKED, machine_folder / f"{_CHECKED}-{os.getpid()}"
    since = checked.stat().st_mtime_ns if checked.exists() else 0
    checking.touch()
    files: list[tuple[int, os.stat_result, Path]] = []
    for path in folder.glob(f"{_MACHINE_FOLDERS}/*-cache"):
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            stat = path.stat()
            files += [(max(stat.st_atime_ns, stat.st_mtime_ns), stat, path)] if path.is_file() else []
    total = 0
    for _, stat, path in sorted(files, reverse=True):
        total += stat.st_size
        with contextlib.suppress(FileNotFoundError):
            if total > MOST_BYTES or (stat.st_mtime_ns >= since and not _is_whole(path.read_bytes())):
                path.unlink()
    checking.replace(checked)


def _is_whole(data: bytes) -> bool:
    if data[:4] == b"\x28\xb5\x2f\xfd":  # Zstandard, which may be installed; JAX reports files that it cannot read
        return True
    stream = zlib.decompressobj()
    with contextlib.suppress(zlib.error):
        stream.decompress(data)
    return stream.eof


def in_background(work: Callable[[], T]) -> Callable[[], T]:
    """Runs a function in a thread; returns a function that waits for its result, or raises its error.

    JAX settings that are contexts, such as `jax.enable_x64`, do not apply in the thread, so the function must not trace.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=run, name=_THREAD).start()
    except RuntimeError:  # Python is shutting down, and starts no more threads
        run()
    return future.result


def is_busy() -> bool:
    """Whether a background thread is working; Python waits for it before the process ends."""
    return any(thread.name == _THREAD for thread in threading.enumerate())
