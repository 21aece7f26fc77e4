"""Which interface a rank takes. Real networks are in test_namespaces.py; here the machine's interfaces are made up."""

import os
from collections.abc import Sequence

import pytest

from rankup.errors import LaunchError
from train.group import network
from train.group.connectivity import choose_interface
from train.group.members import Member, Paths
from train.process.log import Log

MACHINE = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.5", "ib0": "192.168.50.5", "down0": ""}


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: list(MACHINE))
    monkeypatch.setattr(network, "address_of", lambda name: MACHINE.get(name, ""))
    monkeypatch.setattr(network, "interface_of", lambda ip: {v: k for k, v in MACHINE.items()}.get(ip))
    own = {"10": "10.0.0.5"}
    monkeypatch.setattr(network, "local_ip_towards", lambda ip: own.get(ip.partition(".")[0], "192.168.50.5"))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "x")  # so that what the code sets is undone
        monkeypatch.delenv(name)


def choose(members: Sequence[Member], rank: int) -> tuple[str, str]:
    return choose_interface(members[rank], Paths.of(members), Log())


def test_the_interface_that_routes_to_the_master_is_taken_by_all_libraries():
    members = [Member(0), Member(1, local_ip="192.168.50.5", master_ip="192.168.50.1")]
    assert choose(members, 1) == ("ib0", "192.168.50.5")
    assert [os.environ[f"{name}_SOCKET_IFNAME"] for name in ("GLOO", "NCCL", "TP")] == ["ib0", "=ib0", "ib0"]


def test_rank_0_takes_the_address_that_others_reached_it_at():
    assert choose([Member(0), Member(1, local_ip="10.0.0.9", master_ip="192.168.50.5")], 0) == ("ib0", "192.168.50.5")


def test_behind_a_service_rank_0_routes_to_the_others():
    # The address that answered is the Service's, and no interface of this machine has it
    assert choose([Member(0), Member(1, local_ip="10.0.0.9", master_ip="172.20.1.1")], 0) == ("eth0", "10.0.0.5")


def test_a_rank_beside_the_master_does_not_take_loopback():
    beside = Member(1, local_ip="127.0.0.1", master_ip="127.0.1.1")
    assert choose([Member(0), beside, Member(2, local_ip="10.0.0.9", master_ip="10.0.0.5")], 1) == ("eth0", "10.0.0.5")


def test_on_one_machine_loopback_serves():
    assert choose([Member(0), Member(1, local_ip="127.0.0.1", master_ip="127.0.0.1")], 0) == ("lo", "127.0.0.1")


def test_the_users_choice_stands(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0,eth0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    assert choose([Member(0), Member(1, local_ip="10.0.0.5", master_ip="10.0.0.1")], 1) == ("ib0", "192.168.50.5")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0,eth0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "^docker0"


@pytest.mark.parametrize(("name", "problem"), [("eth9", "that exists"), ("down0", "that has an address")])
def test_a_choice_that_cannot_work_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, problem: str):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    said = f"must name an interface {problem} on .*, got {name}. There are: lo, docker0, eth0"
    with pytest.raises(LaunchError, match=said):
        choose([Member(0), Member(1)], 0)


def test_an_empty_choice_is_none(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    choose([Member(0), Member(1, local_ip="10.0.0.5", master_ip="10.0.0.1")], 1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
