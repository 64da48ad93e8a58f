"""The actors of a run, in other processes, as seen by the learner: they join and leave during the run."""

import asyncio
import contextlib
import queue
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from msrl_jax.elastic import tls, wire
from msrl_jax.elastic.parameter_messages import ActorSender, Packing
from msrl_jax.elastic.split_program import SplitProgram
from msrl_jax.elastic.unroll_log import UnrollLog
from msrl_jax.elastic.wire import Peer, WireError
from msrl_jax.fragments.support.checks import shown
from msrl_jax.policies import SingleLearnerCoarse
from msrl_jax.run.disk.folder import versions
from msrl_jax.run.experiment.plain_data import to_json
from msrl_jax.run.loop.hooks import StopRequests
from msrl_jax.run.loop.loop import Run, StopReason

_QUIET = 1.0  # seconds without an unroll after which a chunk ends, so that hooks run
_POLL = 0.2  # seconds between checks whether to stop the run
_LINGER = 5.0  # seconds in which to tell actors that the run is over
_UNPROVED = 64  # maximum number of connections that have not yet proved that they have the key
_PENALTY = 1.0  # seconds for which the slot of a connection that failed to prove it stays blocked
_SAID = 1000  # maximum number of characters of the reason for refusing an actor
_FLAWED = 10  # number of consecutive non-finite unrolls after which an actor is refused
_FILES = 2**16  # maximum number of open files to request
_SAVING = 256  # maximum number of files reserved for saving


class Refusal(Exception):
    """Why an actor cannot act for this run."""

    def __init__(self, text: str):
        # Parts of the text come from the actor.
        super().__init__("".join(c if c.isprintable() else " " for c in text[:_SAID]))


class Published(NamedTuple):
    """The parameters for actors, packed for transfer."""

    version: int  # number of completed iterations
    packed: list[np.ndarray]


@dataclass(eq=False)
class ConnectedActor:
    """A connected actor."""

    ticket: int
    peer: Peer
    sender: ActorSender
    answers: asyncio.Queue[Published | None] = field(default_factory=asyncio.Queue)  # None: the run is over
    flawed: int = 0  # number of consecutive non-finite unrolls


class Unroll(NamedTuple):
    """A message of an actor."""

    actor: ConnectedActor
    number: int
    life: int
    version: int
    arrays: list[np.ndarray]
    flaw: str | None  # why the unroll is not used


def check_policy(policy: object) -> SingleLearnerCoarse:
    """Returns the policy of a run with actors; raises ValueError if it is another one, or has options that such runs do not
    support.
    """
    fields = ("actors", "buffers", "env_platform", "trajectory_codec")
    if isinstance(policy, SingleLearnerCoarse) and policy.learners == 1 and not any(getattr(policy, f) for f in fields):
        return policy
    raise ValueError(
        f"actors_at: {shown(policy)} does not support actors in other processes; use SingleLearnerCoarse with only staleness "
        "and parameter_codec, such as 'SingleLearnerCoarse:staleness=8', or remove actors_at"
    )


