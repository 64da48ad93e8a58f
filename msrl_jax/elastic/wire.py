"""Messages between the learner of a run and its actors over TLS: a JSON header and the bytes of arrays. Nothing is unpickled.

A message consists of both lengths, the header, and the arrays. The learner serves many actors in one thread, with a `Peer` for
each; an actor has a `Channel`. Both ends prove that they have the key of `tls`.
"""

import asyncio
import contextlib
import json
import math
import select
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from msrl_jax.elastic import tls

PATIENCE = 10.0  # seconds for the other end to prove that it has the key
_HEADER = 2**20  # maximum number of bytes of a header
_LENGTHS = struct.Struct("!IQ")
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds until the first probe, between probes; probes


class WireError(ConnectionError):
    """The other end disconnected, or does not speak this protocol."""


def address_of(text: str, argument: str = "actors_at") -> tuple[str, int]:
    """Parses `HOST:PORT`."""
    host, colon, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f"{argument}={text!r}: use HOST:PORT, such as 127.0.0.1:7000")
    return host, int(port)


class Peer:
    """An actor, as seen by the learner."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader, self._writer = reader, writer

    async def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message."""
        with _as_wire_error():
            self._writer.write(_encode_message(header, arrays))
            await self._writer.drain()

    async def receive(self, payload: int = 0) -> tuple[dict[str, Any], memoryview]:
        """Receives a message with at most `payload` bytes of arrays; returns its header and these bytes."""
        with _as_wire_error():
            lengths = _read_lengths(await self._reader.readexactly(_LENGTHS.size), payload)
            header, arrays = [await self._reader.readexactly(length) for length in lengths]
            return _read_header(header), memoryview(arrays)

    async def wait_until_closed(self) -> None:
        """Discards remaining messages until the other end closes the connection.

        Closing a connection while the other end sends is an error there, and earlier messages to it might stay unread.
        """
        with contextlib.suppress(OSError):
            while await self._reader.read(2**16):
                pass

    def cut(self) -> None:
        """Closes the connection, also if a task waits for a message."""
        self._writer.transport.abort()


class Channel:
    """The learner, as seen by an actor."""

    def __init__(self, connection: ssl.SSLSocket):
        self._connection = connection

    def send(self, header: Mapping[str, Any], arrays: Sequence[np.ndarray] = ()) -> None:
        """Sends a message."""
        with _as_wire_error():
            self._connection.sendall(_encode_message(header, arrays))

    def receive(self, payload: int = 0) -> tuple[dict[str, Any], memoryview]:
        """Receives a message with at most `payload` bytes of arrays; returns its header and these bytes."""
        with _as_wire_error():
            lengths = _read_lengths(self._read(_LENGTHS.size), payload)
            header, arrays = [self._read(length) for length in lengths]
            return _read_header(header), arrays

    def _read(self, length: int) -> memoryview:
        buffer, start = memoryview(bytearray(length)), 0
        while start < length:
            if not (count := self._connection.recv_into(buffer[start:])):
                raise EOFError("the other end disconnected")
            start += count
        return buffer

    def has_message(self) -> bool:
        """Whether a message, or the end of the connection, has arrived."""
        with _as_wire_error():
            coming = select.poll()
            coming.register(self._connection, select.POLLIN)
            return bool(self._connection.pending() or coming.poll(0))

    def close(self) -> None:
        """Closes the connection."""
        self._connection.close()

    def cut(self) -> None:
        """Ends the connection, also if another thread waits for a message."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._connection, socket.SHUT_RDWR)  # that of `SSLSocket` stops encrypting first


@contextlib.contextmanager
def _as_wire_error() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError, RecursionError) as error:  # the last two: the data is not a message
        raise WireError(str(error) or type(error).__name__) from error


def _encode_message(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bytes:
    text = json.dumps(header).encode()
    parts = [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays]
    return b"".join([_LENGTHS.pack(len(text), sum(map(len, parts))), text, *parts])


def _read_lengths(lengths: bytes | memoryview, payload: int) -> tuple[int, int]:
    header, arrays = _LENGTHS.unpack(lengths)
    if header > _HEADER or arrays > payload:
        raise WireError(f"a message has {header} and {arrays} bytes, but at most {_HEADER} and {payload} were expected")
    return header, arrays


def _read_header(text: bytes | memoryview) -> dict[str, Any]:
    header = json.loads(bytes(text))
    if not isinstance(header, dict):
        raise WireError("a message has no header")
    return header


def size_of(kinds: Sequence[Any]) -> int:
    """Returns the number of bytes of arrays with these shapes and dtypes."""
    return sum(math.prod(kind.shape) * np.dtype(kind.dtype).itemsize for kind in kinds)


def arrays_of(payload: memoryview, kinds: Sequence[Any]) -> list[np.ndarray]:
    """Returns the arrays of a message; raises WireError unless they have these shapes and dtypes."""
    if len(payload) != size_of(kinds):
        raise WireError(f"a message has {len(payload)} bytes of arrays instead of {size_of(kinds)}")
    arrays, start = [], 0
    for kind in kinds:
        count, dtype = math.prod(kind.shape), np.dtype(kind.dtype)
        arrays.append(np.frombuffer(payload, dtype, count, start).reshape(kind.shape))
        start += count * dtype.itemsize
    return arrays


def listen(address: tuple[str, int]) -> socket.socket:
    """Listens for actors."""
    try:
        return socket.create_server(address, backlog=128)
    except OSError as error:
        place = ":".join(map(str, address))
        raise ValueError(
            f"actors_at={place!r}: cannot listen there ({error.strerror}); stop the learner that uses this address, or choose "
            "another one"
        ) from error


async def accept(connection: socket.socket, context: ssl.SSLContext) -> Peer:
    """The actor of a connection, once both ends have proved that they have the key; see `connect`."""
    reader = asyncio.StreamReader(2**20)
    protocol, loop = asyncio.StreamReaderProtocol(reader), asyncio.get_running_loop()
    with _as_permission_error(), _as_wire_error():
        _keep_alive(connection)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=context, ssl_handshake_timeout=PATIENCE
        )
    return Peer(reader, asyncio.StreamWriter(transport, protocol, reader, loop))


def connect(address: tuple[str, int], context: ssl.SSLContext) -> Channel:
    """Connects to a learner; raises WireError if nothing listens, PermissionError if it has a different key."""
    with _as_wire_error():
        connection = socket.create_connection(address, PATIENCE)
    try:
        with _as_permission_error(), _as_wire_error():
            _keep_alive(connection)
            connection = context.wrap_socket(connection)
            connection.settimeout(None)
    except BaseException:
        connection.close()
        raise
    return Channel(connection)


@contextlib.contextmanager
def _as_permission_error() -> Iterator[None]:
    try:
        yield
    except WireError as error:
        if isinstance(error.__cause__, ssl.SSLError) and not isinstance(error.__cause__, ssl.SSLEOFError):
            raise PermissionError(
                f"the other end has a different key, or is not msrl-jax; this process has the key {tls.key_file()}: copy the "
                "same file to every learner and actor"
            ) from error
        raise


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or the last part of a message waits up to 40 ms
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # detects machines that disappeared
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
