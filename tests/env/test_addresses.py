"""Ports that do not collide, loopback names, --init-method, and the first host of Slurm's lists."""

import socket
from pathlib import Path

import pytest

from rankup.env.addresses import free_port, is_loopback, parse_url, port_for
from rankup.env.launchers import first_host
from rankup.errors import LaunchError


def test_port_is_none_of_known_services_nor_of_outgoing_connections():
    known = {6000, 10250, 11211, 11434, 23456, 27017, 29500}
    for job in range(0, 40000, 7):
        port = port_for(job)
        assert 10000 <= port < 30000
        assert port not in known


def test_port_differs_between_neighbouring_jobs_restarts_and_steps():
    assert len({port_for(job) for job in range(123456, 123456 + 19000)}) == 19000
    assert len({port_for(123456, restart=restart) for restart in range(100)}) == 100
    assert len({port_for(123456, step=step) for step in range(100)}) == 100


def test_free_port_is_one_that_can_be_opened_and_no_known_service():
    for _ in range(20):
        port = free_port()
        assert port < 32768
        assert port not in (10250, 29400, 29500)
        with socket.socket() as listener:
            listener.bind(("", port))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("LOCALHOST.", True), ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True),
        ("::ffff:127.0.0.1", True), ("0.0.0.0", True), ("10.0.0.1", False), ("node0", False), ("", False),
        ("fe80::1%eth0", False),
    ],
)
def test_loopback_is_every_name_and_address_of_the_machine_itself(host: str, expected: bool):
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n[1-3,7],m05", "n1"), ("solo", "solo"), ("a.example,b", "a.example"), ("n[08-11]", "n08"),
        ("gpu-[3,1]-ib", "gpu-3-ib"), ("r[1-2]n[0-1]", "r1n0"), ("m05,n[1-2]", "m05"),
    ],
)
def test_first_host_is_the_first_of_a_nodelist(nodelist: str, host: str):
    assert first_host(nodelist) == host


def test_url_stands_for_the_variables(tmp_path: Path):
    assert parse_url("tcp://node0:29400") == {"MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    assert parse_url("tcp://[fd00::1]:29400/") == {"MASTER_ADDR": "fd00::1", "MASTER_PORT": "29400"}
    assert parse_url(f"file://{tmp_path}/a%20b")["RANKUP_FILE"] == f"{tmp_path}/a b"


@pytest.mark.parametrize(
    "url",
    [
        "tcp://node0", "tcp://:29400", "tcp://user@node0:1", "http://node0:29400", "node0:29400", "env://",
        "file://node0/x", "file:///", "tcp://node0:29400?rank=1",
    ],
)
def test_url_of_another_kind_is_refused(url: str):
    with pytest.raises(LaunchError, match="--init-method must be tcp://HOST:PORT or file:///PATH, got"):
        parse_url(url)


@pytest.mark.parametrize("name", ["no/such/folder/meeting", "."])
def test_url_of_no_possible_file_is_refused(tmp_path: Path, name: str):
    with pytest.raises(LaunchError, match="must name a file in a folder that exists"):
        parse_url(f"file://{tmp_path}/{name}")
