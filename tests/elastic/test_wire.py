"""What is on the way between a learner and its actors: who gets in, who does not, what is cut off, and the key of both."""

import asyncio
import contextlib
import os
import socket
import ssl
import sys
import threading
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import msrl_jax as msrl
from msrl_jax.elastic import actor_pool, tls, wire


@pytest.fixture
def other_key(tmp_path, monkeypatch):
    """What TLS needs with a key of somebody else."""
    with monkeypatch.context() as patch:
        patch.setenv(tls.KEY_VARIABLE, str(tmp_path / "other.pem"))
        return tls.contexts(lambda line: None)


@contextlib.contextmanager
def learner(serve=None):
    """The address of a learner of which each peer is served by a coroutine, and what became of each connection."""
    ends, (context, _), ready = [], tls.contexts(), threading.Event()

    async def accepted(connection):
        try:
            peer = await wire.accept(connection, context)
            try:
                ends.append(await serve(peer) if serve else "let in")
            finally:
                peer.cut()
        except (PermissionError, wire.WireError) as error:
            ends.append(type(error))

    async def listen():
        nonlocal task
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        listener.setblocking(False)
        ready.set()
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(accepted((await loop.sock_accept(listener))[0]))

    def run():
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(listen())

    task, thread = None, threading.Thread(target=run, daemon=True)
    with wire.listen(("127.0.0.1", 0)) as listener:
        thread.start()
        assert ready.wait(10)
        try:
            yield listener.getsockname(), ends
        finally:
            task.get_loop().call_soon_threadsafe(task.cancel)
            thread.join(10)


def wait_for(ends, count=1):
    deadline = time.monotonic() + 20
    while len(ends) < count:
        assert time.monotonic() < deadline, ends
        time.sleep(0.01)
    return ends


def is_cut(connection):
    """Whether the other end ends a connection, whatever it says before."""
    connection.settimeout(20)
    try:
        while connection.recv(2**16):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


# The key


