"""Checkpoints: the whole state of a run on disk, written in the background during training.

    checkpoints/000000001200/            after 1,200 iterations: an Orbax checkpoint; entries are named by pytree path
    checkpoints/000000001200/run.json    the host's part of the state, and the SHA-256 of every other file

`run.json` is written last, to a temporary file that is then renamed. A folder without it is incomplete; a file that does not
match its checksum is damaged. A typed PRNG key is stored as its key data. Shardings are not stored: a checkpoint can be
loaded onto any devices.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from msrl_jax._files import parse_json
from msrl_jax.envs.base import PyTree
from msrl_jax.fragments.runtime.crossing import key_impl
from msrl_jax.fragments.support.random_keys import is_key
from msrl_jax.run.disk.folder import CHECKPOINTS, SUMMARY, write_json
from msrl_jax.run.experiment.plain_data import RunFolderError, to_json

SEAL = "run.json"
_DIGITS = 12
_OURS = re.compile(rf"\d{{{_DIGITS}}}(\.orbax-checkpoint-tmp.*)?")


class CheckpointError(RunFolderError):
    """A checkpoint is missing, incomplete or damaged, or belongs to another run."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path  # its folder
    iteration: int  # training iterations done
    progress: Mapping[str, Any]  # the host's part of the state, as plain data; empty if the seal is invalid
    score: float | None  # the run's score at that time, if it has one; higher is better
    is_readable: bool = True  # whether the seal is valid


def _this_process_only() -> Any:
    """Returns options with which Orbax reads and writes in this process without waiting for others."""
    import orbax.checkpoint as ocp

    if jax.process_count() == 1:
        return ocp.options.MultiprocessingOptions()
    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process{me}")


def _named_leaves(state: PyTree, registers: Sequence[Any]) -> list[tuple[str, Any]]:
    leaves = [(f"state{jax.tree_util.keystr(keypath)}", leaf) for keypath, leaf in jax.tree.leaves_with_path(state)]
    return leaves + [(f"register {i}", leaf) for i, leaf in enumerate(registers)]


class CheckpointWriter:
    """Writes the checkpoints of one run, and keeps the newest ones and the best one."""

    def __init__(self, path: Path, keep: int):
        """Removes incomplete checkpoints of a killed run; no other process may write to the folder."""
        self._folder, self._keep = path / CHECKPOINTS, keep
        _silence_storage_errors()
        self._worker = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._worker.submit(importlib.import_module, "orbax.checkpoint")  # a slow import, done while programs compile
        self._pending: concurrent.futures.Future[None] | None = None
        self._remove_incomplete()

    def _remove_incomplete(self) -> None:
        """Removes what a killed process or a failed write has left; call it only while nothing is being written."""
        for folder in self._folder.glob("*") if self._folder.is_dir() else ():
            if _OURS.fullmatch(folder.name) and not (folder / SEAL).exists():
                shutil.rmtree(folder, ignore_errors=True)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None and not self._pending.done()

    def save(
        self, iteration: int, state: PyTree, registers: Sequence[jax.Array], progress: Mapping[str, Any], score: float | None
    ) -> None:
        """Starts to write a checkpoint; waits for the previous one."""
        import orbax.checkpoint as ocp

        self.wait()
        path = self._folder / f"{iteration:0{_DIGITS}}"
        if (path / SEAL).exists():
            return
        self._remove_incomplete()
        named_leaves = [
            (name, jax.random.key_data(leaf) if is_key(leaf) else leaf)
            for name, leaf in _named_leaves(state, registers)
            if np.size(leaf)
        ]
        # If there are several processes, only this one writes: its arrays are on the host.
        entries = dict(named_leaves) if jax.process_count() == 1 else {name: np.asarray(data) for name, data in named_leaves}
        try:
            with _as_os_error(path):
                self._folder.mkdir(exist_ok=True)  # but not its parents: if the folder of a run was moved, do not split the run
                # Use one per checkpoint, because it would raise some of its errors only at later checkpoints.
                checkpointer = ocp.AsyncCheckpointer(
                    ocp.StandardCheckpointHandler(), multiprocessing_options=_this_process_only()
                )
                checkpointer.save(path.absolute(), args=ocp.args.StandardSave(entries))
        except OSError:
            self._remove_incomplete()
            raise
        seal = {"iteration": iteration, "score": score, "progress": dict(progress)}
        self._pending = self._worker.submit(self._finish, checkpointer, path, seal)

    def _finish(self, checkpointer: Any, path: Path, seal: dict[str, Any]) -> None:
        try:
            with _as_os_error(path):
                checkpointer.close()
                checkpointer.check_for_errors()
                seal = to_json(seal | {"files": _file_checksums(path)})
                write_json(path / SEAL, seal | {"sum": _seal_checksum(seal)}, indent=None)
        except BaseException:
            self._remove_incomplete()
            raise
        self._prune()

    def set_aside(self, iteration: int) -> None:
        """Renames checkpoints that are newer than the one from which the run resumes: damaged or non-finite ones."""
        for checkpoint in complete_checkpoints(self._folder.parent):
            if checkpoint.iteration > iteration:
                other = checkpoint.path.with_name(f"{checkpoint.path.name}.damaged")
                shutil.rmtree(other, ignore_errors=True)
                checkpoint.path.rename(other)

    def _prune(self) -> None:
        checkpoints = [c for c in complete_checkpoints(self._folder.parent) if c.is_readable]
        best_checkpoint = best(checkpoints)
        for checkpoint in checkpoints[self._keep :]:
            if checkpoint != best_checkpoint:
                (checkpoint.path / SEAL).unlink(missing_ok=True)  # from now on, the checkpoint is incomplete
                shutil.rmtree(checkpoint.path, ignore_errors=True)

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Stops the background work, after a checkpoint that is being written is complete."""
        self._worker.shutdown()


def _seal_checksum(seal: Mapping[str, Any]) -> str:
    content = {name: value for name, value in seal.items() if name != "sum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_checksums(path: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file of a checkpoint except the seal."""
    sums = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != SEAL and not p.name.startswith(f".{SEAL}.")):
        with file.open("rb") as stream:
            sums[file.relative_to(path).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return sums


@contextlib.contextmanager
def _as_os_error(path: Path) -> Iterator[None]:
    """Converts errors of the storage library to an OSError that names the checkpoint."""
    try:
        yield
    except Exception as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))  # the system's error; the rest is pages of paths
        reason = os.strerror(int(code[1])) if code else " ".join(str(error).split())[:300] or type(error).__name__
        raise OSError(f"the checkpoint {path} cannot be written: {reason}") from error


