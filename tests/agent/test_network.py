"""Ports and interfaces, with made-up interfaces. tests/group/test_namespaces.py has real networks."""

import asyncio
import contextlib
import errno
import os
import socket
import time
from typing import Any

import pytest

from rankup.agent import network
from rankup.agent.network import Link, chosen_address, interface_variables, listen
from rankup.errors import UserError

MACHINE = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "192.168.50.5", "down0": ""}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: dict.fromkeys(MACHINE))
    monkeypatch.setattr(network, "address_of", lambda name: MACHINE.get(name, ""))
    monkeypatch.setattr(network, "interface_of", lambda ip: {v: k for k, v in MACHINE.items()}.get(ip, ""))


@pytest.mark.usefixtures("machine")
def test_all_libraries_use_the_interface_that_reaches_the_others() -> None:
    found = interface_variables({}, "192.168.50.5")
    assert found == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "TP_SOCKET_IFNAME": "ib0"}


@pytest.mark.usefixtures("machine")
def test_users_interface_is_kept_unless_it_is_empty() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "ib0,eth0", "NCCL_SOCKET_IFNAME": "^docker0", "TP_SOCKET_IFNAME": ""}
    assert interface_variables(environ, "10.0.0.5") == {**environ, "TP_SOCKET_IFNAME": "eth0"}
    assert chosen_address(environ) == "192.168.50.5"
    assert chosen_address({"GLOO_SOCKET_IFNAME": ""}) == ""


@pytest.mark.parametrize("name", ["eth99", "down0"])
@pytest.mark.usefixtures("machine")
def test_interface_without_an_address_is_the_users_mistake(name: str) -> None:
    with pytest.raises(UserError, match=f"that has an address, got {name}. There are: lo, docker0, eth0, ib0[.] "):
        chosen_address({"GLOO_SOCKET_IFNAME": name})


@pytest.mark.parametrize("number", [1, 13])
def test_port_that_needs_permission_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    never: Any = None
    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(UserError, match=rf"MASTER_PORT=80 can't be opened: {os.strerror(number)}\. "):
        asyncio.run(listen(never, ip="", port=80))


# Connections ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answers", [True, False])
def test_connection_that_stands_counts_although_this_process_got_no_cpu(answers: bool) -> None:
    """A busy process looks at its clock before it looks at its connections. An address that is silent stays silent."""

    full = [socket.socket() for _ in range(4)]

    def work(listener: socket.socket) -> None:
        """Keep the event loop from running, as others do on a busy machine, until the connection stands."""
        time.sleep(0.2)
        for each in full if answers else ():
            each.close()
        is_other = answers
        while is_other:
            accepted, (_, port) = listener.accept()
            accepted.close()
            is_other = port in ports

    async def connect(listener: socket.socket) -> None:
        asyncio.get_running_loop().call_soon(work, listener)
        (await Link.connect("127.0.0.1", listener.getsockname()[1], timeout_s=0.1)).close()

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as held:
        for each in full:  # the kernel drops what comes after the first ones, and a client repeats it after 1 s
            held.enter_context(each).setblocking(False)
            each.connect_ex(listener.getsockname())
        ports = {each.getsockname()[1] for each in full}
        with contextlib.nullcontext() if answers else pytest.raises(TimeoutError):
            asyncio.run(connect(listener))


def test_all_members_of_a_large_job_may_connect_at_once() -> None:
    """If the kernel drops a connection because too many wait, the member repeats it a second later."""

    async def standing() -> int:
        server = await listen(lambda *_: asyncio.sleep(0), ip="127.0.0.1", port=0)
        address = server.sockets[0].getsockname()
        with contextlib.ExitStack() as held:
            members = [held.enter_context(socket.socket()) for _ in range(300)]
            for member in members:  # meanwhile the leader is busy
                member.setblocking(False)
                member.connect_ex(address)
            found = sum(member.connect_ex(address) in (0, errno.EISCONN) for member in members)
        server.close()
        return found

    assert asyncio.run(standing()) == 300
