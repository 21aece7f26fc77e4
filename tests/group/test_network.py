"""Addresses, ports and interfaces of this machine as the program sees them."""

import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rigs.jobs import free_port
from train.group import network
from train.group.network import (
    Connection,
    address_of,
    explain_connection,
    interface_of,
    interfaces,
    is_own_address,
    local_ip_towards,
    port_holder,
    try_connect,
)


@pytest.fixture
def listener() -> Iterator[int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))
        sock.listen()
        yield sock.getsockname()[1]


def test_a_connection_tells_both_addresses(listener: int):
    assert try_connect("127.0.0.1", listener, timeout_s=5) == Connection(None, "", "127.0.0.1", "127.0.0.1")


def test_a_refused_connection_is_told_from_a_silent_one(listener: int):
    assert try_connect("127.0.0.1", free_port(), timeout_s=5).problem == "refused"
    with socket.socket() as full:
        # A queue that is full drops what comes, as a firewall does
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for sock in waiting:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        assert try_connect("127.0.0.1", port, timeout_s=0.5).problem == "silent"
        for sock in waiting:
            sock.close()


@pytest.mark.parametrize("name", ["a" * 64 + ".example", "two..dots"])
def test_a_name_that_can_be_none_does_not_resolve(name: str):
    # Refused without asking a server, of which a test machine may have none
    assert try_connect(name, free_port(), timeout_s=5).problem == "name"


def test_every_problem_has_its_own_explanation():
    problems = ["name", "refused", "silent", "route", "other"]
    texts = {explain_connection(Connection(problem, "why"), "host", 29500) for problem in problems}
    assert len(texts) == len(problems)
    assert all("host" in text for text in texts)


def test_a_refused_loopback_address_is_explained():
    assert "A loopback address is each machine itself" in explain_connection(Connection("refused"), "localhost", 29500)
    assert "loopback" not in explain_connection(Connection("refused"), "node0", 29500)


def test_the_holder_of_a_port_is_named_with_its_program(listener: int):
    assert port_holder(listener).startswith(f"pid {os.getpid()} (")


def test_who_connects_from_a_port_holds_it_too(listener: int):
    port = free_port()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", port))
        sock.connect(("127.0.0.1", listener))
        assert port_holder(port).startswith(f"pid {os.getpid()} (")


def test_a_free_port_has_no_holder():
    assert port_holder(free_port()) == ""


def test_an_interface_is_found_by_its_address_and_the_other_way_round():
    (loopback,) = [name for name in interfaces() if address_of(name) == "127.0.0.1"]
    assert interface_of("127.0.0.1") == loopback
    assert interface_of("192.0.2.77") is None
    assert address_of("no-such-interface") == ""


def test_the_way_to_a_loopback_address_starts_at_one():
    assert local_ip_towards("127.0.0.1") == "127.0.0.1"


def test_own_addresses_are_known():
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.77")


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every change of the services that hosts are looked up by."""
    asked: list[str] = []
    monkeypatch.setattr(network, "_ask_for_names", asked.append)
    return asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("passwd: files\nhosts:  files mymachines [NOTFOUND=return] dns # why\n",
         "files mymachines [NOTFOUND=return] dns"),
        ("passwd: files\n", "files dns"),
    ],
)
def test_names_are_looked_up_as_before_after_the_last_block(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, services: list[str], text: str, expected: str
):
    monkeypatch.setattr(network, "SWITCH", tmp_path / "nsswitch.conf")
    network.SWITCH.write_text(text)
    with network.no_name_lookups():
        with network.no_name_lookups():
            assert services == ["files"]
        assert services == ["files"], "one block is still entered"
    assert services == ["files", expected]


def test_without_lookups_an_address_without_a_name_costs_no_time():
    # 192.0.2.1 is for documentation: no file and no network knows it
    with network.no_name_lookups():
        assert socket.getnameinfo(("192.0.2.1", 80), socket.NI_NUMERICSERV) == ("192.0.2.1", "80")
    assert socket.gethostbyname("localhost")


def test_a_port_that_connects_to_itself_is_a_closed_one():
    # Where the system chooses the very port for our side that we connect to, the connection succeeds
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        number = port.getsockname()[1]
    with socket.socket() as both:
        both.bind(("127.0.0.1", number))
        both.connect(("127.0.0.1", number))
        assert both.getsockname() == both.getpeername()
        tried = network.connection_of(both)
    assert tried.problem == "refused"


def test_the_limit_of_open_files_is_raised_as_far_as_is_needed_and_allowed(monkeypatch: pytest.MonkeyPatch):
    limits = {"now": (1024, 20000)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: limits.update(now=new))
    network.allow_connections(100)
    assert limits["now"] == (1024, 20000)
    network.allow_connections(4096)
    assert limits["now"] == (4096 + network.OTHER_FILES, 20000)
    network.allow_connections(100_000)
    assert limits["now"] == (20000, 20000)
