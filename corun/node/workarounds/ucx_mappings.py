"""Unmaps the GPU memory of processes that have died.

To read a peer's KV over cuda_ipc, UCX maps the peer's memory, and keeps it mapped until this process ends. The driver
keeps memory for as long as any process has it mapped. So a prefill node that crashed could not start again on its GPU
while a decode node that has read from it is alive. UCX has no call to unmap it, and its cache setting does not help,
since its check whether a peer can be reached holds a reference (cuda_ipc_md.c: `uct_cuda_ipc_is_peer_accessible`).

Therefore this module gives a dead peer a new, empty cache in UCX's table of peers and destroys the old one, with UCX's
own functions (src/uct/cuda/cuda_ipc/cuda_ipc_cache.c). It depends on the table's layout, so it works with known
versions only. Owns: that table. Must not know: vLLM, nodes, which node's memory it is.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class _WideKey(ctypes.Structure):
    """The key of UCX 1.21, where a namespace is an inode number of 64 bits."""

    _fields_ = (("pid", ctypes.c_int), ("pid_ns", ctypes.c_uint64), ("cu_device", ctypes.c_int))


class _NarrowKey(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_int), ("pid_ns", ctypes.c_uint32), ("cu_device", ctypes.c_int))


KEYS: dict[str, type[ctypes.Structure]] = {"1.21": _WideKey, "1.23": _NarrowKey}
"""The layout of `uct_cuda_ipc_cache_hash_key_t`, by version of UCX: 1.21 is in nixl 1.3, 1.23 in nixl 1.5."""


class _Table(ctypes.Structure):
    """klib's khash table (src/ucs/datastruct/khash.h). `flags` has two bits per bucket: it is empty, it was deleted."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_buckets", "size", "n_occupied", "upper_bound")),
        ("flags", ctypes.POINTER(ctypes.c_uint32)),
        ("keys", ctypes.c_void_p),
        ("vals", ctypes.POINTER(ctypes.c_void_p)),
    )


class Mappings:
    """The GPU memory of other processes that this process has mapped, by process id."""

    def __init__(self, transport: Any, key: type[ctypes.Structure]) -> None:
        """Find the table. `transport`: the loaded libuct_cuda."""
        self._transport = transport
        self._key = key
        self._table = _Table.in_dll(transport, "uct_cuda_ipc_remote_cache")  # The struct's first member is the table.
        transport.uct_cuda_ipc_create_cache.argtypes = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_char_p)
        transport.uct_cuda_ipc_create_cache.restype = ctypes.c_int8
        transport.uct_cuda_ipc_destroy_cache.argtypes = (ctypes.c_void_p,)
        transport.uct_cuda_ipc_destroy_cache.restype = None

    def pids(self) -> set[int]:
        """Return the ids of the processes whose memory is, or was, mapped here."""
        return {pid for _, pid in self._peers()}

    def drop(self, pids: Collection[int]) -> None:
        """Unmap the memory of processes that have died; raises RuntimeError if UCX has no memory left. Call this in the
        thread that starts transfers, while none runs and no peer is being connected: UCX's lock is not taken."""
        for index, pid in self._peers():
            if pid not in pids:
                continue
            fresh = ctypes.c_void_p()
            if status := self._transport.uct_cuda_ipc_create_cache(ctypes.byref(fresh), f"dead:{pid}".encode()):
                raise RuntimeError(f"UCX cannot make a cache of mappings: status {status}")
            old = self._table.vals[index]
            self._table.vals[index] = fresh.value
            self._transport.uct_cuda_ipc_destroy_cache(old)

    def _peers(self) -> Iterator[tuple[int, int]]:
        """Yield the bucket and the process id of each entry."""
        table, keys = self._table, ctypes.cast(self._table.keys, ctypes.POINTER(self._key))
        for index in range(table.n_buckets):
            if not (table.flags[index >> 4] >> ((index & 15) << 1)) & 3:
                yield index, int(keys[index].pid)


def of_this_process() -> Mappings | None:
    """Return this process's mappings; None if UCX maps no GPU memory, because its CUDA transport is not loaded, or if
    its version is not known, which is logged as a warning."""
    transport, protocol = _loaded("libuct_cuda"), _loaded("libucp")
    if transport is None or protocol is None:
        return None
    protocol.ucp_get_version_string.restype = ctypes.c_char_p
    version = protocol.ucp_get_version_string().decode()
    key = KEYS.get(version.rpartition(".")[0])
    if key is None:
        log.warning("UCX %s is not known: GPU memory of prefill nodes that crash stays taken until this ends", version)
        return None
    return Mappings(transport, key)


def _loaded(name: str) -> Any:
    """Return a library that this process has already loaded; None if it has not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    path = next((path for path in sorted(paths) if Path(path).name.startswith(name)), None)
    return None if path is None else ctypes.CDLL(path)