def test_processes_that_start_together_make_one_key_that_only_its_owner_may_read(tmp_path, monkeypatch):
    """Threads here, each of which has found no file."""
    monkeypatch.setenv(tls.KEY_VARIABLE, str(tmp_path / "new" / "actors.pem"))
    together = threading.Barrier(4)
    exists = type(tmp_path).exists
    monkeypatch.setattr(type(tmp_path), "exists", lambda path: together.wait(10) < 0 or exists(path))
    found = []
    threads = [threading.Thread(target=lambda: found.append(tls.contexts(lambda line: None))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["actors.pem"] and len(found) == 4
    assert (tmp_path / "new" / "actors.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    certificates = [context.get_ca_certs(binary_form=True) for pair in found for context in pair]
    assert certificates == certificates[:1] * 8


def test_a_learner_makes_the_key_and_says_where_and_an_actor_does_not(tmp_path, monkeypatch):
    path, lines = tmp_path / "mistyped.pem", []
    monkeypatch.setenv(tls.KEY_VARIABLE, str(path))
    with pytest.raises(ValueError, match=f"the key {path} does not exist; start the learner .*, or correct the variable MSRL"):
        msrl.elastic.act("127.0.0.1:7000", wait=0.1)
    (tmp_path / "learner").write_text("127.0.0.1:7000")
    with pytest.raises(ConnectionError, match=f"the learner has not made the key {path} yet"):  # it may still start
        msrl.elastic.act(str(tmp_path / "learner"), wait=0.1, say=lines.append)
    assert not path.exists() and len(lines) == 1
    lines.clear()
    tls.contexts(lines.append)
    tls.contexts(lines.append)
    assert lines == [f"made a key for learner and actors, {path}; copy it to the machines of actors"]
    tls.contexts()


def test_the_key_is_in_the_users_settings(tmp_path, monkeypatch):
    monkeypatch.delenv(tls.KEY_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert tls.key_file() == tmp_path / ".config" / "msrl-jax" / "actors.pem"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/settings")
    assert str(tls.key_file()) == "/settings/msrl-jax/actors.pem"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620])
def test_a_key_that_others_may_use_is_refused_with_the_remedy(mode, tmp_path, monkeypatch, other_key):
    path = tmp_path / "other.pem"
    monkeypatch.setenv(tls.KEY_VARIABLE, str(path))
    path.chmod(mode)
    with pytest.raises(ValueError, match=rf"others can read the key {path}; restrict it with: chmod 600 {path}"):
        msrl.elastic.act("127.0.0.1:7000", wait=0.1)
    path.chmod(0o400)
    tls.contexts()


def test_a_key_of_another_user_a_damaged_one_and_the_former_secret_are_refused(tmp_path, monkeypatch, other_key):
    path = tmp_path / "other.pem"
    monkeypatch.setenv(tls.KEY_VARIABLE, str(path))
    with monkeypatch.context() as patch:
        if os.geteuid():
            patch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
        else:
            os.chown(path, 12345, -1)
        with pytest.raises(ValueError, match=f"{path} belongs to another user; set {tls.KEY_VARIABLE}"):
            tls.contexts()
    if not os.geteuid():
        os.chown(path, 0, -1)
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            tls.contexts()  # what the administrator gave
    with monkeypatch.context() as patch, pytest.raises(ValueError, match=f"{tmp_path} is not a file; set"):
        patch.setenv(tls.KEY_VARIABLE, str(tmp_path))
        tls.contexts()
    path.write_text("no key")
    with pytest.raises(ValueError, match=f"{path} cannot be used .*; delete the file, and the next learner creates"):
        tls.contexts()
    monkeypatch.setenv("MSRL_JAX_SECRET", "s")
    with pytest.raises(ValueError, match="MSRL_JAX_SECRET no longer has an effect: learner and actors share the key in"):
        tls.contexts()


def test_without_the_package_that_makes_keys_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setenv(tls.KEY_VARIABLE, str(tmp_path / "key.pem"))
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ImportError, match=r"with: pip install 'msrl-jax\[actors\]', or copy .*key\.pem from a machine"):
        tls.contexts(lambda line: None)
    assert not any(tmp_path.iterdir())


# Who gets in


def test_messages_cross_both_ways():
    arrays = [np.arange(3, dtype=np.int16), np.zeros((0, 2), np.float32), np.float32(2.5).reshape(()), np.eye(2, dtype=bool)]
    kinds = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]

    async def echo(peer):
        header, payload = await peer.receive(wire.size_of(kinds))
        await peer.send({"heard": header}, wire.arrays_of(payload, kinds))
        with pytest.raises(wire.WireError):
            await peer.receive()
        return "done"

    with learner(echo) as (address, ends):
        with contextlib.closing(wire.connect(address, tls.contexts()[1])) as channel:
            assert not channel.has_message()
            channel.send({"a": 1}, arrays)
            header, payload = channel.receive(wire.size_of(kinds))
        assert header == {"heard": {"a": 1}} and wait_for(ends) == ["done"]
    for x, y in zip(wire.arrays_of(payload, kinds), arrays, strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(wire.WireError, match="14 bytes of arrays instead of 2"):
        wire.arrays_of(payload, [jax.ShapeDtypeStruct((1,), np.int16)])


@pytest.mark.parametrize(
    "message",
    [
        wire._LENGTHS.pack(2**20 + 1, 0),
        wire._LENGTHS.pack(2, 101) + b"{}",
        wire._LENGTHS.pack(2, 2**63) + b"{}",
        wire._LENGTHS.pack(3, 0) + b"[1]",
        wire._LENGTHS.pack(4, 0) + b"\xff\xfe{}",
        wire._LENGTHS.pack(9**5, 0) + b"[" * 9**5,
    ],
    ids=["header", "arrays", "huge", "list", "no text", "deep"],
)
def test_a_message_that_is_too_large_or_none_ends_its_connection(message):
    async def receive(peer):
        await peer.receive(100)

    with learner(receive) as (address, ends):
        with contextlib.closing(wire.connect(address, tls.contexts()[1])) as channel:
            channel._connection.sendall(message)
            assert is_cut(channel._connection)
        assert wait_for(ends) == [wire.WireError]


def test_who_has_no_key_or_another_one_is_not_let_in(tmp_path, other_key):
    """By plain TCP, by TLS without a certificate, and with one of another user."""
    stranger, impostor = (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) for _ in range(2))
    for context in (stranger, impostor):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    impostor.load_cert_chain(tmp_path / "other.pem")
    with learner() as (address, ends):
        with socket.create_connection(address) as plain:
            plain.sendall(b'{"versions": {}}\n' * 100)
            assert is_cut(plain)
        for context in (stranger, impostor):
            with socket.create_connection(address) as connection, contextlib.suppress(OSError):
                wrapped = context.wrap_socket(connection)
                wrapped.sendall(wire._LENGTHS.pack(2, 0) + b"{}")
                assert is_cut(wrapped)
                wrapped.close()
        with pytest.raises(PermissionError, match=r"has a different key, .*; this process has the key .*: copy the same"):
            wire.connect(address, other_key[1])
        assert "let in" not in wait_for(ends, 4)
        wire.connect(address, tls.contexts()[1]).close()
        assert wait_for(ends, 5)[-1] == "let in"


