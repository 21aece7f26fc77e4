"""The line of ranks without an agent: two of them in one process. Whole jobs are in `test_rendezvous`."""

import gc
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from rankup.agent.protocol import Member
from rankup.agent.record import RecordWriter
from rankup.errors import JoinError
from rankup.group.line import MemberLine


class Place:
    """On loopback."""

    ip, master, hint = "127.0.0.1", "", "."

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind((self.ip, 0))
            self.port = probe.getsockname()[1]

    def find(self) -> tuple[str, int]:
        return self.ip, self.port

    def publish(self, port: int) -> None:
        assert port == self.port

    def serve(self) -> Mapping[str, Any]:
        return {"store": 7}


def member(rank: int) -> Member:
    return Member(f"token{rank}", rank, 1, 2, f"node{rank}", 100 + rank, "digest", 60.0)


@contextmanager
def joined() -> Iterator[list[MemberLine]]:
    """The lines of two ranks that have met."""
    place = Place()
    lines = [MemberLine(member(rank), {}, place, say=print, record=RecordWriter(None)) for rank in (0, 1)]
    commits: dict[int, Mapping[str, Any]] = {}

    def join(rank: int) -> None:
        commits[rank] = lines[rank].join()

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in (0, 1)]
    with ExitStack() as stack:
        for thread, line in zip(threads, lines, strict=True):
            stack.callback(line.close)
            thread.start()
        for thread in threads:
            thread.join(60)
        assert commits[0] == commits[1]
        assert (commits[0]["hosts"], commits[0]["store"]) == ([["node0", 1], ["node1", 1]], 7)
        yield lines


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_loss_before_anybody_listens_is_not_lost() -> None:
    with joined() as (first, second):
        second.close()
        until(lambda: not first.say("ask"))  # it has left its membership, as there is none any more
        heard: list[Mapping[str, Any]] = []
        first.listen(heard.append)
        (lost,) = [each for each in heard if each["is"] != "ranks"]
        assert (lost["is"], lost["ranks"], lost["code"]) == ("lost", [1], 137)


def test_a_rank_that_ends_badly_says_why_before_it_goes() -> None:
    with joined() as (first, second):
        heard: list[Mapping[str, Any]] = []
        first.listen(heard.append)
        assert second.say("end", rank=1, code=1, cause="ValueError: x", suspect=None)
        until(lambda: heard)
        assert (heard[0]["ranks"], heard[0]["code"], heard[0]["why"]) == ([1], 1, "ValueError: x")


def test_where_all_are_and_a_request_to_stop_reach_each() -> None:
    with joined() as lines:
        heard: list[list[Mapping[str, Any]]] = [[], []]
        for line, said in zip(lines, heard, strict=True):
            line.listen(said.append)
        lines[1].say("ask")
        until(lambda: heard[1])
        assert {sign["host"] for sign in heard[1][0]["ranks"]} <= {"node0", "node1"}
        lines[1].say("stop", signal="SIGTERM")
        until(lambda: heard[0] and len(heard[1]) == 2)
        assert heard[0] == heard[1][1:] == [{"is": "stop", "signal": "SIGTERM"}]


def test_the_end_of_rank_0_is_told_before_its_process_may_end() -> None:
    with joined() as (first, second):
        heard: list[Mapping[str, Any]] = []
        second.listen(heard.append)
        leader = first._leader
        assert leader is not None

        def say_and_do_no_more() -> None:
            leader.take("end", rank=0, code=1, cause="ValueError: x", suspect=None)
            until(lambda: heard)

        first._loop.call_soon_threadsafe(say_and_do_no_more)
        until(lambda: heard)
        assert (heard[0]["is"], heard[0]["ranks"], heard[0].get("code")) == ("lost", [0], 1)


def test_a_join_that_fails_closes_the_leaders_port() -> None:
    place, threads = Place(), set(threading.enumerate())
    first, other = replace(member(0), left_s=0.5), replace(member(1), left_s=0.5, world_size=4)
    lines = [MemberLine(each, {}, place, say=print, record=RecordWriter(None)) for each in (first, other)]
    with warnings.catch_warnings(record=True) as seen, ThreadPoolExecutor() as pool:
        warnings.simplefilter("always", ResourceWarning)
        for failed in [pool.submit(line.join) for line in lines]:
            with pytest.raises(JoinError, match="WORLD_SIZE=4"):
                failed.result()
        until(lambda: not [each for each in set(threading.enumerate()) - threads if each.name == "line"])
        gc.collect()
    assert [str(warning.message) for warning in seen] == []