class ActorPool:
    """The actors of a run: listens for them, takes their unrolls in the order of arrival, and sends them parameters.

    This is a hook of the run. An actor waits for its answer, so at most one unroll per actor is queued here. One thread talks
    to all actors.
    """

    def __init__(
        self,
        address: str,
        program: SplitProgram,
        policy: SingleLearnerCoarse,
        folder: Path | None,
        say: Callable[[str], object],
    ):
        self.program, self._bound, self._say = program, policy.staleness, say
        self.packing = Packing.from_codec(policy.parameter_codec, program.halves.published_kinds)
        self._about = program.experiment.to_json()
        sent_values, metrics = (
            program.halves.sent if program.experiment.guard != "ignore" else (),
            program.halves.schedule.metrics,
        )
        # The floats that the learner uses for learning; episode metrics may be nan.
        self._learned = {i: v.label for i, v in enumerate(sent_values) if v not in metrics and _is_float(v.aval)}
        self._address = wire.address_of(address)
        self._context, _ = tls.contexts(say)
        self._arrived: queue.SimpleQueue[Unroll] = queue.SimpleQueue()
        self._next_unroll: Unroll | None = None
        self._actors: dict[int, ConnectedActor] = {}
        self._serving: dict[asyncio.Task[None], Peer | None] = {}  # None: it has not proved that it has the key
        self._strangers, self._is_over = 0, False
        self._wait_start, self.iteration = time.perf_counter(), 0
        self._newest = Published(0, [])
        self._log = UnrollLog(folder)
        self._listener = wire.listen(self._address)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop, self._opened = self._runner.get_loop(), asyncio.Event()
        self._listening = self._loop.create_task(self._listen())
        self._thread = threading.Thread(target=self._run_thread, daemon=True)
        self._thread.start()

    def open(self, run: Run) -> None:
        """Admits actors, which wait while the learner compiles. Call it once the folder is that of a run: a record alone would
        block the next learner from using the folder.
        """
        self.iteration = run.iteration
        computes = {"total_steps": run.experiment.total_steps, "guard": run.experiment.guard}
        self._log.begin(run.iteration, codec=self.packing.name, **computes)
        self.publish(jax.tree.leaves(run.run_state))
        self._loop.call_soon_threadsafe(self._opened.set)

    def after(self, run: Run) -> None:
        """Adds information about the actors to the row of a chunk."""
        end = time.perf_counter()
        steps = len(jax.tree.leaves(run.metrics)[0]) * run.experiment.steps_per_iteration
        counts = {"dropped_unrolls": self._log.dropped, "refused_unrolls": self._log.refused}
        run.rows[-1] |= {"actors": len(self._actors)} | counts
        run.rows[-1]["steps_per_second"] = steps / (end - self._wait_start)  # includes the time in which the learner waited

    def end(self, run: Run) -> None:
        """Tells actors that the run is over, with the error that ended it, if any; if it can be resumed, they wait."""
        status, reason = run.stop_reason
        if (status == "interrupted" and run.path is not None) or not self._thread.is_alive():
            return
        errors = {"unfinished": reason, "diverged": "it had non-finite values"}
        errors["interrupted"] = f"it was interrupted ({reason}), and has no folder from which it could be resumed"
        message = {"over": True} | ({"error": errors[status]} if status in errors else {})
        asyncio.run_coroutine_threadsafe(self._dismiss(message), self._loop).result()

    async def _dismiss(self, message: dict[str, Any]) -> None:
        """Sends a message to all actors, and waits until they disconnect; a suspended actor does not block the learner."""
        self._is_over = True
        self._opened.set()  # the run may end with an error before it begins
        peers_by_task = {task: peer for task, peer in self._serving.items() if peer is not None}
        sends = [asyncio.create_task(peer.send(message)) for peer in peers_by_task.values()]
        for actor in self._actors.values():
            actor.answers.put_nowait(None)
        if peers_by_task:
            await asyncio.wait([*sends, *peers_by_task], timeout=_LINGER)

    def close(self) -> None:
        """Closes all connections."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._listening.cancel)
            self._thread.join()
        self._listener.close()
        self._log.close()

    def ready(self, seconds: float) -> bool:
        """Whether an unroll to learn from arrives within `seconds`."""
        self._next_unroll = self._next_unroll or self._next_usable(seconds)
        return self._next_unroll is not None

    def waiting(self) -> None:
        """Records that the learner has finished its work and waits."""
        self._wait_start = time.perf_counter()

    def take(self) -> Unroll | None:
        """Returns the next unroll to learn from; None if none arrives within a second."""
        unroll, self._next_unroll = self._next_unroll or self._next_usable(_QUIET), None
        return unroll

    def _next_usable(self, seconds: float) -> Unroll | None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                unroll = self._arrived.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return None
            unroll_id = (unroll.actor.ticket, unroll.number, unroll.life, unroll.version)
            if self._log.take(*unroll_id, self.iteration, self._bound, unroll.flaw) is None:
                return unroll
            self.answer(unroll.actor)

    def publish(self, leaves: Sequence[jax.Array]) -> None:
        """Publishes the parameters of a state to actors."""
        parameters = jax.device_get([leaves[i] for i in self.program.halves.published])
        self._newest = Published(self.iteration, self.packing.pack(parameters))

    def answer(self, actor: ConnectedActor) -> None:
        """Sends an actor the newest parameters."""
        self._loop.call_soon_threadsafe(actor.answers.put_nowait, self._newest)

    def _run_thread(self) -> None:
        """Runs the thread that talks to actors."""
        with self._runner, contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._listening)

    async def _listen(self) -> None:
        """Accepts connections, but only a limited number that have not yet proved that they have the key."""
        places, loop, max_file = asyncio.Semaphore(_UNPROVED), asyncio.get_running_loop(), _raise_file_limit()
        self._listener.setblocking(False)
        while True:
            await places.acquire()
            try:
                connection, _ = await loop.sock_accept(self._listener)
                if connection.fileno() >= max_file:  # the system assigns the smallest free number
                    connection.close()
                    raise OSError("too many files are open")
            except OSError:
                places.release()
                await asyncio.sleep(_POLL)
                continue
            task = loop.create_task(self._serve(connection, places))
            self._serving[task] = None
            task.add_done_callback(self._serving.pop)

    async def _serve(self, connection: socket.socket, places: asyncio.Semaphore) -> None:
        try:
            peer = await wire.accept(connection, self._context)
        except (PermissionError, WireError) as error:
            self._strangers += (is_refused := isinstance(error, PermissionError))  # otherwise it disconnected
            if is_refused and not self._strangers & (self._strangers - 1):  # 1, 2, 4, ...: a flood does not fill the log
                self._say(f"connections refused so far, because they did not prove the key: {self._strangers}; last: {error}")
            await asyncio.sleep(_PENALTY)
            return
        finally:
            places.release()
        task = asyncio.current_task()
        assert task is not None
        self._serving[task] = peer
        try:
            await self._opened.wait()
            async with self._admit(peer) as actor:
                await self._exchange(actor)
                await peer.wait_until_closed()  # it knows that the run is over
        except Refusal as refusal:
            self._say(f"an actor was refused: {refusal}")
            with contextlib.suppress(WireError):
                await peer.send({"refused": str(refusal)})
        except WireError:
            pass  # it disconnected
        finally:
            peer.cut()

    async def _check_actor(self, peer: Peer) -> int | None:
        """Sends an actor the description of the run, and checks that its program is the same; its old ticket, if any."""
        hello, _ = await peer.receive()
        actor_versions, learner_versions = hello.get("versions"), versions()
        if not isinstance(actor_versions, dict):
            raise Refusal("it does not report its versions; start it with msrl-jax act")
        for name in (n for n in learner_versions if n != "python"):
            if actor_versions.get(name) != learner_versions[name]:
                raise Refusal(
                    f"it has {name} {actor_versions.get(name)}, but the learner has {learner_versions[name]}; "
                    "install the same version"
                )
        ticket = hello.get("ticket")
        is_known_ticket = type(ticket) is int and ticket in range(self._log.tickets)  # `in` also accepts True and 0.0
        if ticket is not None and (hello.get("run") != self._log.run or not is_known_ticket):
            raise Refusal("its ticket is from another run; restart the actor")
        await peer.send({"run": self._log.run, "experiment": to_json(self._about), "codec": self.packing.name})
        ready, _ = await peer.receive()
        if "cannot" in ready:
            raise Refusal(f"it cannot build the experiment: {ready['cannot']}")
        if ready.get("fingerprint") != self.program.halves.fingerprint:
            raise Refusal("its programs differ from the learner's; use the same code, environments and settings for both")
        return ticket

    @contextlib.asynccontextmanager
    async def _admit(self, peer: Peer) -> AsyncIterator[ConnectedActor]:
        ticket = await self._check_actor(peer)
        if self._is_over:
            raise WireError("the run is over")
        actor = ConnectedActor(self._log.join() if ticket is None else ticket, peer, ActorSender(self.packing))
        earlier, self._actors[actor.ticket] = self._actors.get(actor.ticket), actor
        if earlier is not None:
            earlier.peer.cut()
        try:
            await peer.send({"ticket": actor.ticket})
            self.answer(actor)
            yield actor
        finally:
            if self._actors.get(actor.ticket) is actor:  # otherwise it came back with another connection
                del self._actors[actor.ticket]

    async def _exchange(self, actor: ConnectedActor) -> None:
        """Alternately sends parameters and receives unrolls, until either side ends."""
        kinds = self.program.halves.sent_kinds
        while (newest := await actor.answers.get()) is not None:
            num_changed, arrays = actor.sender.message(newest.packed)
            await actor.peer.send({"version": newest.version, "life": self._log.life, "changed": num_changed}, arrays)
            header, payload = await actor.peer.receive(wire.size_of(kinds))
            try:
                number, life, version = (_read_count(header[name]) for name in ("unroll", "life", "version"))
                if header["run"] != self._log.run:
                    raise ValueError("its token is from another run")
                if not self._log.has_published(life, version, newest.version):
                    raise ValueError(f"learner {life} sent no parameters of iteration {version}")
                unroll_arrays = wire.arrays_of(payload, kinds)
            except (KeyError, ValueError, WireError) as error:
                self._log.refuse(actor.ticket, str(error))
                raise Refusal(f"its message is not an unroll of this run: {error}; restart the actor") from None
            flaw = self._describe_flaw(unroll_arrays)
            actor.flawed = 0 if flaw is None else actor.flawed + 1
            if flaw is not None and actor.flawed in (1, _FLAWED):
                self._say(f"an unroll of the actor with ticket {actor.ticket} is not used: {flaw}")
            self._arrived.put(Unroll(actor, number, life, version, unroll_arrays, flaw))
            if actor.flawed == _FLAWED:
                raise Refusal(f"{flaw}, as in {_FLAWED} consecutive unrolls; look for the cause in its environments")

    def _describe_flaw(self, arrays: Sequence[np.ndarray]) -> str | None:
        """Describes the non-finite values in an unroll if only the actor can be the cause."""
        label = next((label for i, label in self._learned.items() if not np.isfinite(arrays[i]).all()), None)
        if label is None or not all(np.isfinite(x).all() for x in self._newest.packed if _is_float(x)):
            return None  # the learner's own parameters are not finite, and it is about to find out
        return f"{label} has non-finite values"


def _read_count(value: object) -> int:
    """Returns a count from a message; raises ValueError if it is not one."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _raise_file_limit() -> int:
    """Raises the limit of open files as far as allowed; returns the first file number that is reserved for saving."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < (limit := min(hard, _FILES) if hard != resource.RLIM_INFINITY else _FILES):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        soft = limit
    return soft - min(soft * 2 // 5, _SAVING)


class WaitForActors:
    """A hook that waits for an actor before each chunk, placed last; a request to stop the run ends the wait."""

    def __init__(self, pool: ActorPool, requests: StopRequests):
        self._pool, self._requests = pool, requests

    def begin(self, run: Run) -> None:
        """Admits actors."""
        self._pool.open(run)

    def before(self, run: Run) -> StopReason | None:
        """Waits until there is something to learn from."""
        self._pool.waiting()
        start, reason = time.perf_counter(), ""
        while not self._pool.ready(_POLL) and not reason:
            reason = self._requests.reason(0.0)
        run.seconds["train_seconds"] += time.perf_counter() - start
        return StopReason("interrupted", reason) if reason else None
