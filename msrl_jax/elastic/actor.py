"""The side of an actor: it acts for the learner of a run, with environments of its own, until the run is over."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from msrl_jax.elastic import tls, wire
from msrl_jax.elastic.packing import Packing, apply_changes
from msrl_jax.elastic.split_program import SplitProgram, split_program
from msrl_jax.elastic.wire import Channel, WireError
from msrl_jax.fragments.support import compiling
from msrl_jax.fragments.support.tracebacks import entry
from msrl_jax.run.disk.folder import versions
from msrl_jax.run.experiment.spec import Experiment
from msrl_jax.run.loop.hooks import seconds

_PAUSES = (0.1, 0.2, 0.5, 1.0, 2.0)  # seconds between attempts to reach the learner; the last one again and again


class _Sent(NamedTuple):
    """An unroll that the learner may not have yet."""

    header: dict[str, Any]
    arrays: list[np.ndarray]


class _Over(Exception):
    """The run is over; its text is the error that ended it, if one did."""


class _Actor:
    """An actor, with what it keeps while its learner is away."""

    def __init__(self, experiment: Experiment | None, trust: bool):
        self.experiment, self.trust, self.program = experiment, trust, None
        self.run: str | None = None
        self.about: Any = None  # what the program was made of
        self.ticket: int | None = None
        self.unrolls = 0
        self.waiting: _Sent | None = None

    def act_for(self, channel: Channel, packing: Packing, program: SplitProgram) -> None:
        """Acts until the connection is lost, or the run is over."""
        packed: list[np.ndarray] = []
        others, is_sent = packing.others(packing.packed_kinds), False
        while True:
            header, payload = _received(channel, wire.size_of(packing.packed_kinds))
            if is_sent:
                self.waiting = None
            if (changed := header["changed"]) is None:
                packed = wire.arrays_of(payload, packing.packed_kinds)
            else:
                words = [jax.ShapeDtypeStruct((changed,), np.int32), jax.ShapeDtypeStruct((changed,), np.uint16)]
                packed = apply_changes(packing, packed, wire.arrays_of(payload, [*words, *others]))
            if self.waiting is None:
                published = jax.device_put(packing.unpack(packed), program.sharding)
                self.leaves, sent = program.act(self.leaves, published)
                token = {"run": self.run, "life": header["life"], "version": header["version"], "unroll": self.unrolls}
                self.waiting, self.unrolls = _Sent(token, jax.device_get(sent)), self.unrolls + 1
            _hear(channel)
            channel.send(*self.waiting)
            is_sent = True

    def enter(self, channel: Channel) -> tuple[Packing, SplitProgram]:
        """Waits until the learner lets it in, and returns what it acts with."""
        channel.send({"versions": versions(), "ticket": self.ticket, "run": self.run})
        about = _received(channel)[0]
        self.run = about["run"]
        try:
            if self.program is None or about["experiment"] != self.about:  # of another run
                said = about["experiment"]
                experiment = self.experiment or Experiment.from_json(said, where="the learner", trust=self.trust)
                self.program = split_program(experiment)
                self.about = about["experiment"]
            _ = self.program.act
            packing = Packing.of(about["codec"], self.program.halves.published_kinds)
        except (ValueError, TypeError, ImportError) as error:
            channel.send({"cannot": str(error)})
            raise
        _hear(channel)
        channel.send({"fingerprint": self.program.halves.fingerprint})
        ticket = _received(channel)[0]["ticket"]
        if self.ticket is None:
            self.ticket, self.leaves = ticket, self.program.initial_leaves(ticket)
        return packing, self.program


def _received(channel: Channel, payload: int = 0) -> tuple[dict[str, Any], memoryview]:
    header, arrays = channel.receive(payload)
    if "refused" in header:
        raise ValueError(f"the learner refused this actor: {header['refused']}")
    if "over" in header:
        raise _Over(header.get("error", ""))
    return header, arrays


def _hear(channel: Channel) -> None:
    """Reads what came meanwhile; it can only say that the run is over."""
    if channel.has_message():
        _received(channel)


@entry
def act(
    *addresses: str,
    experiment: Experiment | None = None,
    wait: float | str = "10m",
    trust: bool = False,
    say: Callable[[str], Any] = lambda line: None,
) -> int:
    """Acts for the learner of a run, which was started with `actors_at`, until the run is over; or for several, side by side.

    The learner says what the run computes. The actor has environments of its own, whose keys depend on the seed of the run and
    on the ticket that it gets. If the learner is away, it waits, and goes on where it was.

    Args:
      *addresses: the learner's, `HOST:PORT`, or the path of a file with it, such as `/shared/learner`, which need not exist yet
        and is read again whenever the learner is away; those of several learners, each with a run and a policy of its own.
      experiment: what the run computes; needed if the learner's environment or a part of its config is an object.
      wait: how long it waits for the learner each time, in seconds or as text such as `"10m"`.
      trust: whether the code that a learner names may run here: modules (`my_module:MyEnv`) and files of algorithms.
      say: called with lines about what happens.

    Returns:
      The number of unrolls that it made.

    Raises:
      ValueError: if a learner refuses it, with the reason.
      TrustError: a ValueError, if a learner names code to run, and is not trusted.
      RuntimeError: if a run ended with an error.
      ConnectionError: if a learner does not come back in time. Of several learners, it acts for the others to their end first.
    """
    limit = seconds("wait", wait)
    if not addresses:
        raise ValueError("an actor needs the address of its learner; give HOST:PORT, such as 127.0.0.1:7000")
    for address in addresses:
        if not _is_file(address):
            wire.address_of(address, "address")
    if not all(map(_is_file, addresses)):
        tls.contexts()  # a learner that writes its address into a file makes the key before that
    outcomes: list[int | Exception] = []

    def act_at(address: str) -> None:
        try:
            outcomes.append(_act(address, _Actor(experiment, trust), limit, say))
        except Exception as error:
            outcomes.append(error)
            if len(addresses) > 1:  # the others may go on for days
                say(f"acting for {address} ended with an error: {error}")

    with compiling.on_disk():
        threads = [threading.Thread(target=act_at, args=(address,), daemon=True) for address in addresses]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors := [x for x in outcomes if isinstance(x, Exception)]:
        raise errors[0]
    return sum(x for x in outcomes if isinstance(x, int))


def _is_file(address: str) -> bool:
    return isinstance(address, str) and "/" in address


def _where(address: str) -> tuple[str, int]:
    """Where the learner listens; raises WireError if the file that says so is not there yet, or not yet whole."""
    if not _is_file(address):
        return wire.address_of(address, "address")
    try:
        return wire.address_of(Path(address).read_text().strip(), address)
    except (OSError, ValueError) as error:
        raise WireError(str(error)) from error


def _act(address: str, actor: _Actor, limit: float, say: Callable[[str], Any]) -> int:
    since, attempts = time.monotonic(), 0
    while True:
        try:
            host, port = _where(address)
            if not tls.key_file().exists():
                raise WireError(f"the learner has not made the key {tls.key_file()} yet")
            with contextlib.closing(wire.connect((host, port), tls.contexts()[1])) as channel:
                say(f"found the learner at {host}:{port}; waiting until it is ready")
                attempts = 0
                acts_with = actor.enter(channel)
                say(f"acting for {host}:{port}")
                actor.act_for(channel, *acts_with)
        except _Over as over:
            if str(over):
                raise RuntimeError(f"the run at {address} ended with an error: {over}") from None
            say(f"the run at {address} is over, after {actor.unrolls} unrolls of this actor")
            return actor.unrolls
        except WireError as error:
            if not attempts:
                say(f"no learner answers at {address} yet; waiting for one")
                since = time.monotonic()
            pause = _PAUSES[min(attempts, len(_PAUSES) - 1)]
            if time.monotonic() + pause - since > limit:
                text = f"no learner of a run answers at {address}: {error}; start one with --actors-at, or correct the address"
                raise ConnectionError(text) from error
            attempts += 1
            time.sleep(pause)
