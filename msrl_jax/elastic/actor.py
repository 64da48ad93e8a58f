"""The actor side: acts for the learner of a run, with its own environments, until the run is over."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from msrl_jax.elastic import tls, wire
from msrl_jax.elastic.parameter_messages import Packing, apply_changes
from msrl_jax.elastic.split_program import SplitProgram, split_program
from msrl_jax.elastic.wire import Channel, WireError
from msrl_jax.fragments.support import compiling
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk.folder import versions
from msrl_jax.run.experiment.experiment import Experiment
from msrl_jax.run.loop.hooks import parse_duration

_PATIENCE = 5.0  # seconds for a thread to end its current program after Ctrl-C
_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between attempts to reach the learner; the last one repeats


class _Sent(NamedTuple):
    """An unroll that the learner may not have received yet."""

    header: dict[str, Any]
    arrays: list[np.ndarray]


class _RunOver(Exception):
    """The run is over; the message is the error that ended it, if any."""


class _Actor:
    """An actor, with the state that it keeps while the learner is away."""

    def __init__(self, experiment: Experiment | None, trust: bool):
        self.experiment, self.trust, self.program = experiment, trust, None
        self.run: str | None = None
        self.about: Any = None  # the description that the program was built from
        self.ticket: int | None = None
        self.unrolls = 0
        self.waiting: _Sent | None = None
        self.channel: Channel | None = None
        self.is_leaving = False

    def leave(self) -> None:
        """Ends the work of this actor after its current program; called by another thread."""
        self.is_leaving = True
        if self.channel is not None:
            self.channel.cut()

    def act_for(self, channel: Channel, packing: Packing, program: SplitProgram) -> None:
        """Acts until the connection is lost, or the run is over."""
        packed_arrays: list[np.ndarray] = []
        unpacked_types, is_sent = packing.not_packed(packing.packed_kinds), False
        while True:
            header, payload = _receive(channel, wire.size_of(packing.packed_kinds))
            if is_sent:
                self.waiting = None
            if (num_changed := header["changed"]) is None:
                packed_arrays = wire.arrays_of(payload, packing.packed_kinds)
            else:
                words = [jax.ShapeDtypeStruct((num_changed,), np.int32), jax.ShapeDtypeStruct((num_changed,), np.uint16)]
                packed_arrays = apply_changes(packing, packed_arrays, wire.arrays_of(payload, [*words, *unpacked_types]))
            if self.waiting is None:
                published = jax.device_put(packing.unpack(packed_arrays), program.sharding)
                self.leaves, sent_arrays = program.act(self.leaves, published)
                token = {"run": self.run, "life": header["life"], "version": header["version"], "unroll": self.unrolls}
                self.waiting, self.unrolls = _Sent(token, jax.device_get(sent_arrays)), self.unrolls + 1
            _check_over(channel)
            channel.send(*self.waiting)
            is_sent = True

    def enter(self, channel: Channel) -> tuple[Packing, SplitProgram]:
        """Waits until the learner admits the actor; returns what it needs to act."""
        channel.send({"versions": versions(), "ticket": self.ticket, "run": self.run})
        about = _receive(channel)[0]
        self.run = about["run"]
        try:
            if self.program is None or about["experiment"] != self.about:  # a different run
                experiment = self.experiment or Experiment.from_json(about["experiment"], where="the learner", trust=self.trust)
                self.program = split_program(experiment)
                self.about = about["experiment"]
            _ = self.program.act
            packing = Packing.from_codec(about["codec"], self.program.halves.published_kinds)
        except (ValueError, TypeError, ImportError) as error:
            channel.send({"cannot": str(error)})
            raise
        _check_over(channel)
        channel.send({"fingerprint": self.program.halves.fingerprint})
        ticket = _receive(channel)[0]["ticket"]
        if self.ticket is None:
            self.ticket, self.leaves = ticket, self.program.initial_leaves(ticket)
        return packing, self.program


def _receive(channel: Channel, payload: int = 0) -> tuple[dict[str, Any], memoryview]:
    header, arrays = channel.receive(payload)
    if "refused" in header:
        raise ValueError(f"the learner refused this actor: {header['refused']}")
    if "over" in header:
        raise _RunOver(header.get("error", ""))
    return header, arrays


def _check_over(channel: Channel) -> None:
    """Reads a message that arrived meanwhile; it can only say that the run is over."""
    if channel.has_message():
        _receive(channel)


@entry
def act(
    *addresses: str,
    experiment: Experiment | None = None,
    wait: float | str = "10m",
    trust: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> int:
    """Acts for the learner of a run that was started with `actors_at`, until the run is over; or for several in parallel.

    The learner sends the description of the run. The actor has its own environments, whose keys depend on the seed of the run
    and on the ticket that the learner assigns. If the learner is away, the actor waits and then continues where it was.

    Args:
      *addresses: the learner's address, `HOST:PORT`, or the path of a file that contains it, such as `/shared/learner`; the
        file may be created later and is read again whenever the learner is away. With several addresses, the actor acts for
        several learners, each with its own run and policy.
      experiment: the experiment; needed if the learner's environment or a part of its config is an object.
      wait: how long to wait for the learner each time, in seconds or as text such as `"10m"`.
      trust: whether to run code that a learner names: modules (`my_module:MyEnv`) and algorithm files.
      say: called with progress messages.

    Returns:
      The number of unrolls that the actor made.

    Raises:
      ValueError: if a learner refuses the actor, with the reason.
      TrustError: a ValueError, if a learner names code to run, and `trust` is False.
      RuntimeError: if a run ended with an error.
      ConnectionError: if a learner does not come back in time. With several learners, the other runs are completed first.
    """
    limit = parse_duration("wait", wait)
    if not addresses:
        raise ValueError("an actor needs the address of its learner; use HOST:PORT, such as 127.0.0.1:7000")
    for address in addresses:
        if not _is_file(address):
            wire.address_of(address, "address")
    if not all(map(_is_file, addresses)):
        tls.contexts()  # a learner that writes its address to a file creates the key first
    outcomes: list[int | Exception] = []
    actors = [_Actor(experiment, trust) for _ in addresses]

    def act_at(address: str, actor: _Actor) -> None:
        try:
            outcomes.append(_act_for_learner(address, actor, limit, say))
        except Exception as error:
            outcomes.append(error)
            if len(addresses) > 1:  # the others may run for days
                say(f"acting for {address} ended with an error: {error}")

    with compiling.on_disk():
        threads = [
            threading.Thread(target=act_at, args=address_and_actor, daemon=True)
            for address_and_actor in zip(addresses, actors, strict=True)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:  # after Ctrl-C, no thread continues; a thread that computes while Python ends would abort the process
            for actor in actors:
                actor.leave()
            for thread in threads:
                thread.join(_PATIENCE)
    if errors := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
        raise errors[0]
    return sum(outcome for outcome in outcomes if isinstance(outcome, int))


def _is_file(address: str) -> bool:
    return isinstance(address, str) and "/" in address


def _resolve_address(address: str) -> tuple[str, int]:
    """Returns the learner's address; raises WireError if the file with it does not exist yet or is incomplete."""
    if not _is_file(address):
        return wire.address_of(address, "address")
    try:
        return wire.address_of(Path(address).read_text().strip(), address)
    except (OSError, ValueError) as error:
        raise WireError(str(error)) from error


