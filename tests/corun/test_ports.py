from __future__ import annotations

import socket

import pytest
from aiohttp import web

from corun.errors import InvalidArgumentError, UnavailableError
from corun.launch.members import free_ports
from corun.rpc.ports import bound, reserve
from corun.rpc.server import GrpcServer

HOST = "127.0.0.1"


def is_free(port: int) -> bool:
    """Whether a process that wants a port for itself would get this one, as by asking for any."""
    with socket.socket() as other:
        try:
            other.bind((HOST, port))
        except OSError:
            return False
    return True


def test_a_kept_port_is_given_to_nobody_until_it_is_let_go() -> None:
    with bound(HOST) as kept:
        port = kept.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
    assert not is_free(reserve(HOST))
    first = free_ports(HOST, 0, 3)
    assert [is_free(first + index) for index in range(3)] == [False] * 3


def test_ports_of_a_row_that_is_not_free_are_let_go() -> None:
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        before = taken.getsockname()[1] - 1
        was_free = is_free(before)
        with pytest.raises(InvalidArgumentError, match=f"port = {before}: cannot be listened on"):
            free_ports(HOST, before, 2)
        assert is_free(before) is was_free


async def test_our_servers_listen_on_a_kept_port_and_only_one_does() -> None:
    port = free_ports(HOST, 0)
    server, second = GrpcServer(HOST, port), GrpcServer(HOST, port)
    await server.start()
    try:
        with pytest.raises(UnavailableError, match="is the port in use"):
            await second.start()
        with pytest.raises(OSError, match="Address already in use"):
            bound(HOST, port)
    finally:
        await server.stop(0.0)
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, HOST, free_ports(HOST, 0))
    await site.start()
    await runner.cleanup()
