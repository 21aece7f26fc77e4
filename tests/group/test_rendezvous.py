"""Joining: ranks that are missing, double, different or in the way are named on every rank, in time, with the right
code.

Real processes. The failures run at the same time, because most of them only wait. test_meeting.py tests what else does
not fit, test_peers.py why rank 0 is not there, and test_namespaces.py separate machines."""

import asyncio
import contextlib
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rankup.agent.logs import host_name
from rankup.agent.network import Link, greeting
from tests.rigs import jobs
from tests.rigs.fork_server import Forks, Job
from tests.rigs.jobs import environment, free_port, wait_for
from tests.rigs.single_rank import BOUND_S, NOISE, TINY, Rank, Starter, all_said, starting

JOIN_S = 10  # if ranks never meet. Others get a minute, because a dozen ranks start at the same time
HOST = host_name()


@pytest.fixture(scope="module")
def begin(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with starting(forks, tmp_path_factory.mktemp("runs")) as starter:
        yield starter


# Failures that end by themselves ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def web_server() -> Iterator[int]:
    """The port of a service that is not rankup's."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"], env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    wait_for_port(port)
    yield port
    server.kill()
    server.wait()


def wait_for_port(port: int) -> None:
    """Wait until a process listens on the port."""

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_for(f"port {port}", listens)


def wait_for_connection(rank: Rank, port: int) -> None:
    """Wait until rank 0 has greeted this rank. Ranks that connect later are greeted later."""
    wait_for(f"a connection to {port}", lambda: any(
        each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for agent in psutil.Process(rank.processes[0].pid).children() for each in agent.net_connections("tcp")
    ))
    with socket.create_connection(("127.0.0.1", port)) as later:
        later.recv(1)


@pytest.fixture(scope="module")
def failures(begin: Starter, web_server: int) -> dict[str, tuple[int, list[Rank]]]:
    """All cases at once, with their ports and ranks."""
    ports = {name: free_port() for name in ("missing", "settings", "taken", "stopped")}
    ports["web"] = web_server

    def case(name: str, *ranks: tuple[int, int] | tuple[int, int, str], **more: Any) -> list[Rank]:
        started = []
        for rank, world_size, *words in ranks:
            arguments = str(words[0]).split() if words else []
            started.append(begin(int(rank), int(world_size), ports[name], name, *arguments, **more))
        return started

    ranks = {
        "missing": case("missing", (0, 4), (1, 4), (2, 4), join_s=JOIN_S),
        "settings": case("settings", (0, 3), (1, 3, "--lr 0.5 --seed 3"), (2, 3)),
        "taken": [begin(0, 2, ports["taken"], "taken", join_s=3 * JOIN_S)],  # still there when the second gives up
        "web": case("web", (0, 2), (1, 2), join_s=JOIN_S),
    }
    wait_for_port(ports["taken"])
    ranks["taken"] += case("taken", (0, 2), join_s=JOIN_S)
    stopped = begin(0, 3, ports["stopped"], "stopped")
    ranks["stopped"] = case("stopped", (1, 3), join_s=JOIN_S)
    wait_for_connection(ranks["stopped"][0], ports["stopped"])
    stopped.processes[0].signal("SIGSTOP")
    for agent in psutil.Process(stopped.processes[0].pid).children():
        agent.suspend()  # it would do so itself at its next heartbeat, and until then compare settings
    ranks["stopped"] += case("stopped", (2, 3), join_s=JOIN_S)
    return {name: (ports[name], started) for name, started in ranks.items()}


@pytest.mark.parametrize(
    ("name", "code", "texts"),
    [
        ("missing", 170, ["rank 3 of 4 has not joined after ", f" s (joined: 0-2 on {HOST})"]),
        ("web", 170, [
            ("MASTER_PORT={port} is in use on {host}", "does not answer as a rendezvous store"),
            ("another job, one that has not ended", "another service holds the port"),
        ]),
        ("taken", 170, [
            ("rank 1 of 2 has not joined", "MASTER_PORT={port} is in use on {host}"),
            ("", "a second process with RANK=0"),
        ]),
        ("stopped", 170, [
            ("rank 0 at 127.0.0.1:{port} sent no heartbeat for ", "or the process of rank 0 is stopped"),
        ]),
        ("settings", 2, [
            "rank 1 on {host} (pid {pid[1]}) differs from rank 0 on {host} (pid {pid[0]}): setting lr must be ",
            "; setting seed must be 0, got 3. ",
        ]),
    ],
)
def test_problem_is_named_on_all_ranks(
    failures: dict[str, tuple[int, list[Rank]]], name: str, code: int, texts: list[str | tuple[str, str]]
) -> None:
    port, ranks = failures[name]
    said = all_said(ranks, code)
    facts = {"port": port, "host": HOST, "pid": [rank.processes[0].pid for rank in ranks]}
    for text in texts:
        for rank, own in enumerate(said):
            assert (text if isinstance(text, str) else text[rank]).format(**facts) in own
    if name == "missing":  # one rank of the host prints the error for all
        assert sum("has not joined" in rank.processes[0].output for rank in ranks) == 1
    assert name != "settings" or not any("setting model" in own for own in said)


def test_another_version_of_the_program_is_named(begin: Starter, tmp_path: Path):
    for changed in ("rankup/errors.py", "train/loop.py"):
        folder = Path(changed).parts[0]
        shutil.copytree(jobs.ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "samples"))
        with (tmp_path / changed).open("a") as file:
            file.write("# a change that nobody pulled on the other node\n")
    port = free_port()
    first = begin(0, 2, port, "code")
    line = (sys.executable, tmp_path / "train" / "main.py", "train", *TINY, "--name", "code", "--run-dir", tmp_path)
    with jobs.ended(jobs.start(*line, env={**jobs.rank_env(1, 2, port), "PYTHONPATH": ""})) as other:
        assert [*first.wait(BOUND_S), *other.wait(BOUND_S)] == [2, 2], first.output + other.output
    for code in ("program code", "rankup code"):
        assert re.search(rf"rank 1 on {HOST} .*{code} must be \w+, got \w+", first.output), first.output


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))


def test_rank_that_may_not_open_a_file_for_each_rank_says_so(forks: Forks, tmp_path: Path) -> None:
    line = ("train", *TINY, "--batch-size=600", "--fake-samples=600", "--run-dir", tmp_path)
    env = jobs.rank_env(0, 600, free_port())
    output = forks.ends(*line, code=2, env=env, preload="tests.group.test_rendezvous:few_files")
    assert "error: ulimit -n must be at least 1456 for a job of 600 ranks, got 1024 on " in output


def test_imported_code_is_compared_not_the_files(forks: Forks, tmp_path: Path):
    """A rank that is forked after `git pull` runs the server's imported code, as the other ranks do."""
    pulled = tmp_path / "train" / "group.py"
    pulled.parent.mkdir(parents=True)
    pulled.touch()
    forks.ends(
        "train", *TINY, "--run-dir", tmp_path, "--name", "run", world_size=2, env={"PULLED": str(pulled)},
        preload="tests.rigs.single_rank:pull_code",
    )


# Coming and going ---------------------------------------------------------------------------------------------


def finished(*ranks: Rank, noise: re.Pattern[str] = NOISE) -> None:
    """Assert that all ranks ended well, and printed nothing that would alarm a user."""
    said = "\n".join(all_said([*ranks], 0))
    assert not noise.search(said), said


@pytest.mark.parametrize("killed", [0, 1])
def test_rank_killed_while_joining_can_join_again(begin: Starter, killed: int):
    port, name = free_port(), f"again-{killed}"
    ranks = [begin(rank, 3, port, name) for rank in (0, 1)]
    wait_for_connection(ranks[1], port)
    ranks.pop(killed).processes[0].signal("SIGKILL")
    ranks.append(begin(2, 3, port, name))
    if killed:
        wait_for_connection(ranks[1], port)  # now rank 0 knows every rank, but one is dead
    finished(*ranks, begin(killed, 3, port, name))


def test_signal_ends_a_join_at_once(begin: Starter):
    port = free_port()
    ranks = [begin(rank, 3, port, "signal", join_s=3600) for rank in (0, 1)]
    wait_for_connection(ranks[1], port)
    for rank in ranks:
        rank.processes[0].signal("SIGTERM")
    assert [rank.wait() for rank in ranks] == [[143], [143]], ranks[0].output


@pytest.fixture
def endless(begin: Starter) -> Iterator[tuple[int, list[Rank]]]:
    """The port and the two ranks of a job that has begun to train."""
    port = free_port()
    long = ("--max-steps", "1000000", "--save-every-steps", "1000000")
    ranks = [begin(rank, 2, port, f"endless-{port}", *long) for rank in (0, 1)]
    ranks[0].wait_for("ready after")
    yield port, ranks
    Job([rank.processes[0] for rank in ranks]).kill()


def test_rank_that_is_double_is_told_the_owner_of_its_place(begin: Starter, endless: tuple[int, list[Rank]]):
    port, ranks = endless
    late = begin(1, 2, port, "late", join_s=JOIN_S)
    assert late.wait() == [170]
    pid = ranks[1].processes[0].pid
    assert f"rank 1 was claimed twice: by rank 1 on {HOST} (pid {pid}) and by " in late.output
    assert [rank.processes[0].code for rank in ranks] == [None, None], "the surplus rank ended the job"


async def never_takes_others(port: int) -> None:
    """Assert that the job at `port` runs or is over, until its leader's process ends."""
    with contextlib.suppress(OSError):
        while True:
            with contextlib.closing(await Link.connect("127.0.0.1", port)) as link:
                said = await greeting(link, b"")
            assert said["running"] or said["over"], said
            await asyncio.sleep(0.005)


def test_rank_that_meets_a_dying_attempt_waits_for_the_next(begin: Starter, endless: tuple[int, list[Rank]]):
    port, (main, lost) = endless
    lost.processes[0].signal("SIGKILL")
    early = begin(1, 2, port, "next")
    asyncio.run(never_takes_others(port))
    early.wait_for("rank 1 of 2")
    assert main.wait() == [171], main.output
    finished(early, begin(0, 2, port, "next"), noise=re.compile("Traceback"))


def test_fresh_run_survives_a_restart_that_only_one_node_counts(begin: Starter):
    """torchrun's agent with the failed rank counts a restart. The agent that follows does not."""
    torchrun = {"TORCHELASTIC_RUN_ID": "test", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for restarts, more in (("0", ()), ("1", ("--fresh", "--max-steps", "2"))):
        port, ranks = free_port(), list[Rank]()
        for rank, count in enumerate(("0", restarts)):
            own = {**torchrun, "GROUP_RANK": str(rank), "TORCHELASTIC_RESTART_COUNT": count}
            ranks.append(begin(rank, 2, port, "fresh", *more, **own))
        finished(*ranks)
    assert "epoch 2:" in ranks[0].output
    assert "the earlier run was moved" not in ranks[0].output
