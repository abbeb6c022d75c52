"""NIXL handshakes: who can speak to a sealed socket, where it listens, and what both ends must have in common."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

zmq = pytest.importorskip("zmq")

from corun.node.kv.handshake import MAX_REQUEST_BYTES, condition, in_words, sealed  # noqa: E402
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


@contextmanager
def another_token(address: str) -> Iterator[None]:
    with sealed(TOKEN + "x")(zmq.REQ, address) as asking:
        asking.send(b"who")
        yield


@contextmanager
def a_plain_socket(address: str) -> Iterator[None]:
    with zmq.Context() as context, context.socket(zmq.REQ) as asking:
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(address)
        asking.send(b"who")
        yield


@contextmanager
def rubbish(address: str) -> Iterator[None]:
    host, port = address.removeprefix("tcp://").split(":")
    for text in (b"\0" * 1000, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 100):
        with socket.create_connection((host, int(port))) as link:
            link.sendall(text)
    yield


@contextmanager
def a_big_request(address: str) -> Iterator[None]:
    with sealed(TOKEN)(zmq.REQ, address) as asking:
        asking.send(b"x" * (MAX_REQUEST_BYTES + 1))
        yield


@pytest.mark.parametrize("sent", [another_token, a_plain_socket, rubbish, a_big_request])
def test_others_are_not_heard_and_members_still_hear_each_other(address: str, listener: Any, sent: Any) -> None:
    with sent(address), pytest.raises(zmq.Again):
        listener.recv_multipart()
    listener.setsockopt(zmq.RCVTIMEO, WAIT_MS)
    with sealed(TOKEN)(zmq.REQ, address) as asking:
        asking.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        asking.send(b"who")
        identity, _, message = listener.recv_multipart()
        assert message == b"who"
        listener.send_multipart((identity, b"", b"me", b"now"))
        assert asking.recv_multipart() == [b"me", b"now"]


def test_it_listens_on_its_address_only(address: str, listener: Any) -> None:
    port = int(address.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=5):
        pass


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


def needed(facts: dict[str, Any], *, ranks: int = 2, made_by: Any = None, **model: Any) -> str:
    """Return the hash that peers must have, for a model of these settings."""
    make_hash = load("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata").compute_nixl_compatibility_hash
    values = {"model": "/models/a", "dtype": "bfloat16", "heads": 2, "size": 16, "layers": 4, **model}
    config = SimpleNamespace(
        model=values["model"],
        dtype=values["dtype"],
        get_total_num_kv_heads=lambda: values["heads"],
        get_head_size=lambda: values["size"],
        get_total_num_hidden_layers=lambda: values["layers"],
    )
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=config,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=True),
        ),
        backend_name="CPU_ATTN",
        transfer_topo=SimpleNamespace(cross_layers_blocks=False),
        world_size=ranks,
    )
    worker.compat_hash = make_hash(worker.vllm_config, "CPU_ATTN", False)
    found = condition(worker, made_by or make_hash, facts)
    assert config.model == values["model"], "the engine's own settings stay"
    return found


FACTS = {"weights_digest": "a", "threads": 2}


def test_a_handshake_needs_equal_facts_but_not_the_same_path() -> None:
    """vLLM's own hash has the path and leaves the weights out; their digest, in ours, says what the path cannot."""
    assert needed(FACTS) == needed(dict(reversed(FACTS.items()))) == needed(FACTS, model="/another/copy")
    others = [
        needed({**FACTS, "weights_digest": "b"}),
        needed({**FACTS, "threads": 1}),
        needed(FACTS, ranks=1),
        needed(FACTS, dtype="float16"),
        needed(FACTS, layers=5),
    ]
    assert len({needed(FACTS), *others}) == 6


def test_a_hash_that_vllm_makes_otherwise_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"NIXL compatibility hash .* 0\.26\.0"):
        needed(FACTS, made_by=lambda *_: "another version's")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (zmq.Again(), "it has not answered the NIXL handshake for 5 s"),
        (RuntimeError("NIXL compatibility hash mismatch. Local: 1, Remote: 2."), "it has other weights"),
        (RuntimeError("Remote NIXL agent engine ID mismatch. Expected a,received b."), "another engine"),
        (RuntimeError("another KV layout"), "another KV layout"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_why_a_handshake_fails_is_said_in_words(error: Exception, words: str) -> None:
    assert words in in_words(error)
