"""The line of ranks without an agent, two of them in one process, and which rank caused the end: from what the line
says, and from where the others were. Whole jobs are in `test_rendezvous` and `test_deadlines`."""

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
from rankup.group import line as lines
from rankup.group.line import Losses, MemberLine, Suspect, describe


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
    gc.collect()  # what other tests left
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


# Who was lost ---------------------------------------------------------------------------------------------------

HOSTS = ["node0", "node0", "node1", "node1"]


class Line:
    """What the others answer to `ask` is `signs`; None: nobody answers."""

    def __init__(self, signs: list[dict[str, Any]] | None) -> None:
        self.signs = signs
        self.deliver: Callable[[Mapping[str, Any]], None]

    def join(self) -> Mapping[str, Any]:
        raise AssertionError

    def listen(self, deliver: Callable[[Mapping[str, Any]], None]) -> None:
        self.deliver = deliver

    def say(self, kind: str, **values: Any) -> bool:
        assert (kind, values) == ("ask", {})
        if self.signs is not None:
            now = time.time()
            self.deliver({"is": "ranks", "ranks": [{**sign, "seen": now - sign["silent_s"]} for sign in self.signs]})
        return self.signs is not None


def sign(rank: int, *, waiting: bool = False, silent_s: float = 0.0) -> dict[str, Any]:
    """As it stands before the test begins: `silent_s` counts from its question."""
    return {"rank": rank, "phase": "step", "step": 7, "waiting": waiting, "silent_s": silent_s}


def found(
    message: Mapping[str, Any] | None = None, signs: list[dict[str, Any]] | None = None, *, waiting: bool = True,
    overdue: bool = False,
) -> list[Suspect]:
    """What rank 1 finds out."""
    line = Line(signs)
    heard = threading.Event()
    seen = Losses(line, 1, heard=heard)
    if message:
        line.deliver(message)
    assert heard.is_set() == bool(message)
    return seen.suspects(waiting=waiting, overdue=overdue)


def test_the_first_loss_counts() -> None:
    line = Line([])
    seen = Losses(line, 1, heard=threading.Event())
    line.deliver({"is": "lost", "ranks": [2], "why": "error: x", "code": 1})
    line.deliver({"is": "gone", "why": "its process has ended", "code": 137})
    assert [(each.rank, each.code) for each in seen.suspects(waiting=True, overdue=False)] == [(2, 1)]


@pytest.mark.parametrize(
    ("signs", "waiting", "text"),
    [
        ([sign(0, waiting=True), sign(2), sign(3, waiting=True)], True,
         "suspected: rank 2 on node1 (is alive, in step at step 7)"),
        ([sign(0, waiting=True), sign(2), sign(3, waiting=True, silent_s=9)], True,
         "suspected: rank 3 on node1 (gave no sign of life)"),
        ([sign(rank, waiting=True) for rank in (0, 2, 3)], True,
         "suspected: nobody, all ranks wait for each other"),
        ([sign(rank, waiting=True) for rank in (0, 2, 3)], False,
         "suspected: rank 1 on node0 (the others wait for it)"),
        (None, True, "suspected: rank 0 on node0 (it does not answer)"),
    ],
)
def test_where_nobody_has_ended_who_keeps_the_others_waiting_is_named(
    signs: list[dict[str, Any]] | None, waiting: bool, text: str
) -> None:
    assert describe(found(signs=signs, waiting=waiting, overdue=True), HOSTS) == text


def test_a_loss_that_comes_while_the_others_are_asked_counts() -> None:
    class Late(Line):
        def say(self, kind: str, **values: Any) -> bool:
            self.deliver({"is": "lost", "ranks": [2], "why": "is suspected by rank 0", "alive": True})
            return False

    suspects = Losses(Late(None), 1, heard=threading.Event()).suspects(waiting=True, overdue=True)
    assert describe(suspects, HOSTS) == "suspected: rank 2 on node1 (is suspected by rank 0)"


def test_a_rank_that_is_late_itself_blames_itself_where_the_others_have_left() -> None:
    gone = {"is": "gone", "why": "its process has ended", "code": 137}
    assert [each.rank for each in found(gone, waiting=False, overdue=True)] == [1]
    assert [each.rank for each in found(gone, waiting=True, overdue=True)] == [0]


def test_a_silent_leader_is_suspected_and_not_called_dead() -> None:
    suspects = found({"is": "gone", "why": "gave no sign of life for 30 s"})
    assert describe(suspects, HOSTS) == "suspected: rank 0 on node0 (gave no sign of life for 30 s)"


def test_an_answer_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(Line):
        def say(self, kind: str, **values: Any) -> bool:
            return True

    monkeypatch.setattr(lines, "WHERE_S", 0.0)
    assert Losses(Deaf(None), 1, heard=threading.Event()).signs(timeout_s=0.05) == []