def proved(server, client):
    """Whether two ends get through the proof."""
    near, far = socket.socketpair()

    def answer():
        with contextlib.suppress(ssl.SSLError), contextlib.closing(server.wrap_socket(far, server_side=True)):
            pass

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        client.wrap_socket(near).close()
        return True
    except ssl.SSLError:
        return False
    finally:
        near.close()
        thread.join(10)


def test_neither_end_speaks_an_older_tls():
    assert proved(*tls.contexts())
    for end in (0, 1):
        pair = tls.contexts()
        pair[end].minimum_version, pair[end].maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
        assert not proved(*pair)


def test_after_the_proof_an_actor_waits_as_long_as_it_takes_and_both_ends_look_for_each_other(monkeypatch):
    """A learner may compile for minutes, and a machine that is gone says nothing."""
    monkeypatch.setattr(wire, "PATIENCE", 1.0)

    def options(connection):
        pairs = (socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_NODELAY)
        return [connection.getsockopt(*pair) for pair in pairs]

    async def late(peer):
        await peer.receive()
        await asyncio.sleep(1.2)
        await peer.send({"late": True})
        return options(peer._writer.get_extra_info("socket"))

    with learner(late) as (address, ends), contextlib.closing(wire.connect(address, tls.contexts()[1])) as channel:
        channel.send({})
        assert channel.receive()[0] == {"late": True}
        assert all(options(channel._connection)) and all(wait_for(ends)[0])


def test_the_proof_as_a_whole_has_a_deadline(monkeypatch):
    """Silence, and a byte now and then of what could be a long proof."""
    monkeypatch.setattr(wire, "PATIENCE", 0.5)
    hello = b"\x16\x03\x01\x20\x00" + bytes(1000)
    with learner() as (address, ends), socket.create_connection(address) as silent, socket.create_connection(address) as slow:
        start = time.monotonic()
        with contextlib.suppress(OSError):
            for i in range(400):
                slow.sendall(hello[i : i + 1])
                time.sleep(0.05)
        assert time.monotonic() - start < 10 and is_cut(silent)
        assert wait_for(ends, 2) == [wire.WireError] * 2


def test_an_actor_tells_nothing_to_a_learner_without_its_key(other_key, monkeypatch):
    """One with another key, one that speaks no TLS, and one that says nothing."""
    monkeypatch.setattr(wire, "PATIENCE", 0.5)
    heard = []

    def answer(listener, wrap, text):
        connection, _ = listener.accept()
        with contextlib.closing(connection), contextlib.suppress(OSError):
            if wrap:
                connection = wrap(connection, server_side=True)
            connection.sendall(text)
            connection.settimeout(10)
            heard.append(connection.recv(2**16) if wrap else b"")
            connection.close()

    cases = [(other_key[0].wrap_socket, b"", PermissionError), (None, b"HTTP/1.0 200 OK\r\n\r\n", PermissionError)]
    for wrap, text, error in cases:
        with wire.listen(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(target=answer, args=(listener, wrap, text))
            thread.start()
            with pytest.raises(error):
                msrl.elastic.act(":".join(map(str, listener.getsockname())))
            thread.join(10)
    with wire.listen(("127.0.0.1", 0)) as listener, pytest.raises(wire.WireError):
        wire.connect(listener.getsockname(), tls.contexts()[1])
    assert not any(heard)


def test_an_actor_that_does_not_read_does_not_hold_up_the_end(monkeypatch):
    """A suspended one: parameters that fill its buffers are on their way, and what serves it waits."""
    monkeypatch.setattr(actor_pool, "_LINGER", 0.2)

    async def end(peer):
        async def serve():
            await peer.send({}, [np.zeros(2**23)])
            await peer.receive()

        serving = asyncio.create_task(serve())
        await asyncio.sleep(0.1)
        full = SimpleNamespace(_serving={serving: peer}, _actors={}, _opened=asyncio.Event())
        start = time.monotonic()
        await actor_pool.ActorPool._dismiss(full, {"over": True})  # type: ignore[arg-type]
        ended, waits = time.monotonic() - start, not serving.done()
        peer.cut()
        with contextlib.suppress(wire.WireError):
            await serving
        return ended if waits else "gone"

    with learner(end) as (address, ends), contextlib.closing(wire.connect(address, tls.contexts()[1])):
        assert 0.1 < wait_for(ends)[0] < 10