def _act_for_learner(address: str, actor: _Actor, limit: float, say: Callable[[str], object]) -> int:
    wait_start, attempts = time.monotonic(), 0
    while not actor.is_leaving:
        try:
            host, port = _resolve_address(address)
            if not tls.key_file().exists():
                raise WireError(f"the learner has not made the key {tls.key_file()} yet")
            with contextlib.closing(wire.connect((host, port), tls.contexts()[1])) as channel:
                actor.channel = channel
                if actor.is_leaving:
                    break
                say(f"found the learner at {host}:{port}; waiting until it is ready")
                attempts = 0
                acts_with = actor.enter(channel)
                say(f"acting for {host}:{port}")
                actor.act_for(channel, *acts_with)
        except _RunOver as over:
            if str(over):
                raise RuntimeError(f"the run at {address} ended with an error: {over}") from None
            say(f"the run at {address} is over, after {actor.unrolls} unrolls of this actor")
            return actor.unrolls
        except WireError as error:
            if not attempts and not actor.is_leaving:
                say(f"no learner answers at {address} yet; waiting for one")
                wait_start = time.monotonic()
            pause = _PAUSES[min(attempts, len(_PAUSES) - 1)]
            if time.monotonic() + pause - wait_start > limit:
                text = f"no learner answers at {address}: {error}; start one with --actors-at, or correct the address"
                raise ConnectionError(text) from error
            attempts += 1
            time.sleep(pause)
    return actor.unrolls
