"""Who can speak to a sealed handshake socket, and where it listens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from corun.node.kv.side_channel import MAX_REQUEST_BYTES, keys, sealed  # noqa: E402
from tests.loading import load  # noqa: E402
from tests.machine import free_port  # noqa: E402

TOKEN = "cluster-" + "c" * 24
WAIT_MS = 5000
SILENCE_MS = 300


@pytest.fixture
def address() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def listener(address: str) -> Iterator[Any]:
    with sealed(TOKEN)(zmq.ROUTER, address) as found:
        found.setsockopt(zmq.RCVTIMEO, SILENCE_MS)
        yield found


def test_members_hear_each_other(address: str, listener: Any) -> None:
    listener.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    with sealed(TOKEN)(zmq.REQ, address) as asking:
        asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        asking.send(b"who")
        identity, _, message = listener.recv_multipart()
        assert message == b"who"
        listener.send_multipart((identity, b"", b"me", b"now"))
        assert asking.recv_multipart() == [b"me", b"now"]


def test_another_token_is_not_heard(address: str, listener: Any) -> None:
    with sealed(TOKEN + "x")(zmq.REQ, address) as asking:
        asking.send(b"who")
        with pytest.raises(zmq.Again):
            listener.recv_multipart()


def test_a_plain_socket_is_not_heard(address: str, listener: Any) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(address)
        asking.send(b"who")
        with pytest.raises(zmq.Again):
            listener.recv_multipart()


def test_rubbish_does_no_harm(address: str, listener: Any) -> None:
    host, port = address.removeprefix("tcp://").split(":")
    for rubbish in (b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100):
        with socket.create_connection((host, int(port))) as link:
            link.sendall(rubbish)
    with pytest.raises(zmq.Again):
        listener.recv_multipart()
    test_members_hear_each_other(address, listener)


def test_a_big_request_is_dropped(address: str, listener: Any) -> None:
    with sealed(TOKEN)(zmq.REQ, address) as asking:
        asking.send(b"x" * (MAX_REQUEST_BYTES + 1))
        with pytest.raises(zmq.Again):
            listener.recv_multipart()


def test_it_listens_on_its_address_only(address: str, listener: Any) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=5):
        pass


def test_keys_follow_from_the_token_and_do_not_show_it() -> None:
    assert keys(TOKEN) == keys(TOKEN) != keys(TOKEN + "x")
    assert all(len(key) == 40 and TOKEN.encode() not in key for key in keys(TOKEN))


def test_vllms_listener_answers_members_only(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the token's file, sockets of both halves of the connector are sealed; what a stranger sends does no harm."""
    connector = load("corun.node.kv.connector")
    base_scheduler, base_worker = connector.base_scheduler, connector.base_worker
    for module in (base_scheduler, base_worker):
        monkeypatch.setattr(module, "zmq_ctx", module.zmq_ctx)  # To be restored.
    (tmp_path / "token").write_text(TOKEN)
    connector._seal(str(tmp_path / "token"))
    assert base_scheduler.zmq_ctx is base_worker.zmq_ctx
    host, port = address.removeprefix("tcp://").split(":")
    ready, stop = threading.Event(), threading.Event()
    arguments = ({(0, 0): b"metadata"}, ready, stop, host, int(port))
    listen = base_scheduler.NixlBaseConnectorScheduler._nixl_handshake_listener
    listener = threading.Thread(target=listen, args=arguments, daemon=True)
    listener.start()
    assert ready.wait(WAIT_MS / 1000)
    with zmq.Context() as context, context.socket(zmq.REQ) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RCVTIMEO, SILENCE_MS)
        stranger.connect(address)
        stranger.send(b"\xc1 no msgpack")
        with pytest.raises(zmq.Again):
            stranger.recv_multipart()
    with base_worker.zmq_ctx(zmq.REQ, address) as member:
        member.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        member.send(base_worker.msgspec.msgpack.encode((base_worker.GET_META_MSG, 0, 0)))
        assert member.recv_multipart()[0] == b"metadata"
    stop.set()
    listener.join(WAIT_MS / 1000)
    assert not listener.is_alive()
