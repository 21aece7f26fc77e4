"""Joining: whoever is missing, double, different or in the way is named, on every rank, within the bound, with the
right code.

Real processes. The failures run side by side, as each mostly waits for its deadline. Why rank 0 is not there:
tests/agent/test_meeting.py; on machines of their own: test_namespaces.py.
"""

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rankup.agent.logs import host_name
from tests.rigs import jobs
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import environment, free_port, wait_for
from tests.rigs.single_rank import BOUND_S, NOISE, TINY, Rank, Starter, all_said, starting

JOIN_S = 10  # two dozen ranks start beside each other, and those of one case have to meet within it
HOST = host_name()


@pytest.fixture(scope="module")
def begin(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with starting(forks, tmp_path_factory.mktemp("runs")) as starter:
        yield starter


# Failures that end by themselves ------------------------------------------------------------------------------


@dataclass
class Failures:
    ranks: dict[str, list[Rank]]
    port: dict[str, int]

    def of(self, name: str, code: int) -> list[str]:
        return all_said(self.ranks[name], code)


@pytest.fixture(scope="module")
def web_server() -> Iterator[tuple[int, int]]:
    """Port and pid of a service that is not ours."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    wait_for_port(port)
    yield port, server.pid
    server.kill()
    server.wait()


def wait_for_port(port: int) -> None:
    """Wait until a process listens there."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(f"port {port}", listens)


def wait_for_connection(rank: Rank, port: int) -> None:
    """Wait until it has reached rank 0."""
    wait_for(f"a connection to {port}", lambda: any(
        each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process(rank.process.pid).net_connections("tcp")
    ))


@pytest.fixture(scope="module")
def failures(begin: Starter, web_server: tuple[int, int]) -> Failures:
    """All cases at once."""
    ports = {name: free_port() for name in ("missing", "double", "sizes", "settings", "taken", "stopped", "loopback")}
    ports["web"] = web_server[0]

    def case(name: str, *ranks: tuple[int, int] | tuple[int, int, str], **env: str) -> list[Rank]:
        started = []
        for rank, world_size, *more in ranks:
            arguments = str(more[0]).split() if more else []
            started.append(begin(int(rank), int(world_size), ports[name], name, *arguments, join_s=JOIN_S, **env))
        return started

    nodes = "--simulated-nodes"
    ranks = {
        "missing": [
            *case("missing", (0, 4, nodes), (1, 4, nodes), GROUP_RANK="0", LOCAL_WORLD_SIZE="2"),
            *case("missing", (2, 4, nodes), GROUP_RANK="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
        ],
        "double": case("double", (0, 3), (1, 3), (1, 3)),
        "sizes": case("sizes", (0, 2), (1, 4)),
        "settings": case("settings", (0, 3), (1, 3, "--lr 0.5 --seed 3"), (2, 3)),
        "taken": [begin(0, 2, ports["taken"], "taken", join_s=3 * JOIN_S)],  # there when the second gives up
        "loopback": case("loopback", (0, 2), MASTER_ADDR="localhost", LOCAL_WORLD_SIZE="1", GROUP_RANK="0"),
        "web": case("web", (0, 2), (1, 2)),
    }
    wait_for_port(ports["taken"])
    ranks["taken"] += case("taken", (0, 2))
    stopped = begin(0, 3, ports["stopped"], "stopped")
    ranks["stopped"] = case("stopped", (1, 3))
    wait_for_connection(ranks["stopped"][0], ports["stopped"])
    stopped.process.signal("SIGSTOP")
    ranks["stopped"] += case("stopped", (2, 3))
    return Failures(ranks, ports)


def test_a_missing_rank_is_named_by_all_others(failures: Failures):
    for said in failures.of("missing", 170):
        assert f"rank 3 of 4 (on node 1 of 2) has not joined after {JOIN_S} s (joined: 0-2 on {HOST})" in said


def test_an_error_of_all_is_printed_by_one_rank_of_the_host(failures: Failures):
    failures.of("missing", 170)
    assert sum("has not joined" in rank.process.output for rank in failures.ranks["missing"]) == 1


def test_a_foreign_service_on_the_port_is_named(failures: Failures, web_server: tuple[int, int]):
    first, other = failures.of("web", 170)
    assert re.search(rf"MASTER_PORT={web_server[0]} is in use on {HOST} by pid {web_server[1]} \(.*http\.server", first)
    assert "does not answer as a rendezvous store: another service holds the port" in other


def test_a_second_rank_0_is_told_who_holds_the_port(failures: Failures):
    first, second = failures.of("taken", 170)
    holder = failures.ranks["taken"][0].process.pid
    taken = f"MASTER_PORT={failures.port['taken']} is in use on {HOST} by pid {holder}"
    assert taken in failures.ranks["taken"][1].said
    assert "a second process with RANK=0" in second
    assert "rank 1 of 2 has not joined" in first


def test_a_stopped_rank_0_holds_nobody(failures: Failures):
    first, late = failures.of("stopped", 170)
    address = f"127.0.0.1:{failures.port['stopped']}"
    assert f"rank 0 at {address} has said nothing for " in first
    assert "or the process of rank 0 is stopped" in late


def test_both_holders_of_one_rank_are_named(failures: Failures):
    one, two = (rank.process.pid for rank in failures.ranks["double"][1:])
    for said in failures.of("double", 170):
        assert "rank 1 was claimed twice: by" in said
        assert f"{HOST} (pid {one})" in said
        assert f"{HOST} (pid {two})" in said


def test_world_sizes_that_differ_are_named_with_their_ranks(failures: Failures):
    pids = [rank.process.pid for rank in failures.ranks["sizes"]]
    for said in failures.of("sizes", 170):
        assert f"rank 1 on {HOST} (pid {pids[1]}) was started with WORLD_SIZE=4" in said
        assert f"rank 0 on {HOST} (pid {pids[0]}) with WORLD_SIZE=2" in said


def test_settings_that_differ_are_named_with_ranks_and_values(failures: Failures):
    for said in failures.of("settings", 2):
        got = f"got 0 on ranks 0, 2 ({HOST}) and 3 on rank 1 ({HOST})"
        assert f"setting seed must be the same on all ranks, {got}" in said
        assert "setting lr must be the same" in said
        assert "setting model" not in said


def test_localhost_on_several_nodes_is_refused_at_once(failures: Failures):
    (said,) = failures.of("loopback", 2)
    assert "MASTER_ADDR=localhost on 2 nodes: each node would wait for itself" in said
    assert "waiting for" not in said


def test_another_version_of_the_program_on_one_rank_is_named(begin: Starter, tmp_path: Path):
    for changed in ("rankup/errors.py", "train/loop.py"):
        folder = Path(changed).parts[0]
        shutil.copytree(jobs.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "samples"))
        with (tmp_path / changed).open("a") as file:
            file.write("# a change that nobody pulled on the other node\n")
    port = free_port()
    first = begin(0, 2, port, "code")
    line = (sys.executable, tmp_path / "train" / "main.py", "train", *TINY, "--name", "code", "--run-dir", tmp_path)
    with jobs.ended(jobs.start(*line, env={**jobs.rank_env(1, 2, port), "PYTHONPATH": ""})) as other:
        assert [first.wait(), *other.wait(BOUND_S)] == [2, 2], first.said + other.output
    got = rf"got \w+ on rank 0 \({HOST}\) and \w+ on rank 1"
    for code in ("program code", "rankup code"):
        assert re.search(rf"{code} must be the same on all ranks, {got}", first.said), first.said


def test_code_is_compared_as_it_was_imported(forks: Forks, tmp_path: Path):
    """A rank that is forked anew after `git pull` runs what its server imported, as the ranks that it meets do."""
    pulled = tmp_path / "train" / "group.py"
    pulled.parent.mkdir(parents=True)
    pulled.touch()
    forks.ends(
        "train", *TINY, "--run-dir", tmp_path, "--name", "run", world_size=2, env={"PULLED": str(pulled)},
        preload="tests.rigs.single_rank:pull_code",
    )


# Coming and going ---------------------------------------------------------------------------------------------


def finished(*ranks: Rank, noise: re.Pattern[str] = NOISE) -> None:
    """All ended well, and said nothing that would alarm a user."""
    said = "\n".join(all_said([*ranks], 0))
    assert not noise.search(said), said


def test_a_rank_killed_while_joining_takes_its_place_again(begin: Starter):
    port = free_port()
    first, dying = begin(0, 3, port, "again"), begin(1, 3, port, "again")
    wait_for_connection(dying, port)
    dying.process.signal("SIGKILL")
    last = begin(2, 3, port, "again")
    wait_for_connection(last, port)  # now every rank is in the roster, but one is dead
    finished(first, last, begin(1, 3, port, "again"))


def test_rank_0_killed_while_joining_is_found_again(begin: Starter):
    port = free_port()
    dying, other = begin(0, 3, port, "main-again"), begin(1, 3, port, "main-again")
    wait_for_connection(other, port)
    dying.process.signal("SIGKILL")
    finished(other, begin(2, 3, port, "main-again"), begin(0, 3, port, "main-again"))


def test_a_signal_ends_a_join_at_once(begin: Starter):
    port = free_port()
    ranks = [begin(rank, 3, port, "signal", join_s=3600) for rank in (0, 1)]
    wait_for_connection(ranks[1], port)
    for rank in ranks:
        rank.process.signal("SIGTERM")
    assert [rank.wait() for rank in ranks] == [143, 143], ranks[0].said


@pytest.fixture
def endless(begin: Starter) -> Iterator[tuple[int, list[Rank]]]:
    """The port and the two ranks of a job that has begun to train."""
    port = free_port()
    long = ("--max-steps", "1000000", "--save-every-steps", "1000000")
    ranks = [begin(rank, 2, port, f"endless-{port}", *long) for rank in (0, 1)]
    ranks[0].wait_for("ready after")
    yield port, ranks
    Job([rank.process for rank in ranks]).kill()


def test_a_rank_too_many_is_told_who_has_its_place(begin: Starter, endless: tuple[int, list[Rank]]):
    port, ranks = endless
    late = begin(1, 2, port, "late", join_s=JOIN_S)
    assert late.wait() == 170
    assert f"was complete before this rank came, with rank 1 on {HOST} (pid {ranks[1].process.pid})" in late.said
    assert [rank.process.code for rank in ranks] == [None, None], "the job must not notice"


def test_a_rank_that_finds_a_dying_attempt_waits_for_the_next(begin: Starter, endless: tuple[int, list[Rank]]):
    port, (main, lost) = endless
    lost.process.signal("SIGKILL")
    early = begin(1, 2, port, "next")
    early.wait_for("rank 1 of 2")
    assert main.wait() == 171, main.said
    finished(early, begin(0, 2, port, "next"), noise=re.compile("Traceback"))


def test_a_fresh_run_is_not_begun_anew_by_a_restart_of_the_other_node(begin: Starter):
    """torchrun's agent whose rank failed counts a restart, the one that follows it does not."""
    torchrun = {"TORCHELASTIC_RUN_ID": "test", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for restarts, more in (("0", ()), ("1", ("--fresh", "--max-steps", "2"))):
        port, ranks = free_port(), list[Rank]()
        for rank, count in enumerate(("0", restarts)):
            own = {**torchrun, "GROUP_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": count}
            ranks.append(begin(rank, 2, port, "fresh", "--simulated-nodes", *more, **own))
        finished(*ranks)
    assert "epoch 2:" in ranks[0].said
    assert "the earlier run was moved" not in ranks[0].said
