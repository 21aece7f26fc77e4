"""Ports and interfaces. Real networks are in tests/group/test_namespaces.py; here the interfaces are made up."""

import asyncio
import os
import socket
from typing import Any

import pytest

from rankup.agent import network
from rankup.agent.network import address_of, choose_interface, listen, port_holder
from rankup.agent.protocol import interface_of
from rankup.errors import JoinError, LaunchError
from tests.rigs.jobs import free_port

MACHINE = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "192.168.50.5", "down0": ""}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: dict.fromkeys(MACHINE))
    monkeypatch.setattr(network, "address_of", lambda name: MACHINE.get(name, ""))
    monkeypatch.setattr(network, "interface_of", lambda ip: {v: k for k, v in MACHINE.items()}.get(ip, ""))


@pytest.mark.usefixtures("machine")
def test_the_interface_that_routes_to_the_others_is_taken_by_all_libraries() -> None:
    environ: dict[str, str] = {}
    assert choose_interface(environ, "192.168.50.5") == ""
    assert environ == {"GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "=ib0", "TP_SOCKET_IFNAME": "ib0"}


@pytest.mark.usefixtures("machine")
def test_the_users_choice_stands_and_an_empty_one_is_none() -> None:
    environ = {"GLOO_SOCKET_IFNAME": "ib0,eth0", "NCCL_SOCKET_IFNAME": "^docker0", "TP_SOCKET_IFNAME": ""}
    assert choose_interface(environ, "10.0.0.5") == ""
    assert environ == {
        "GLOO_SOCKET_IFNAME": "ib0,eth0", "NCCL_SOCKET_IFNAME": "^docker0", "TP_SOCKET_IFNAME": "eth0",
    }


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("name", "problem"), [("eth9", "that exists"), ("down0", "that has an address")])
def test_a_choice_that_cannot_work_is_named(name: str, problem: str) -> None:
    said = choose_interface({"GLOO_SOCKET_IFNAME": name}, "10.0.0.5")
    assert said.startswith(f"GLOO_SOCKET_IFNAME must name an interface {problem} on ")
    assert f", got {name}. There are: lo, docker0, eth0, ib0." in said


def test_an_interface_is_found_by_its_address_and_the_other_way_round() -> None:
    loopback = interface_of("127.0.0.1")
    assert address_of(loopback) == "127.0.0.1"
    assert interface_of("192.0.2.77") == ""
    assert address_of("no-such-interface") == ""


async def served(ip: str, port: int) -> asyncio.Server:
    async def attend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"here")
        writer.close()

    return await listen(attend, ip=ip, port=port)


def test_one_port_takes_both_families_also_where_the_system_picks_it() -> None:
    async def reach() -> None:
        server = await served("", 0)
        port = server.sockets[0].getsockname()[1]
        for host in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            reader, writer = await asyncio.open_connection(host, port)
            assert await reader.read() == b"here"
            writer.close()
        server.close()

    asyncio.run(reach())


def test_port_that_an_earlier_connection_still_holds_is_opened() -> None:
    """TIME_WAIT: the job before this one closed its connections first."""

    async def again() -> None:
        port = free_port()
        for _ in range(2):
            server = await served("", port)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b"here"
            writer.close()
            server.close()
            await server.wait_closed()

    asyncio.run(again())


def test_port_that_is_taken_is_refused_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "PORT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(JoinError, match=rf"MASTER_PORT={port} is in use on .* by pid {os.getpid()} \("):
            asyncio.run(served("", port))
        with socket.create_connection(("127.0.0.1", port)) as client:  # who connects from a port holds it too
            assert port_holder(client.getsockname()[1]).startswith(f"pid {os.getpid()} (")
    assert port_holder(free_port()) == ""


@pytest.mark.parametrize("number", [1, 13])
def test_port_that_nobody_may_open_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: Any, **more: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(LaunchError, match=rf"MASTER_PORT=80 can't be opened: {os.strerror(number)}\. "):
        asyncio.run(served("", 80))
