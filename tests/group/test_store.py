"""The port and the store behind it."""

import os
import socket
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore

from rankup.env.rank_env import RankEnv
from rankup.errors import LaunchError
from tests.rigs.jobs import free_port
from train.group.store import connect_store, open_port, port_in_use, serve_store, wait_for
from train.group.waiting import Wait
from train.process.log import Log


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which this test listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))
        sock.listen()
        yield sock.getsockname()[1]


def test_a_port_that_is_taken_is_not_opened(port: int):
    assert open_port(port) is None
    assert f"MASTER_PORT={port} is in use on node0 by pid " in str(port_in_use(port, "node0"))


def test_a_port_that_an_earlier_connection_still_holds_is_opened():
    # TIME_WAIT: the attempt before this one closed its connections first
    port = free_port()
    listener = open_port(port)
    assert listener is not None
    with socket.create_connection(("127.0.0.1", port)) as client:
        accepted, _ = listener.accept()
        accepted.close()
        client.recv(1)
    listener.close()
    again = open_port(port)
    assert again is not None
    again.close()


@pytest.mark.parametrize("number", [1, 13])
def test_a_port_that_nobody_may_open_is_the_users_mistake(monkeypatch: pytest.MonkeyPatch, number: int):
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(LaunchError, match=rf"MASTER_PORT=80 can't be opened: {os.strerror(number)}\. "):
        open_port(80)


@pytest.mark.parametrize(("value", "expected"), [("0", False), ("1", True), (None, True)])
def test_torchs_switch_for_libuv_is_honoured(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool):
    monkeypatch.delenv("USE_LIBUV", raising=False)
    if value is not None:
        monkeypatch.setenv("USE_LIBUV", value)
    listener = open_port(free_port())
    assert listener is not None
    port = listener.getsockname()[1]
    wait = Wait(RankEnv(), timeout_s=60, log=Log())
    server = serve_store(listener, wait)
    client = connect_store("127.0.0.1", port, timeout_s=60)
    client.set("key", "value")
    assert server.get("key") == b"value"
    assert server.libuvBackend is expected
    wait.no_lookups.close()


def test_waiting_for_a_key_ends_when_it_is_set_or_the_time_is_over():
    store = HashStore()
    store.set("there", "")
    assert wait_for(store, ["there"], 60)
    assert not wait_for(store, ["there", "not there"], 0.01)


def test_a_store_for_this_machine_alone_is_open_to_no_other():
    listener = open_port(free_port(), "127.0.0.1")
    assert listener is not None
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert open_port(listener.getsockname()[1]) is None  # and nobody else takes the port at other addresses
