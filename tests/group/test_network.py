"""What torch's stores ask of the operating system: names, and open files."""

import resource
import socket
from pathlib import Path

import pytest

from rankup.group import meeting as network


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
