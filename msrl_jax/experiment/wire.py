"""Messages between the learner of a run and its actors: a line of JSON and the bytes of arrays, over TCP; nothing is unpickled.

The connections are those of `multiprocessing.connection`, of which only `send_bytes` and `recv_bytes` are used. Both ends prove
by HMAC that they know the same secret. Nothing is encrypted.
"""

import contextlib
import json
import math
import multiprocessing
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

import numpy as np

SECRET = "MSRL_JAX_SECRET"  # the variable with the secret of a pool
PATIENCE = 20.0  # seconds for the other end to prove that it knows the secret
_HEADER = 2**20  # largest header, in bytes
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds until the first probe, between probes; probes


class WireError(ConnectionError):
    """The other end is gone, or is none that this one can talk to."""


def address_of(text: str, argument: str = "actors_at") -> tuple[str, int]:
    """Reads `HOST:PORT`."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{argument}={text!r}: give HOST:PORT, such as 127.0.0.1:7000")
    return host, int(port)


def secret_for(host: str, argument: str = "actors_at") -> bytes:
    """The secret of a pool; the machine itself needs none."""
    if given := os.environ.get(SECRET):
        return given.encode()
    if host == "localhost" or host.startswith("127."):
        return b"msrl-jax"
    raise ValueError(
        f"{argument}: {host!r} can be reached from other machines; set the variable {SECRET} to the same text for the learner "
        "and its actors, or use 127.0.0.1"
    )


class Channel:
    """One end of a connection."""

    def __init__(self, connection: Connection):
        self._connection, self._sending = connection, threading.Lock()
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else the last part of a message waits up to 40 ms
            end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # so that a machine that is gone is noticed
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> int:
        """Sends a message; the number of its bytes."""
        message = b"\n".join([json.dumps(header).encode(), b"".join(x.tobytes() for x in arrays)])
        with _lost(), self._sending:
            self._connection.send_bytes(message)
        return len(message)

    def receive(self, payload: int = 0) -> tuple[dict[str, Any], memoryview]:
        """Receives a message with at most `payload` bytes of arrays: its header, and these bytes."""
        with _lost():
            message = self._connection.recv_bytes(_HEADER + payload)
            end = message.index(b"\n")
            header = json.loads(message[:end])
        if not isinstance(header, dict):
            raise WireError("a message has no header")
        return header, memoryview(message)[end + 1 :]

    def has_message(self, seconds: float = 0.0) -> bool:
        """Whether a message, or the end of the connection, comes within some seconds."""
        with _lost():
            return self._connection.poll(seconds)

    def close(self) -> None:
        """Ends the connection, also for a thread that waits for a message."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, TypeError, ValueError, RecursionError) as error:
        # TypeError: another thread has just closed it. The last two: what came is no message.
        raise WireError(str(error) or type(error).__name__) from error


def size_of(kinds: Sequence[Any]) -> int:
    """Bytes of arrays of these shapes and dtypes."""
    return sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in kinds)


def arrays_of(payload: memoryview, kinds: Sequence[Any]) -> list[np.ndarray]:
    """The arrays of a message; raises WireError unless they are of these shapes and dtypes."""
    if len(payload) != size_of(kinds):
        raise WireError(f"a message has {len(payload)} bytes of arrays in place of {size_of(kinds)}")
    found, start = [], 0
    for x in kinds:
        count, dtype = math.prod(x.shape), np.dtype(x.dtype)
        found.append(np.frombuffer(payload, dtype, count, start).reshape(x.shape))
        start += count * dtype.itemsize
    return found


def listen(address: tuple[str, int]) -> Listener:
    """Listens for actors."""
    try:
        return Listener(address, "AF_INET", backlog=128)
    except OSError as error:
        where = ":".join(map(str, address))
        raise ValueError(
            f"actors_at={where!r}: cannot listen there ({error.strerror}); end the learner that has this address, or give "
            "another one"
        ) from error


def stop_listening(listener: Listener) -> None:
    """Ends a listener, also for a thread that waits in its `accept`."""
    host, port = listener.address  # type: ignore[misc]
    with contextlib.suppress(OSError):  # which a connection wakes
        Client(("127.0.0.1" if host == "0.0.0.0" else str(host), int(port)), "AF_INET").close()
    listener.close()


def accepted(connection: Connection, secret: bytes) -> Channel:
    """The channel to an actor that has connected, once both ends have proved that they know the secret; see `connect`."""
    return _proved(connection, secret, deliver_challenge, answer_challenge)


def connect(address: tuple[str, int], secret: bytes) -> Channel:
    """The channel to a learner; raises WireError if nobody listens, PermissionError if it does not have this secret."""
    with _lost():
        connection = Client(address, "AF_INET")
    return _proved(connection, secret, answer_challenge, deliver_challenge)


def _proved(connection: Connection, secret: bytes, *steps: Any) -> Channel:
    try:
        _give_up_after(connection, PATIENCE)  # else whoever connects and says nothing has a thread and a file for ever
        for step in steps:
            if step is answer_challenge and not connection.poll(PATIENCE):
                raise WireError("no challenge came")
            step(connection, secret)
        _give_up_after(connection, 0)
    except (multiprocessing.AuthenticationError, AssertionError) as error:
        connection.close()
        raise PermissionError(f"the other end is none of this package, or does not have the same secret ({SECRET})") from error
    except (OSError, EOFError) as error:
        connection.close()
        raise WireError(str(error) or type(error).__name__) from error
    return Channel(connection)


def _give_up_after(connection: Connection, seconds: float) -> None:
    """Limits the time in which a part of a message has to come; 0 is no limit."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))