def _is_informative(record: logging.LogRecord) -> bool:
    """Returns whether a log record says more than the errors that the storage library raises."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname + record.getMessage()


@functools.cache
def _silence_storage_errors() -> None:
    """Stops the storage library from also printing, in hundreds of lines, the errors that it raises."""
    hook = sys.unraisablehook

    def unraisable(error: Any) -> None:  # writes that end after a failed write have no waiter
        if error.exc_type is not RuntimeError or str(error.exc_value) != "Event loop is closed":
            hook(error)

    sys.unraisablehook = unraisable
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_informative)


def complete_checkpoints(path: Path) -> list[Checkpoint]:
    """Finds the complete checkpoints of a run."""
    checkpoints = []
    for folder in sorted((path / CHECKPOINTS).glob("[0-9]" * _DIGITS), reverse=True):
        if not (folder / SEAL).exists():
            continue
        try:
            seal = _read_seal(folder)
            checkpoints.append(Checkpoint(folder, seal["iteration"], seal["progress"], seal["score"]))
        except CheckpointError:
            checkpoints.append(Checkpoint(folder, int(folder.name), {}, None, is_readable=False))
    return checkpoints


def best(checkpoints: Sequence[Checkpoint]) -> Checkpoint | None:
    """Returns the checkpoint with the highest score, the newest if several have it; None if none has a score."""
    return max((c for c in checkpoints if c.score is not None), key=lambda c: (c.score, c.iteration), default=None)


def _read_seal(path: Path) -> dict[str, Any]:
    """Reads a checkpoint's seal; raises CheckpointError if it is damaged."""
    try:
        seal = parse_json((path / SEAL).read_text())
        sound = seal["sum"] == _seal_checksum(seal) and seal["iteration"] == int(path.name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        fact = f"{SEAL} cannot be read ({type(error).__name__}: {error})"
        raise CheckpointError(f"the checkpoint {path} is damaged: {fact}") from error
    if not sound:
        raise CheckpointError(f"the checkpoint {path} is damaged: {SEAL} is not what was written")
    return seal


def verify(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if a file of a checkpoint is missing or was changed after it was written."""
    expected_sums = _read_seal(checkpoint.path)["files"]
    try:
        actual_sums = _file_checksums(checkpoint.path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {checkpoint.path} is damaged: it cannot be read ({error})") from error
    damaged_files = sorted(name for name in expected_sums if actual_sums.get(name) != expected_sums[name])
    if damaged_files:
        problem = "is missing" if damaged_files[0] not in actual_sums else "is not what was written"
        raise CheckpointError(f"the checkpoint {checkpoint.path} is damaged: {damaged_files[0]} {problem}")


def newest(path: Path, note: Callable[[str], None]) -> Checkpoint | None:
    """Finds the newest intact checkpoint, if there is one; calls `note` with a sentence about each damaged one it skips."""
    problems = []
    for checkpoint in complete_checkpoints(path):
        try:
            verify(checkpoint)
        except CheckpointError as error:
            if (checkpoint.path / SEAL).exists():  # otherwise the process that writes it has just deleted it
                problems.append(str(error))
            continue
        for problem in [*_describe_unsealed(path, checkpoint.iteration), *problems]:
            note(f"{problem}; the checkpoint after iteration {checkpoint.iteration:,} is used instead")
        return checkpoint
    if problems := problems or _describe_unsealed(path, -1):
        raise CheckpointError(f"{path} has no checkpoint that is whole: {problems[0]}")
    return None


def _describe_unsealed(path: Path, iteration: int) -> list[str]:
    """Describes unsealed checkpoints after an iteration, if the run has ended; if it has not, one is still being written."""
    folders = sorted((path / CHECKPOINTS).glob("[0-9]" * _DIGITS), reverse=True) if (path / SUMMARY).exists() else []
    lost = [folder for folder in folders if int(folder.name) > iteration and not (folder / SEAL).exists()]
    return [f"the checkpoint {folder} is damaged: {SEAL} is missing" for folder in lost]


def load_checkpoint(
    checkpoint: Checkpoint,
    types: PyTree,
    registers: Sequence[jax.ShapeDtypeStruct] = (),
    shardings: Sequence[jax.sharding.Sharding] | None = None,
) -> tuple[PyTree, tuple[jax.Array, ...]]:
    """Loads a checkpoint onto any devices: its state and registers.

    `types` and `registers` have the saved shapes and dtypes; `shardings` has one entry for each leaf of both; None uses one
    device for all. CheckpointError names the first difference from what was saved.
    """
    import orbax.checkpoint as ocp

    named_leaves = _named_leaves(types, registers)
    places = [jax.sharding.SingleDeviceSharding(jax.local_devices()[0])] * len(named_leaves) if shardings is None else shardings
    expected = {}
    for (name, leaf), place in zip(named_leaves, places, strict=True):
        data = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
        if np.size(data):
            if is_key(leaf) and isinstance(place, NamedSharding):  # key data have one more dimension than keys
                place = NamedSharding(place.mesh, PartitionSpec(*place.spec[: len(data.shape) - 1]))
            expected[name] = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=place)
    try:
        with ocp.StandardCheckpointer(multiprocessing_options=_this_process_only()) as checkpointer:
            stored: Any = checkpointer.metadata(checkpoint.path.absolute()).item_metadata.tree
            _check_entries(checkpoint.path, stored, expected)
            entries = checkpointer.restore(checkpoint.path.absolute(), expected)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint {checkpoint.path} cannot be read: {error}") from error

    def restored(name: str, leaf: jax.ShapeDtypeStruct, place: jax.sharding.Sharding) -> jax.Array:
        data = entries.get(name)
        if data is None:
            return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), place)
        return jax.random.wrap_key_data(data, impl=key_impl(leaf)) if is_key(leaf) else data

    leaves = [restored(name, leaf, place) for (name, leaf), place in zip(named_leaves, places, strict=True)]
    tree = jax.tree.structure(types)
    return jax.tree.unflatten(tree, leaves[: tree.num_leaves]), tuple(leaves[tree.num_leaves :])


def _check_entries(path: Path, stored: Mapping[str, Any], expected: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    for name in sorted(stored.keys() | expected.keys()):
        if name not in stored or name not in expected:
            place = "only in the checkpoint" if name in stored else "not in the checkpoint"
            raise CheckpointError(
                f"the checkpoint {path} does not fit: {name} is {place}; was it written by another version, or from another "
                "environment or config?"
            )
        found_type, expected_type = stored[name], expected[name]
        words = {tuple(found_type.shape[-1:]), expected_type.shape[-1:]}  # of a key, by its implementation
        if (
            words == {(2,), (4,)}
            and tuple(found_type.shape[:-1]) == expected_type.shape[:-1]
            and found_type.dtype == expected_type.dtype == np.uint32
        ):
            raise CheckpointError(
                f"the checkpoint {path} has random keys of another implementation ({name}); call "
                'jax.config.update("jax_default_prng_impl", ...) with the prng_impl under "devices" in its config.json'
            )
        if tuple(found_type.shape) != expected_type.shape or found_type.dtype != expected_type.dtype:
            raise CheckpointError(
                f"the checkpoint {path} does not fit: {name} is {found_type.dtype}{list(found_type.shape)} there and "
                f"{expected_type.dtype}{list(expected_type.shape)} here; was it written from another environment or config?"
            )
