"""The learner's side of a run whose actors are other processes, which join and leave while it goes on."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from msrl_jax.experiment import wire
from msrl_jax.experiment.arrivals import Arrivals
from msrl_jax.experiment.folder import to_json, versions
from msrl_jax.experiment.hooks import StopRequests
from msrl_jax.experiment.parts import Packing, Parts, Sender, parts_of
from msrl_jax.experiment.run import Ending, Run
from msrl_jax.experiment.spec import Experiment
from msrl_jax.experiment.wire import Channel, WireError
from msrl_jax.fragments.passes.checks import check_devices
from msrl_jax.fragments.placement import Device
from msrl_jax.policies import SingleLearnerCoarse

USUAL = "SingleLearnerCoarse:staleness=8"  # the policy of a run with actors for which none is given
_QUIET = 1.0  # seconds without an unroll after which a chunk ends, so that the host does its work
_POLL = 0.2  # seconds between two looks whether the run has to stop
_LINGER = 5.0  # seconds in which actors hear that the run is over


class Refusal(Exception):
    """Why an actor cannot act for this run, in one sentence."""


class Published(NamedTuple):
    """What actors read, as it crosses."""

    version: int  # iterations done
    packed: list[np.ndarray]


@dataclass(eq=False)
class Actor:
    """An actor that is there."""

    ticket: int
    channel: Channel
    sender: Sender
    answers: queue.SimpleQueue[Published | None] = field(default_factory=queue.SimpleQueue)  # None: the run is over


class Unroll(NamedTuple):
    """What an actor sent."""

    actor: Actor
    number: int
    life: int
    version: int
    arrays: list[np.ndarray]


def check_policy(policy: Any) -> SingleLearnerCoarse:
    """The policy of a run with actors; raises ValueError if it is another one, or asks for what such runs do not have."""
    fields = ("actors", "buffers", "env_platform", "trajectory_codec")
    if isinstance(policy, SingleLearnerCoarse) and policy.learners == 1 and not any(getattr(policy, f) for f in fields):
        return policy
    raise ValueError(
        f"actors_at: {policy!r} is not for actors in other processes; use SingleLearnerCoarse with staleness and "
        "parameter_codec alone, such as 'SingleLearnerCoarse:staleness=8', or leave actors_at out"
    )


def opened(
    address: str, experiment: Experiment, policy: Any, devices: Sequence[Device] | None, folder: Path | None,
    say: Callable[[str], Any],
) -> "Pool":  # fmt: skip
    """Listens for actors; raises ValueError, before anything compiles, if the run or the address is not for them."""
    policy = check_policy(policy)
    return Pool(address, parts_of(experiment, None if devices is None else check_devices(devices)[0]), policy, folder, say)


class Pool:
    """Actors at work for a run: it listens for them, takes their unrolls in the order of arrival, and sends them parameters.

    A hook of the run. An actor waits for its answer, so at most one unroll of each waits here.
    """

    def __init__(self, address: str, parts: Parts, policy: SingleLearnerCoarse, folder: Path | None, say: Callable[[str], Any]):
        self.parts, self._bound, self._say = parts, policy.staleness, say
        self.packing = Packing.of(policy.parameter_codec, parts.halves.published_kinds)
        self._about = parts.experiment.to_json()
        self._address = wire.address_of(address)
        self._secret = wire.secret_for(self._address[0])
        self._arrived: queue.SimpleQueue[Unroll] = queue.SimpleQueue()
        self._held: Unroll | None = None
        self._actors: dict[int, Actor] = {}
        self._entering: set[Channel] = set()  # of actors that compile
        self._lock, self._is_closed, self._is_over = threading.Lock(), False, False
        self._threads: list[threading.Thread] = []
        self._since, self.iteration = time.perf_counter(), 0
        self._newest: Published | None = None
        self._listener = wire.listen(self._address)
        self._record = Arrivals(folder)

    def open(self, run: Run) -> None:
        """Lets actors in, once the folder is that of a run: a record alone would keep the next learner out of it."""
        self.iteration = run.iteration
        computes = {"total_steps": run.experiment.total_steps, "guard": run.experiment.guard}
        self._record.begin(run.iteration, codec=self.packing.name, **computes)
        self.publish(jax.tree.leaves(run.run_state))
        threading.Thread(target=self._accept, daemon=True).start()

    def after(self, run: Run) -> None:
        """Adds what is known of the actors to the row of a chunk."""
        now = time.perf_counter()
        steps = len(jax.tree.leaves(run.metrics)[0]) * run.experiment.steps_per_iteration
        run.rows[-1] |= {"actors": len(self._actors), "dropped_unrolls": self._record.dropped}
        run.rows[-1]["steps_per_second"] = steps / (now - self._since)  # with the time in which the learner waited for actors

    def end(self, run: Run) -> None:
        """Tells actors that the run is over, and of the error that ended it; if it may go on, they wait."""
        status, reason = run.ending
        if status == "interrupted" and run.path is not None:
            return
        errors = {"unfinished": reason, "diverged": "something in it was nan or infinite"}
        errors["interrupted"] = f"it was interrupted ({reason}), and has no folder from which it could go on"
        over = {"over": True} | ({"error": errors[status]} if status in errors else {})
        with self._lock:
            self._is_over = True
            actors, entering = list(self._actors.values()), list(self._entering)
        for channel in entering:  # of which each reads it when it has compiled
            self._tell(channel, over)
        telling = [threading.Thread(target=self._dismiss, args=(actor, over), daemon=True) for actor in actors]
        for thread in telling:  # a suspended actor does not read, and would hold up the learner
            thread.start()
        deadline = time.monotonic() + _LINGER
        for thread in [*telling, *self._threads]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Ends all connections."""
        if self._is_closed:
            return
        self._is_closed = True
        wire.stop_listening(self._listener)
        with self._lock:
            for actor in self._actors.values():
                actor.answers.put(None)
                actor.channel.close()

    def _dismiss(self, actor: Actor, over: dict[str, Any]) -> None:
        self._tell(actor.channel, over)
        actor.answers.put(None)

    @staticmethod
    def _tell(channel: Channel, over: dict[str, Any]) -> None:
        with contextlib.suppress(WireError):
            channel.send(over)

    def ready(self, seconds: float) -> bool:
        """Whether there is an unroll to learn from within some seconds."""
        self._held = self._held or self._take(seconds)
        return self._held is not None

    def waiting(self) -> None:
        """Notes that the learner has done what it had to do, and waits."""
        self._since = time.perf_counter()

    def take(self) -> Unroll | None:
        """The next unroll to learn from; None if none comes for a second."""
        unroll, self._held = self._held or self._take(_QUIET), None
        return unroll

    def _take(self, seconds: float) -> Unroll | None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                unroll = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            of = (unroll.actor.ticket, unroll.number, unroll.life, unroll.version)
            if self._record.take(*of, self.iteration, self._bound) is None:
                return unroll
            self.answer(unroll.actor)

    def publish(self, leaves: Sequence[jax.Array]) -> None:
        """Makes the parameters of a state those that actors get."""
        own = jax.device_get([leaves[i] for i in self.parts.halves.published])
        self._newest = Published(self.iteration, self.packing.pack(own))

    def answer(self, actor: Actor) -> None:
        """Sends an actor the newest parameters."""
        actor.answers.put(self._newest)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except OSError:  # such as too many open files
                time.sleep(_POLL)
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()

    def _serve(self, connection: Any) -> None:
        try:
            with contextlib.closing(wire.accepted(connection, self._secret)) as channel:
                try:
                    with self._let_in(channel) as actor:
                        self._exchange(actor)
                except Refusal as refusal:
                    self._say(f"an actor was refused: {refusal}")
                    channel.send({"refused": str(refusal)})
        except PermissionError as error:
            self._say(f"an actor was refused: {error}")
        except WireError:
            pass  # it is gone

    def _met(self, channel: Channel) -> int | None:
        """Tells an actor what the run computes, and hears that it computes the same; its ticket if it was here before."""
        hello, _ = channel.receive()
        theirs, mine = hello.get("versions"), versions()
        if not isinstance(theirs, dict):
            raise Refusal("it does not say its versions; start it with msrl-jax act")
        for name in (n for n in mine if n != "python"):
            if theirs.get(name) != mine[name]:
                raise Refusal(f"it has {name} {theirs.get(name)}, and the learner has {mine[name]}; install the same")
        ticket = hello.get("ticket")
        if ticket is not None and (hello.get("run") != self._record.run or ticket not in range(self._record.tickets)):
            raise Refusal("its ticket is of another run; start the actor again")
        channel.send({"run": self._record.run, "experiment": to_json(self._about), "codec": self.packing.name})
        ready, _ = channel.receive()
        if "cannot" in ready:
            raise Refusal(f"it cannot build the experiment: {ready['cannot']}")
        if ready.get("fingerprint") != self.parts.halves.fingerprint:
            raise Refusal("its programs are not those of the learner; give both the same code, environments and settings")
        return ticket

    @contextlib.contextmanager
    def _let_in(self, channel: Channel) -> Iterator[Actor]:
        self._entering.add(channel)
        try:
            ticket = self._met(channel)
        finally:
            self._entering.discard(channel)
        with self._lock:
            if self._is_closed or self._is_over:
                raise WireError("the run is over")
            actor = Actor(self._record.join() if ticket is None else ticket, channel, Sender(self.packing))
            before = self._actors.pop(actor.ticket, None)
            self._actors[actor.ticket] = actor
        if before is not None:
            before.channel.close()
        try:
            channel.send({"ticket": actor.ticket})
            self.answer(actor)
            yield actor
        finally:
            with self._lock:
                if self._actors.get(actor.ticket) is actor:
                    del self._actors[actor.ticket]

    def _exchange(self, actor: Actor) -> None:
        """Sends parameters and receives unrolls, by turns, until one of both ends."""
        kinds = self.parts.halves.sent_kinds
        while (newest := actor.answers.get()) is not None:
            changed, arrays = actor.sender.message(newest.packed)
            actor.channel.send({"version": newest.version, "life": self._record.life, "changed": changed}, arrays)
            header, payload = actor.channel.receive(wire.size_of(kinds))
            try:
                of = int(header["unroll"]), int(header["life"]), int(header["version"])
                if header["run"] != self._record.run or not 0 <= of[1] <= self._record.life:
                    raise Refusal("its token is not one of this run; start the actor again")
                unroll = Unroll(actor, *of, wire.arrays_of(payload, kinds))
            except (KeyError, TypeError, ValueError, OverflowError, WireError) as error:
                raise Refusal(f"what it sent is no unroll of this run ({error}); start the actor again") from None
            self._arrived.put(unroll)


class Waiting:
    """A hook, the last one, that waits for an actor before each chunk; a request to stop the run ends the wait."""

    def __init__(self, pool: Pool, requests: StopRequests):
        self._pool, self._requests = pool, requests

    def begin(self, run: Run) -> None:
        """Lets actors in."""
        self._pool.open(run)

    def before(self, run: Run) -> Ending | None:
        """Waits until there is something to learn from."""
        self._pool.waiting()
        start, reason = time.perf_counter(), ""
        while not self._pool.ready(_POLL) and not reason:
            reason = self._requests.reason(0.0)
        run.seconds["train_seconds"] += time.perf_counter() - start
        return Ending("interrupted", reason) if reason else None
