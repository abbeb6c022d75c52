"""The mappings of dead peers, on a table laid out like UCX's, and on the libraries that are installed."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from corun.node.workarounds import ucx_mappings
from corun.node.workarounds.ucx_mappings import KEYS, Mappings

LIVE, EMPTY, DELETED = 0, 2, 1


class Transport:
    """UCX's table of peers with 20 buckets, and its functions for caches, which are numbers here."""

    def __init__(self, key: type[ctypes.Structure], entries: dict[int, tuple[int, int]]) -> None:
        self.destroyed: list[int] = []
        self.flags = (ctypes.c_uint32 * 2)(0xAAAAAAAA, 0xAAAAAAAA)
        self.keys, self.vals = (key * 20)(), (ctypes.c_void_p * 20)()
        for index, (pid, state) in entries.items():
            self.keys[index].pid, self.vals[index] = pid, 1000 + index
            self.flags[index >> 4] ^= (EMPTY ^ state) << 2 * (index & 15)
        self.table = ucx_mappings._Table(20, len(entries), len(entries), 15)
        self.table.flags = ctypes.cast(self.flags, ctypes.POINTER(ctypes.c_uint32))
        self.table.keys = ctypes.cast(self.keys, ctypes.c_void_p)
        self.table.vals = ctypes.cast(self.vals, ctypes.POINTER(ctypes.c_void_p))
        self.uct_cuda_ipc_create_cache = partial(self.create)
        self.uct_cuda_ipc_destroy_cache = partial(self.destroyed.append)
        self.status = 0

    def create(self, made: Any, name: bytes) -> int:
        made._obj.value = 7
        return self.status


def mappings(monkeypatch: pytest.MonkeyPatch, transport: Transport, key: type[ctypes.Structure]) -> Mappings:
    monkeypatch.setattr(ucx_mappings._Table, "in_dll", lambda library, name: library.table, raising=False)
    return Mappings(transport, key)


@pytest.mark.parametrize("key", KEYS.values())
def test_only_a_dead_peers_memory_is_let_go(monkeypatch: pytest.MonkeyPatch, key: type[ctypes.Structure]) -> None:
    transport = Transport(key, {3: (51, LIVE), 15: (52, LIVE), 16: (51, LIVE), 18: (53, DELETED)})
    found = mappings(monkeypatch, transport, key)
    assert found.pids() == {51, 52}
    found.drop({51, 53, 54})
    assert transport.destroyed == [1003, 1016]
    assert [transport.vals[i] for i in (3, 15, 16, 18)] == [7, 1015, 7, 1018], "the others keep theirs"
    assert found.pids() == {51, 52}, "the entry stays, for a process that gets the same id"


def test_a_cache_that_cannot_be_replaced_is_not_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = Transport(KEYS["1.21"], {3: (51, LIVE)})
    transport.status = -4
    with pytest.raises(RuntimeError, match="status -4"):
        mappings(monkeypatch, transport, KEYS["1.21"]).drop({51})
    assert transport.vals[3] == 1003
    assert not transport.destroyed


def test_the_layouts_are_those_of_the_known_versions() -> None:
    assert [ctypes.sizeof(KEYS[version]) for version in ("1.21", "1.23")] == [24, 12]
    assert ctypes.sizeof(ucx_mappings._Table) == 40


def test_without_ucx_there_is_nothing_to_let_go() -> None:
    assert ucx_mappings._loaded("libuct_cuda") is None
    assert ucx_mappings._loaded("libc.") is not None


def test_an_unknown_version_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    library = SimpleNamespace(ucp_get_version_string=partial(lambda: b"1.99.0"))
    monkeypatch.setattr(ucx_mappings, "_loaded", lambda name: library)
    assert ucx_mappings.of_this_process() is None
    assert "1.99.0" in caplog.text
