"""The ring: the end of a process is reported by the rank before it, and nothing that a stranger does is."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from rankup.errors import FINISHED, PeerLost
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import ROOT, free_port, rank_env
from train.group import keys, peer_watch
from train.group.join import broke_collective
from train.group.peer_watch import ENDED, PeerWatch
from train.group.store import second_connection, wait_for
from train.process.log import Log, host_name
from train.process.status import GONE, End

PATIENCE_S = 60.0
SETTINGS = (
    "--workload=tests.rigs.faulting_workload:build", "--batch-size=12", "--max-steps=12", "--eval-batch-size=4",
    "--tensorboard=false", "--progress=none", "--join-timeout-s=30",
)

# One rank of the ring that only lets itself be watched, and does what it reads
RANK = """
import os, socket, sys, time
from train.group.peer_watch import PeerWatch
listener = socket.create_server(("127.0.0.1", 0))
watch = PeerWatch(None, 1, 2, log=None)
watch.be_watched(listener)
print(listener.getsockname()[1], flush=True)
for line in sys.stdin:
    if line == "cut\\n":
        listener.accept()[0].close()
    if line == "fork\\n" and os.fork() == 0:
        time.sleep(1000)
    print("done", flush=True)
"""


class Ring:
    """Rank 0 is this process, the others are processes that are watched."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.store: Store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        self.ranks: dict[int, subprocess.Popen[str]] = {}
        self.ports: dict[int, int] = {}
        for rank in range(1, world_size):
            command = [sys.executable, "-c", RANK]
            process = subprocess.Popen(
                command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            assert process.stdout is not None
            self.ranks[rank], self.ports[rank] = process, int(process.stdout.readline())
            address = {"ip": "127.0.0.1", "port": self.ports[rank], "host": "node1"}
            self.store.set(keys.listener(rank), json.dumps(address))

    def watch(self) -> None:
        PeerWatch(second_connection(self.store), 0, self.world_size, log=Log()).start()

    def tell(self, rank: int, word: str) -> None:
        """Have that process do something, and wait until it has."""
        process = self.ranks[rank]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{word}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    def wait_until_watched(self, rank: int, times: int = 1) -> None:
        """Until a connection to it stands: it is in the queue of its listener, which /proc shows."""
        port = f":{self.ports[rank]:04X}"
        while sum(line.split()[2].endswith(port) and line.split()[3] == "01" for line in tcp()) < times:
            assert self.ranks[rank].poll() is None
            time.sleep(0.01)

    def wait_for_reports(self, count: int) -> set[int]:
        """The ranks that were reported, once there are so many."""
        assert wait_for(self.store, [keys.FAILED], PATIENCE_S)
        while self.store.add(keys.DECIDED, 0) < count:
            time.sleep(0.01)
        return {int(rank) for rank in self.store.get(keys.CAUSES).split()}

    def close(self) -> None:
        for process in self.ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it forked too
            process.communicate()


def tcp() -> list[str]:
    return Path("/proc/net/tcp").read_text().splitlines()[1:]


@pytest.fixture
def ring() -> Iterator[Callable[[int], Ring]]:
    made: list[Ring] = []

    def make(world_size: int) -> Ring:
        made.append(Ring(world_size))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_process_that_ends_is_reported_although_one_that_it_forked_lives_on(ring: Callable[[int], Ring]) -> None:
    two = ring(2)
    two.watch()
    two.wait_until_watched(1)
    two.tell(1, "fork")
    two.ranks[1].kill()
    assert two.wait_for_reports(1) == {1}
    end = End.from_json(two.store.get(keys.end(1)))
    assert (end.rank, end.host, end.state, end.why) == (1, "node1", GONE, ENDED)


def test_ranks_whose_watcher_is_gone_too_are_reported(ring: Callable[[int], Ring]) -> None:
    four = ring(4)
    four.watch()
    four.wait_until_watched(1)
    four.ranks[2].kill()
    four.ranks[2].wait()
    four.ranks[1].kill()
    assert four.wait_for_reports(2) == {1, 2}
    four.ranks[3].kill()  # watched by now: it was alive when the other two were found
    assert four.wait_for_reports(3) == {1, 2, 3}


def test_a_rank_that_has_reported_its_end_is_not_lost(ring: Callable[[int], Ring]) -> None:
    three = ring(3)
    own = End(1, "node1", "finished", FINISHED, "finished", 12).to_json()
    three.store.set(keys.end(1), own)
    three.watch()
    three.wait_until_watched(1)
    three.ranks[1].kill()
    three.wait_until_watched(2)  # it goes on with the next one, so it is through with this one
    assert not three.store.check([keys.FAILED])
    assert three.store.get(keys.end(1)).decode() == own


def test_a_connection_that_is_cut_is_no_end(ring: Callable[[int], Ring], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_watch, "YOUNG_S", 0.0)
    two = ring(2)
    two.watch()
    two.wait_until_watched(1)
    two.tell(1, "cut")  # as a firewall does with one that was idle for long
    two.wait_until_watched(1)
    assert not two.store.check([keys.FAILED])
    two.ranks[1].kill()
    assert two.wait_for_reports(1) == {1}


def test_strangers_at_the_listener_are_not_read_and_hide_no_end(ring: Callable[[int], Ring]) -> None:
    two = ring(2)
    strangers = [socket.create_connection(("127.0.0.1", two.ports[1])) for _ in range(20)]
    two.watch()
    two.wait_until_watched(1, times=21)
    for stranger in strangers:
        stranger.sendall(b"\x80\x04garbage" * 1000)
    for stranger in strangers[:10]:
        stranger.close()  # the others stay
    two.tell(1, "nothing")  # it is alive
    waiting = [line.split()[4] for line in tcp() if line.split()[1].endswith(f":{two.ports[1]:04X}")]
    assert sum(int(queues.split(":")[1], 16) >= 9000 for queues in waiting) >= 20, "somebody has read what they sent"
    assert not two.store.check([keys.FAILED])
    two.ranks[1].kill()
    assert two.wait_for_reports(1) == {1}
    for stranger in strangers:
        stranger.close()


# Whole jobs ------------------------------------------------------------------------------------------------------


def assert_lost(codes: list[int | None], outputs: list[str], killed: list[int], why: str) -> None:
    for rank, (code, output) in enumerate(zip(codes, outputs, strict=True)):
        if rank not in killed:
            assert code == 171, output
            assert any(f": rank {gone} on {host_name()} ({why}" in output for gone in killed), output


@pytest.mark.parametrize(("where", "call"), [("build", 1), ("loss", 6), ("evaluate", 1)])
@pytest.mark.parametrize(("world_size", "killed"), [(2, 1), (3, 2), (4, 1)])
def test_survivors_see_that_the_process_has_ended_and_do_not_compare_beats(
    where: str, call: int, world_size: int, killed: int, forks: Forks, tmp_path: Path
) -> None:
    order = {"where": where, "call": call, "rank": killed, "signal": "SIGKILL"}
    line = ("train", *SETTINGS, f"--run-dir={tmp_path}", "--name=run", "--num-workers=1")
    with forks.running(*line, world_size=world_size, env={"PROBE": json.dumps(order)}) as job:
        codes = job.wait()
    assert codes[killed] == -9
    assert_lost(list(codes), [process.output for process in job.processes], [killed], ENDED)


def test_a_process_that_takes_the_place_of_none_in_a_group_does_not_end_it(forks: Forks, tmp_path: Path) -> None:
    """Two jobs on one port, by mistake."""
    port, go = free_port(), tmp_path / "go"
    line = ("train", *SETTINGS, f"--run-dir={tmp_path}", "--num-workers=0")
    arrived = tmp_path / "arrived"
    order = {"where": "loss", "call": 6, "rank": 0, "tell": str(arrived), "until": str(go)}
    env = {"PROBE": json.dumps(order)}
    ranks = [forks.start(*line, "--name=run", env=rank_env(r, 2, port) | env).processes[0] for r in range(2)]
    while not arrived.exists():
        assert ranks[0].code is None, ranks[0].output
        time.sleep(0.01)
    other = forks.start(*line, "--name=other", "--join-timeout-s=3", env=rank_env(1, 2, port)).processes[0]
    assert other.ended.wait(PATIENCE_S)
    assert "was complete before this rank came" in other.output
    go.touch()
    for process in ranks:
        assert process.ended.wait(PATIENCE_S)
        assert process.code == 0, process.output


def raised(error: BaseException) -> BaseException:
    """By Python."""
    with pytest.raises(type(error)) as caught:
        raise error
    return caught.value


def test_error_of_a_collective_that_lost_its_peer_is_known_from_others() -> None:
    closed = "[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.2]:4711"
    with pytest.raises(RuntimeError) as by_torch:
        torch.ones(2) @ torch.ones(3)
    assert not broke_collective(by_torch.value)  # not in the words of a lost peer
    by_torch.value.args = (closed,)
    assert broke_collective(by_torch.value)
    # A failed check of gloo's
    by_torch.value.args = ("[enforce fail at gloo/transport/tcp/pair.cc:446] op.preamble.length <= op.nbytes",)
    assert not broke_collective(by_torch.value)
    # Somebody's own error, and what a DataLoader's worker met
    assert not broke_collective(raised(RuntimeError(closed)))
    assert broke_collective(raised(dist.DistNetworkError("lost a rank of this host")))
    # Somebody knows more already: a rescue would not wait for the save that goes on beside the training
    assert not broke_collective(raised(PeerLost("a DataLoader worker died: [Errno 104] Connection reset by peer")))
