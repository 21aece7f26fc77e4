"""What torch's stores ask of the operating system: names, and open files."""

import contextlib
import logging
import resource
import socket

import pytest

from rankup.agent.record import RecordWriter
from rankup.env.rank_env import RankEnv
from rankup.group import meeting as network
from rankup.group.stop import StopRequest


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


def test_the_name_of_a_launchers_store_is_looked_up_before_lookups_end(monkeypatch: pytest.MonkeyPatch):
    """Else a name that only a resolver knows leads nowhere."""
    connected: list[str] = []
    monkeypatch.setattr(network, "TCPStore", lambda ip, *_, **__: connected.append(ip))
    with socket.create_server(("127.0.0.1", 0)) as store:
        launch = RankEnv(
            rank=1, world_size=2, master_addr="localhost", master_port=store.getsockname()[1], agent_store=True
        )
        network.MemberLine(
            launch, {}, attempt="a", timeout_s=60.0, log=logging.getLogger("quiet"), record=RecordWriter(None),
            stop=StopRequest(), until_formed=contextlib.ExitStack(),
        )
    assert connected == ["127.0.0.1"]
